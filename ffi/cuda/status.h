// What a device tells the host about a wait that timed out: one per device, in pinned memory that the
// device sees, allocated by handlers.cc before the first launch and kept for the process's life. Read by
// the host before the next call on that device.
#ifndef MOK_CUDA_STATUS_H_
#define MOK_CUDA_STATUS_H_

#include <cstdint>

namespace mok::cuda {

struct Status {
  uint32_t claim;  // 0, or taken (atomicCAS_system) by the one wait that fills the rest
  uint32_t code;   // 0: fine. Written last, after a system fence that orders all below before it.
  int32_t op;      // Op of the task that waited
  int32_t rank;
  int64_t block, tile;
  int64_t counter, found, expected;
};

}  // namespace mok::cuda

#endif  // MOK_CUDA_STATUS_H_

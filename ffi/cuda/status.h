// What the host learns of waits that timed out. A rank's kernel fills its Status, in device memory and zeroed
// with the counters; the call's epilogue copies the first one filled to the device's Reports, in pinned memory
// that handlers.cc allocates before the first launch, keeps for the process's life and reads before every call.
#ifndef MOK_CUDA_STATUS_H_
#define MOK_CUDA_STATUS_H_

#include <cstdint>

namespace mok::cuda {

struct Status {
  uint32_t claim;  // 0, or taken by the one wait that fills the rest
  uint32_t code;   // 0: fine
  int32_t op;      // Op of the task that waited
  int32_t rank;
  int64_t block, tile;
  int64_t counter, found, expected;
};

// One for each call that waited in vain, however many of its ranks and waits did.
struct Report {
  uint32_t number;  // from 1 on, over the process's life. Written last, after a system fence
  uint64_t timeout_ns;
  Status status;
};

// Call `number` reports at number % kReports: so many may go unread before one takes another's place, and even
// then the numbers tell how many there were.
inline constexpr uint32_t kReports = 16;
struct Reports {
  uint32_t last;  // number given; only this device's kernels touch it
  Report at[kReports];
};

}  // namespace mok::cuda

#endif  // MOK_CUDA_STATUS_H_

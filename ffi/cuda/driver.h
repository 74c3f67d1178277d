// Puts one call's kernels on a stream, for every rank that this device holds. Called by handlers.cc;
// neither allocates nor waits, and everything it does can be captured into a CUDA graph.
#ifndef MOK_CUDA_DRIVER_H_
#define MOK_CUDA_DRIVER_H_

#include <cuda_runtime_api.h>

#include <cstdint>
#include <string>
#include <vector>

#include "../params.h"
#include "arena.h"
#include "megakernel.h"

namespace mok::cuda {

struct Options {
  Path path;
  const Group* group;    // of real ranks, or null: all ranks are here
  const int32_t* place;  // on the device; with a group
  uint64_t barrier_timeout_ns;
  int32_t refused;  // calls of this group that this rank has refused
  Launch launch;    // but for the status, which is each rank's own
  Reports* reports;
  // Test modes.
  bool test_mode;         // what is read before it is written is NaN; real ranks pause between the phases
  int64_t stuck_counter;  // -1, or a readiness counter that never fills
};

// Loads every kernel on the current device. Empty, or an error; likewise below.
std::string LoadKernels(int capability);

// `ranks`: all ranks of the group, in order, or with Options::group this device's alone. `workspace`: of all of them.
std::string Enqueue(const std::vector<Params>& ranks, void* workspace, int64_t workspace_bytes, const Options& options,
                    cudaStream_t stream);

}  // namespace mok::cuda

#endif  // MOK_CUDA_DRIVER_H_

// From the device to the host: one more report in pinned memory. By one thread.
#ifndef MOK_CUDA_PUBLISH_CUH_
#define MOK_CUDA_PUBLISH_CUH_

#include "status.h"

namespace mok::cuda {

__device__ inline void Publish(Reports* reports, Report report) {
  const uint32_t number = atomicAdd(&reports->last, 1u) + 1;
  Report& at = reports->at[number % kReports];
  report.number = at.number;  // until all the rest is there
  at = report;
  __threadfence_system();
  *static_cast<volatile uint32_t*>(&at.number) = number;
}

}  // namespace mok::cuda

#endif  // MOK_CUDA_PUBLISH_CUH_

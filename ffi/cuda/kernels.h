// The small kernels beside the megakernel, as the driver sees them. Every function returns null or what
// CUDA says of the launch.
#ifndef MOK_CUDA_KERNELS_H_
#define MOK_CUDA_KERNELS_H_

#include <cuda_runtime_api.h>

#include <cstdint>

#include "../params.h"
#include "megakernel.h"

namespace mok::cuda {

// Every rank's expert ids, as a kernel parameter.
struct IdTable {
  const int32_t* at[kMaxRanks];
};

// What tells whether a wait timed out, on any rank of the call, and whom to tell.
struct Outcome {
  const int32_t* control[kMaxRanks];  // Ring::control of each rank
  int64_t ranks;
  uint64_t timeout_ns;
  Reports* reports;
};

const char* LoadSchedule();
const char* LaunchSchedule(const Dims& dims, int64_t rank, const IdTable& ids, const Schedule& out, int32_t* scratch,
                           cudaStream_t stream);

const char* LoadQuantize();
// MXFP8: bfloat16 [rows, n] to rows of MxRowBytes(n), and where wanted the values that these have; unless `aborted`
// (null: never) points to something. to: null for nothing to do.
const char* LaunchQuantize(const void* from, int64_t rows, int64_t n, void* to, void* rounded, const int32_t* aborted,
                           cudaStream_t stream);

const char* LoadEpilogue();
// y or dx, and the router weights' gradient; NaN throughout where a rank has aborted, which rank 0 reports.
const char* LaunchEpilogue(const Params& params, const Outcome& outcome, cudaStream_t stream);
// Context rows behind the last block are zero: they leave the call as residuals.
const char* LaunchClearContext(const Params& params, cudaStream_t stream);

// The last error of a launch as text.
inline const char* Launched() {
  const cudaError_t error = cudaGetLastError();
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

// Loads a kernel, which CUDA otherwise does at the first launch, inside Execute or a capture.
template <typename... Kernels>
const char* Load(Kernels... kernels) {
  cudaError_t error = cudaSuccess;
  cudaFuncAttributes attributes;
  for (const void* kernel : {reinterpret_cast<const void*>(kernels)...}) {
    if (error == cudaSuccess) error = cudaFuncGetAttributes(&attributes, kernel);
  }
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

}  // namespace mok::cuda

#endif  // MOK_CUDA_KERNELS_H_

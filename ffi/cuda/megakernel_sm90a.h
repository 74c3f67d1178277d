// The Hopper kernel as megakernel.cu sees it.
#ifndef MOK_CUDA_MEGAKERNEL_SM90A_H_
#define MOK_CUDA_MEGAKERNEL_SM90A_H_

#include <cuda.h>

#include "gemm.cuh"
#include "megakernel.h"

namespace mok::cuda {

// For the copy engine: boxes of 64 x 64 of each matrix.
struct Maps {
  CUtensorMap at[kNumMatrices];
};

const char* LoadHopperKernel();
const char* LaunchHopperKernel(const Params& params, const PeerTable& peers, const Maps& maps, const Launch& launch,
                               cudaStream_t stream);

}  // namespace mok::cuda

#endif  // MOK_CUDA_MEGAKERNEL_SM90A_H_

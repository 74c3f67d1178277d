// The portable kernels as megakernel.cu sees them.
#ifndef MOK_CUDA_MEGAKERNEL_PORTABLE_H_
#define MOK_CUDA_MEGAKERNEL_PORTABLE_H_

#include "gemm.cuh"
#include "megakernel.h"

namespace mok::cuda {

const char* LoadPortableKernels();
const char* LaunchPortableKernel(const Params& params, const PeerTable& peers, const Matrices& matrices,
                                 const Launch& launch, cudaStream_t stream);

}  // namespace mok::cuda

#endif  // MOK_CUDA_MEGAKERNEL_PORTABLE_H_

// Loading and launching of the megakernels. Called by the driver.
#include <cuda.h>

#include "gemm.cuh"
#include "megakernel.h"
#include "megakernel_portable.h"
#include "megakernel_sm90a.h"

namespace mok::cuda {
namespace {

// The driver's encoder, found at run time: nothing links against the driver.
using EncodeTiled = CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*,
                                 const cuuint64_t*, const cuuint32_t*, const cuuint32_t*, CUtensorMapInterleave,
                                 CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

EncodeTiled FindEncodeTiled() {
  void* found = nullptr;
  cudaDriverEntryPointQueryResult result;
  const cudaError_t error =
      cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000, cudaEnableDefault, &result);
  return error == cudaSuccess && result == cudaDriverEntryPointSuccess ? reinterpret_cast<EncodeTiled>(found) : nullptr;
}

// Boxes of 64 x 64 bfloat16 in the swizzle that the tensor cores read.
bool Encode(EncodeTiled encode, const Matrix& m, CUtensorMap* map) {
  const cuuint64_t sizes[3] = {static_cast<cuuint64_t>(m.columns), static_cast<cuuint64_t>(m.rows),
                               static_cast<cuuint64_t>(m.matrices)};
  const cuuint64_t pitches[2] = {sizes[0] * 2, sizes[0] * sizes[1] * 2};
  const cuuint32_t box[3] = {64, 64, 1}, strides[3] = {1, 1, 1};
  return encode(map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 3, const_cast<void*>(m.base), sizes, pitches, box, strides,
                CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

}  // namespace

const char* LoadMegakernels(int capability) {
  const char* error = LoadPortableKernels();
  return error == nullptr && capability == 90 ? LoadHopperKernel() : error;
}

const char* LaunchMegakernel(Path path, const Params& params, const PeerTable& peers, const Launch& launch,
                             cudaStream_t stream) {
  const Matrices matrices = MatricesOf(params, params.dims.Exchanges() || !TilesOf(path).gathers);
  if (path == Path::kPortable) return LaunchPortableKernel(params, peers, matrices, launch, stream);
  static const EncodeTiled encode = FindEncodeTiled();
  if (encode == nullptr) return "the driver has no cuTensorMapEncodeTiled; CUDA 13 needs driver 580 or newer";
  Maps maps{};
  for (int i = 0; i < kNumMatrices; ++i) {
    const Matrix& m = matrices.at[i];
    if (m.base == nullptr || m.columns == 0 || m.rows == 0) continue;  // no task reads it
    if (!Encode(encode, m, &maps.at[i])) return "cuTensorMapEncodeTiled failed";
  }
  return LaunchHopperKernel(params, peers, maps, launch, stream);
}

}  // namespace mok::cuda

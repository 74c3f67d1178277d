// Loading and launching of the megakernels. Called by the driver.
#include <cuda.h>

#include <string>

#include "driver_api.h"
#include "gemm.cuh"
#include "megakernel.h"
#include "megakernel_portable.h"
#include "megakernel_sm90a.h"

namespace mok::cuda {
namespace {

// What the tiles of both paths are made of; Stages and Describe count on it.
constexpr bool Fit(const Tiles& t) {
  return 2 * t.gate_up_columns == kTileN && t.d_hidden_columns == kTileN && t.hidden_columns == kTileN &&
         t.gate_up_gradient.rows == kTileM && 2 * t.gate_up_gradient.columns == kTileN &&
         t.down_gradient.rows == kTileM && t.down_gradient.columns == kTileN;
}
static_assert(kRowTile == kTileM && Fit(TilesOf(Path::kPortable)) && Fit(TilesOf(Path::kHopper)),
              "every task is one product of kTileM x kTileN");

using EncodeTiled = CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*,
                                 const cuuint64_t*, const cuuint32_t*, const cuuint32_t*, CUtensorMapInterleave,
                                 CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

// Boxes of 64 x 64 bfloat16 in the swizzle that the tensor cores read.
CUresult Encode(EncodeTiled encode, const Matrix& m, CUtensorMap* map) {
  const cuuint64_t sizes[3] = {static_cast<cuuint64_t>(m.columns), static_cast<cuuint64_t>(m.rows),
                               static_cast<cuuint64_t>(m.matrices)};
  const cuuint64_t pitches[2] = {sizes[0] * 2, sizes[0] * sizes[1] * 2};
  const cuuint32_t box[3] = {64, 64, 1}, strides[3] = {1, 1, 1};
  return encode(map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 3, const_cast<void*>(m.base), sizes, pitches, box, strides,
                CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
}

std::string Refusal(CUresult error, int id, const Matrix& m) {
  static constexpr const char* kNames[] = {"x",
                                           "the kept x",
                                           "d_y",
                                           "h",
                                           "d_gate",
                                           "d_up",
                                           "gate",
                                           "up",
                                           "the kept gate",
                                           "the kept up",
                                           "w_gate",
                                           "w_up",
                                           "w_down",
                                           "w_gate for the gradient",
                                           "w_up for the gradient",
                                           "the shared expert's x",
                                           "its d_y",
                                           "its h",
                                           "its d_gate",
                                           "its d_up",
                                           "its gate",
                                           "its up",
                                           "its w_gate",
                                           "its w_up",
                                           "its w_down"};
  static_assert(sizeof(kNames) / sizeof(kNames[0]) == kNumMatrices, "every MatrixId has a name");
  return std::string("cuTensorMapEncodeTiled for ") + kNames[id] + ", bfloat16[" + std::to_string(m.matrices) + ", " +
         std::to_string(m.rows) + ", " + std::to_string(m.columns) + "]: " + TextOf(error);
}

}  // namespace

const char* LoadMegakernels(int capability) {
  const char* error = LoadPortableKernels();
  return error == nullptr && capability == 90 ? LoadHopperKernel() : error;
}

std::string LaunchMegakernel(Path path, const Params& params, const PeerTable& peers, const Launch& launch,
                             cudaStream_t stream) {
  const Matrices matrices = MatricesOf(params, Pulls(params.dims, TilesOf(path), params.pass));
  const auto text = [](const char* error) { return std::string(error == nullptr ? "" : error); };
  if (path == Path::kPortable) return text(LaunchPortableKernel(params, peers, matrices, launch, stream));
  static const auto encode = FindInDriver<EncodeTiled>("cuTensorMapEncodeTiled");
  if (encode == nullptr) return "the driver has no cuTensorMapEncodeTiled; CUDA 13 needs driver 580 or newer";
  Maps maps{};
  for (int i = 0; i < kNumMatrices; ++i) {
    const Matrix& m = matrices.at[i];
    if (m.base == nullptr || m.columns == 0 || m.rows == 0) continue;  // no task reads it
    const CUresult error = Encode(encode, m, &maps.at[i]);
    if (error != CUDA_SUCCESS) return Refusal(error, i, m);
  }
  return text(LaunchHopperKernel(params, peers, maps, launch, stream));
}

}  // namespace mok::cuda

// The MXFP8 codec on the lanes of a quad, which hold a block of 32 values of a row as the stages see them
// (fragment.cuh): the same numbers as numerics.h, by the conversions that compute capability 8.9 and later has.
#ifndef MOK_CUDA_MXFP8_CUH_
#define MOK_CUDA_MXFP8_CUH_

#include <cuda_fp16.h>

#include <cstdint>
#include <cstring>

#include "../numerics.h"
#include "fragment.cuh"
#include "ptx.cuh"

namespace mok::cuda {

// Of all 32 values.
__device__ __forceinline__ uint8_t QuadScale(const Vector<BFloat16>& v) {
  uint32_t most = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) most = __vmaxu2(most, v.w[i] & 0x7fff7fffu);
  most = __vmaxu2(most, __shfl_xor_sync(~0u, most, 1));
  most = __vmaxu2(most, __shfl_xor_sync(~0u, most, 2));
  return MxScale(Max(most << 16, most & 0xffff0000u));
}

// Eight e4m3 values.
__device__ __forceinline__ uint2 Encode(const Vector<BFloat16>& v, uint8_t scale) {
  const float inverse = MxInverse(scale);
  float value[8];
  v.Widen(value);
  uint32_t words[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    words[i] = 0;
#pragma unroll
    for (int j = 0; j < 4; j += 2) {
      const float low = value[4 * i + j] * inverse, high = value[4 * i + j + 1] * inverse;
#if __CUDA_ARCH__ >= 890
      const uint32_t pair = ptx::ToE4M3x2(low, high);
#else
      const uint32_t pair = ToE4M3(low) | static_cast<uint32_t>(ToE4M3(high)) << 8;
#endif
      words[i] |= pair << 8 * j;
    }
  }
  return make_uint2(words[0], words[1]);
}

__device__ __forceinline__ void Decode(uint2 codes, float scale, Vector<BFloat16>* v) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const uint32_t pair = (i < 2 ? codes.x : codes.y) >> (i % 2 * 16);
#if __CUDA_ARCH__ >= 890
    const uint32_t halves = ptx::FromE4M3x2(static_cast<uint16_t>(pair));
    __half2 both;
    memcpy(&both, &halves, sizeof(both));
    const float2 value = __half22float2(both);
#else
    const float2 value = {E4M3ToFloat(pair & 0xff), E4M3ToFloat(pair >> 8 & 0xff)};
#endif
    v->w[i] = Vector<BFloat16>::Pack(value.x * scale, value.y * scale);
  }
}

// Two neighbouring columns, of which `columns` are there (maybe negative): the others become 0.
template <bool whole>
__device__ __forceinline__ uint32_t Cut(uint32_t pair, int columns) {
  if (whole) return columns > 0 ? pair : 0;
  return pair & ((columns > 0 ? 0xffffu : 0u) | (columns > 1 ? 0xffff0000u : 0u));
}

// To MXFP8 and back. columns: those that the row has from the lane's first one on.
template <bool whole>
__device__ __forceinline__ void RoundToMx(Vector<BFloat16>& v, int columns) {
#pragma unroll
  for (int i = 0; i < 4; ++i) v.w[i] = Cut<whole>(v.w[i], columns - 2 * i);
  const uint8_t scale = QuadScale(v);
  Decode(Encode(v, scale), MxScaleToFloat(scale), &v);
}
template <bool whole>
__device__ __forceinline__ void RoundToMx(Half<BFloat16>& half, int columns) {
  Vector<BFloat16> v;  // of other columns, but of the same block
#pragma unroll
  for (int i = 0; i < 4; ++i) v.w[i] = Cut<whole>(half.at[i].w, columns - 8 * i);
  const uint8_t scale = QuadScale(v);
  Decode(Encode(v, scale), MxScaleToFloat(scale), &v);
#pragma unroll
  for (int i = 0; i < 4; ++i) half.at[i].w = v.w[i];
}

}  // namespace mok::cuda

#endif  // MOK_CUDA_MXFP8_CUH_

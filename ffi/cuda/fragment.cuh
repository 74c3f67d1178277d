// A product tile as the math warps hold it, and rows of it as the stages want them: 8 columns of one row in
// one lane. Used by stages.cuh.
//
// 8 warps hold a tile of 128 x 256, warp w rows 16 w to 16 w + 15. A lane holds sum[4 j + i] at
// row 16 w + lane / 4 + i / 2 * 8, column 8 j + lane % 4 * 2 + i % 2: what mma.sync and wgmma both leave.
// The four lanes of one row are a quad.
#ifndef MOK_CUDA_FRAGMENT_CUH_
#define MOK_CUDA_FRAGMENT_CUH_

#include <cuda_bf16.h>

#include <cstdint>
#include <cstring>

#include "../numerics.h"

namespace mok::cuda {

inline constexpr int kSums = 128;  // of a lane

// ---- 32 columns of a row, as the stages see them: lane t of the quad holds columns 8 t to 8 t + 7 ----

// A lane's 4 words against its quad's: word i of lane t becomes word t of lane i.
__device__ __forceinline__ void TransposeQuad(uint32_t (&w)[4], int t) {
  const bool odd = t & 1, high = t & 2;
  const uint32_t a = __shfl_xor_sync(~0u, odd ? w[0] : w[1], 1), b = __shfl_xor_sync(~0u, odd ? w[2] : w[3], 1);
  w[0] = odd ? a : w[0];
  w[1] = odd ? w[1] : a;
  w[2] = odd ? b : w[2];
  w[3] = odd ? w[3] : b;
  const uint32_t c = __shfl_xor_sync(~0u, high ? w[0] : w[2], 2), d = __shfl_xor_sync(~0u, high ? w[1] : w[3], 2);
  w[0] = high ? c : w[0];
  w[1] = high ? d : w[1];
  w[2] = high ? w[2] : c;
  w[3] = high ? w[3] : d;
}

// The sums of one group of 32 columns: [row half][pair at column 8 i + 2 t][column].
using Group = float[2][4][2];

template <int index>
__device__ __forceinline__ void CopyGroup(const float (&sum)[kSums], Group& group) {
#pragma unroll
  for (int i = 0; i < 16; ++i) group[i / 2 % 2][i / 4][i % 2] = sum[16 * index + i];
}
__device__ __forceinline__ void SelectGroup(const float (&sum)[kSums], int index, Group& group) {
  switch (index) {
    case 0: return CopyGroup<0>(sum, group);
    case 1: return CopyGroup<1>(sum, group);
    case 2: return CopyGroup<2>(sum, group);
    case 3: return CopyGroup<3>(sum, group);
    case 4: return CopyGroup<4>(sum, group);
    case 5: return CopyGroup<5>(sum, group);
    case 6: return CopyGroup<6>(sum, group);
    default: return CopyGroup<7>(sum, group);
  }
}

// Half of a group: a switch over all of them selects fewer registers at a time. index: 2 * group + row half.
template <int index>
__device__ __forceinline__ void CopyHalf(const float (&sum)[kSums], float (&pairs)[4][2]) {
#pragma unroll
  for (int i = 0; i < 8; ++i) pairs[i / 2][i % 2] = sum[index / 2 * 16 + i / 2 * 4 + index % 2 * 2 + i % 2];
}
__device__ __forceinline__ void SelectHalf(const float (&sum)[kSums], int index, float (&pairs)[4][2]) {
  switch (index) {
    case 0: return CopyHalf<0>(sum, pairs);
    case 1: return CopyHalf<1>(sum, pairs);
    case 2: return CopyHalf<2>(sum, pairs);
    case 3: return CopyHalf<3>(sum, pairs);
    case 4: return CopyHalf<4>(sum, pairs);
    case 5: return CopyHalf<5>(sum, pairs);
    case 6: return CopyHalf<6>(sum, pairs);
    case 7: return CopyHalf<7>(sum, pairs);
    case 8: return CopyHalf<8>(sum, pairs);
    case 9: return CopyHalf<9>(sum, pairs);
    case 10: return CopyHalf<10>(sum, pairs);
    case 11: return CopyHalf<11>(sum, pairs);
    case 12: return CopyHalf<12>(sum, pairs);
    case 13: return CopyHalf<13>(sum, pairs);
    case 14: return CopyHalf<14>(sum, pairs);
    default: return CopyHalf<15>(sum, pairs);
  }
}

// Two neighbouring columns of a row in the storage dtype.
template <typename S>
struct Pair;

template <>
struct Pair<BFloat16> {
  uint32_t w;

  __device__ __forceinline__ void Clear() { w = 0; }
  __device__ __forceinline__ void Round(const float (&v)[2]) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(v[0], v[1]);
    memcpy(&w, &pair, sizeof(w));
  }
  __device__ __forceinline__ void Widen(float (&v)[2]) const {
    v[0] = __uint_as_float(w << 16);
    v[1] = __uint_as_float(w & 0xffff0000u);
  }
  // whole: both columns are there or none; else `columns` (of 2, maybe negative) are.
  template <bool whole>
  __device__ __forceinline__ void Load(const BFloat16* from, int columns) {
    Clear();
    if constexpr (whole) {
      if (columns > 0) w = __ldcg(reinterpret_cast<const unsigned int*>(from));
    } else {
      if (columns > 0) w = __ldcg(reinterpret_cast<const unsigned short*>(from));
      if (columns > 1) w |= static_cast<uint32_t>(__ldcg(reinterpret_cast<const unsigned short*>(from + 1))) << 16;
    }
  }
  template <bool whole>
  __device__ __forceinline__ void Store(BFloat16* to, int columns) const {
    if constexpr (whole) {
      if (columns > 0) *reinterpret_cast<uint32_t*>(to) = w;
    } else {
      if (columns > 0) to[0].bits = static_cast<uint16_t>(w);
      if (columns > 1) to[1].bits = static_cast<uint16_t>(w >> 16);
    }
  }
};

template <>
struct Pair<float> {
  float v[2];

  __device__ __forceinline__ void Clear() { v[0] = v[1] = 0; }
  __device__ __forceinline__ void Round(const float (&from)[2]) { v[0] = from[0], v[1] = from[1]; }
  __device__ __forceinline__ void Widen(float (&to)[2]) const { to[0] = v[0], to[1] = v[1]; }
  template <bool whole>
  __device__ __forceinline__ void Load(const float* from, int columns) {
    Clear();
    if constexpr (whole) {
      if (columns <= 0) return;
      const float2 both = __ldcg(reinterpret_cast<const float2*>(from));
      v[0] = both.x, v[1] = both.y;
    } else {
      if (columns > 0) v[0] = __ldcg(from);
      if (columns > 1) v[1] = __ldcg(from + 1);
    }
  }
  template <bool whole>
  __device__ __forceinline__ void Store(float* to, int columns) const {
    if constexpr (whole) {
      if (columns > 0) *reinterpret_cast<float2*>(to) = make_float2(v[0], v[1]);
    } else {
      if (columns > 0) to[0] = v[0];
      if (columns > 1) to[1] = v[1];
    }
  }
};

// Half of a group in the storage dtype, as the sums have it: at[i] is at column 8 i + 2 t. What ldmatrix and stmatrix
// take too.
template <typename S>
struct Half {
  Pair<S> at[4];
};

// Eight values of a row in the storage dtype.
template <typename S>
struct Vector;

template <>
struct Vector<BFloat16> {
  uint32_t w[4];

  __device__ __forceinline__ static uint32_t Pack(float low, float high) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    uint32_t word;
    memcpy(&word, &pair, sizeof(word));
    return word;
  }
  __device__ __forceinline__ void FromSums(const float (&pairs)[4][2], int t) {
#pragma unroll
    for (int i = 0; i < 4; ++i) w[i] = Pack(pairs[i][0], pairs[i][1]);
    TransposeQuad(w, t);
  }
  __device__ __forceinline__ void Round(const float (&v)[8]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) w[i] = Pack(v[2 * i], v[2 * i + 1]);
  }
  __device__ __forceinline__ void Widen(float (&v)[8]) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      v[2 * i] = __uint_as_float(w[i] << 16);
      v[2 * i + 1] = __uint_as_float(w[i] & 0xffff0000u);
    }
  }
  __device__ __forceinline__ void Clear() { w[0] = w[1] = w[2] = w[3] = 0; }
  // whole: all eight columns are there or none; else `columns` (of 8, maybe negative) are.
  template <bool whole>
  __device__ __forceinline__ void Store(BFloat16* to, int columns) const {
    if constexpr (whole) {
      if (columns > 0) *reinterpret_cast<uint4*>(to) = make_uint4(w[0], w[1], w[2], w[3]);
    } else {
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        if (i < columns) to[i].bits = static_cast<uint16_t>(w[i / 2] >> (i % 2 * 16));
      }
    }
  }
  // Past the first level cache: the ring is written while the kernel runs.
  template <bool whole>
  __device__ __forceinline__ void Load(const BFloat16* from, int columns) {
    Clear();
    if constexpr (whole) {
      if (columns > 0) {
        const uint4 loaded = __ldcg(reinterpret_cast<const uint4*>(from));
        w[0] = loaded.x, w[1] = loaded.y, w[2] = loaded.z, w[3] = loaded.w;
      }
    } else {
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const uint32_t bits = i < columns ? __ldcg(reinterpret_cast<const unsigned short*>(from + i)) : 0;
        w[i / 2] |= bits << (i % 2 * 16);
      }
    }
  }
};

template <>
struct Vector<float> {
  float v[8];

  __device__ __forceinline__ void FromSums(const float (&pairs)[4][2], int t) {
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      uint32_t w[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) w[i] = __float_as_uint(pairs[i][c]);
      TransposeQuad(w, t);
#pragma unroll
      for (int i = 0; i < 4; ++i) v[2 * i + c] = __uint_as_float(w[i]);
    }
  }
  __device__ __forceinline__ void Round(const float (&from)[8]) {
#pragma unroll
    for (int i = 0; i < 8; ++i) v[i] = from[i];
  }
  __device__ __forceinline__ void Widen(float (&to)[8]) const {
#pragma unroll
    for (int i = 0; i < 8; ++i) to[i] = v[i];
  }
  __device__ __forceinline__ void Clear() {
#pragma unroll
    for (float& value : v) value = 0;
  }
  template <bool whole>
  __device__ __forceinline__ void Store(float* to, int columns) const {
    if constexpr (whole) {
      if (columns <= 0) return;
      *reinterpret_cast<float4*>(to) = make_float4(v[0], v[1], v[2], v[3]);
      *reinterpret_cast<float4*>(to + 4) = make_float4(v[4], v[5], v[6], v[7]);
    } else {
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        if (i < columns) to[i] = v[i];
      }
    }
  }
  template <bool whole>
  __device__ __forceinline__ void Load(const float* from, int columns) {
    Clear();
    if constexpr (whole) {
      if (columns <= 0) return;
      const float4 low = __ldcg(reinterpret_cast<const float4*>(from));
      const float4 high = __ldcg(reinterpret_cast<const float4*>(from + 4));
      v[0] = low.x, v[1] = low.y, v[2] = low.z, v[3] = low.w;
      v[4] = high.x, v[5] = high.y, v[6] = high.z, v[7] = high.w;
    } else {
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        if (i < columns) v[i] = __ldcg(from + i);
      }
    }
  }
};

}  // namespace mok::cuda

#endif  // MOK_CUDA_FRAGMENT_CUH_

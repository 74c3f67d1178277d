// Number formats and the activation, for host and CUDA alike. Knows neither XLA nor CUDA.
#ifndef MOK_NUMERICS_H_
#define MOK_NUMERICS_H_

#include <cstdint>
#include <cstring>

#ifdef __CUDACC__
#define MOK_HD __host__ __device__
#else
#define MOK_HD
#endif

namespace mok {

// bfloat16 storage; all arithmetic is done in float.
struct BFloat16 {
  uint16_t bits;
};

MOK_HD inline uint32_t FloatBits(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
}
MOK_HD inline float FloatOf(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

MOK_HD inline float ToFloat(BFloat16 value) { return FloatOf(static_cast<uint32_t>(value.bits) << 16); }

// Rounds to nearest even; a NaN stays a (quiet) NaN.
MOK_HD inline BFloat16 ToBFloat16(float value) {
  const uint32_t bits = FloatBits(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) {
    return {static_cast<uint16_t>((bits >> 16) | 0x40u)};
  }
  return {static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16)};
}

// The dtype of every sum over values stored as S.
template <typename S>
struct Numerics {  // float, double: stored as summed
  using Wide = S;
  MOK_HD static Wide Widen(S value) { return value; }
  MOK_HD static S Round(Wide value) { return value; }
};
template <>
struct Numerics<BFloat16> {
  using Wide = float;
  MOK_HD static Wide Widen(BFloat16 value) { return ToFloat(value); }
  MOK_HD static BFloat16 Round(Wide value) { return ToBFloat16(value); }
};

// ---- MXFP8: blocks of 32 e4m3 values along the contraction, each block with an e8m0 scale ----
//
// scale = 2^ceil(log2(amax / 448)), the least power of two that brings the block into e4m3's range, and at
// least 2^-127, also where all are zero. Values are rounded to nearest even. A block with an infinity or a
// NaN has the largest scale, 2^120: an infinity saturates to 448, whose product with it is an infinity again,
// and a NaN stays one. Every value of mok_jax/mxfp8.py is the same bit for bit.
// Source: OCP Microscaling Formats (MX) v1.0; the scale rounded up as in Mixture-of-Kittens.

inline constexpr int64_t kMxBlock = 32;

// A row as it travels: chunks of 1024 values, each chunk its 32 scales and then its values. The last one has as
// many values as are left, up to a multiple of 16 bytes, and 32 scales none the less.
inline constexpr int64_t kMxChunk = 1024, kMxChunkBytes = kMxChunk / kMxBlock + kMxChunk;
MOK_HD inline int64_t MxRowBytes(int64_t n) {
  return (n + kMxChunk - 1) / kMxChunk * (kMxChunkBytes - kMxChunk) + (n + 15) / 16 * 16;
}
MOK_HD inline int64_t MxScaleAt(int64_t i) { return i / kMxChunk * kMxChunkBytes + i % kMxChunk / kMxBlock; }
MOK_HD inline int64_t MxValueAt(int64_t i) { return i / kMxChunk * kMxChunkBytes + kMxChunk / kMxBlock + i % kMxChunk; }

// From FloatBits(amax), without the sign: a maximum over the bits finds infinities and NaNs too.
MOK_HD inline uint8_t MxScale(uint32_t amax) {
  constexpr uint32_t kInfinity = 0x7f800000u, kBeyond448 = 0x001fffffu;  // a significand above 1.75 carries
  const uint32_t exponent = ((amax < kInfinity ? amax : kInfinity) + kBeyond448) >> 23;
  return static_cast<uint8_t>(exponent > 8 ? exponent - 8 : 0);  // 448 = 1.75 * 2^8
}
MOK_HD inline float MxScaleToFloat(uint8_t scale) {
  return FloatOf(scale == 0 ? 0x00400000u : scale == 255 ? 0x7fc00000u : static_cast<uint32_t>(scale) << 23);
}
// 1 / scale, of a scale that MxScale returned.
MOK_HD inline float MxInverse(uint8_t scale) { return FloatOf((254u - scale) << 23); }

// Saturates; a NaN stays one.
MOK_HD inline uint8_t ToE4M3(float value) {
  const uint32_t bits = FloatBits(value), magnitude = bits & 0x7fffffffu;
  const uint32_t sign = bits >> 24 & 0x80u;
  if (magnitude > 0x7f800000u) return static_cast<uint8_t>(sign | 0x7fu);
  uint32_t code;
  if (magnitude < 121u << 23) {  // below 2^-6: a multiple of 2^-9, which is the last bit of 2^14 + value
    code = FloatBits(FloatOf(magnitude) + 0x1p14f) - FloatBits(0x1p14f);
  } else {
    code = ((magnitude + 0x7ffffu + (magnitude >> 20 & 1u)) >> 20) - (120u << 3);
  }
  return static_cast<uint8_t>(sign | (code < 0x7eu ? code : 0x7eu));
}
MOK_HD inline float E4M3ToFloat(uint8_t code) {
  const uint32_t sign = static_cast<uint32_t>(code & 0x80u) << 24, magnitude = code & 0x7fu;
  if (magnitude == 0x7fu) return FloatOf(sign | 0x7fc00000u);
  const float value = magnitude < 8u ? static_cast<float>(magnitude) * 0x1p-9f : FloatOf((magnitude + 960u) << 20);
  return FloatOf(FloatBits(value) | sign);
}

// Clamped SwiGLU: h = silu(min(g, limit)) * clamp(u, -limit, limit). Without a clamp the limit is
// infinite. The gradient is zero outside the limits and passes at equality. A NaN stays a NaN: every
// comparison with it is false. The caller supplies the sigmoid, so that it may be vectorised.
template <typename Wide>
struct SwiGlu {
  Wide limit;

  MOK_HD Wide Gate(Wide gate) const { return gate > limit ? limit : gate; }
  MOK_HD Wide Up(Wide up) const { return up > limit ? limit : (up < -limit ? -limit : up); }

  // gate and up already clamped; sigmoid = 1 / (1 + exp(-gate)).
  MOK_HD static Wide Forward(Wide gate, Wide up, Wide sigmoid) { return gate * sigmoid * up; }

  // From the values before the clamp; sigmoid is that of the clamped gate.
  MOK_HD void Backward(Wide gate, Wide up, Wide sigmoid, Wide d_h, Wide* d_gate, Wide* d_up) const {
    const Wide g = Gate(gate), u = Up(up);
    const Wide silu = g * sigmoid;
    const Wide d_silu = sigmoid * (Wide(1) + g * (Wide(1) - sigmoid));
    *d_gate = gate > limit ? Wide(0) : d_h * u * d_silu;
    *d_up = (up > limit || up < -limit) ? Wide(0) : d_h * silu;
  }
};

}  // namespace mok

#endif  // MOK_NUMERICS_H_

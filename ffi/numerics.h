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

MOK_HD inline float ToFloat(BFloat16 value) {
  const uint32_t bits = static_cast<uint32_t>(value.bits) << 16;
  float result;
  std::memcpy(&result, &bits, sizeof(result));
  return result;
}

// Rounds to nearest even; a NaN stays a (quiet) NaN.
MOK_HD inline BFloat16 ToBFloat16(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
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

// What becomes of a tile after its product: the activation and its gradient, the router weights' gradient,
// rounding, and where each result goes. Shared by the portable and the Hopper kernel.
//
// Fragments: 8 warps hold a tile of 128 x 256, warp w rows 16 w to 16 w + 15. A lane holds sum[4 j + i] at
// row 16 w + lane / 4 + i / 2 * 8, column 8 j + lane % 4 * 2 + i % 2: what mma.sync and wgmma both leave.
// The four lanes of one row are a quad.
#ifndef MOK_CUDA_STAGES_CUH_
#define MOK_CUDA_STAGES_CUH_

#include <cuda_bf16.h>

#include "../numerics.h"
#include "gemm.cuh"

namespace mok::cuda {

inline constexpr int kSums = 128;  // of a lane

// ---- rows of 32 columns, as a quad holds them: 8 values a lane, pair i at column 8 i + 2 t ----

// A lane's 4 words against its quad's: word i of lane t becomes word t of lane i.
__device__ __forceinline__ void TransposeQuad(uint32_t (&w)[4], int t) {
  const bool odd = t & 1, high = t & 2;
  const uint32_t a = __shfl_xor_sync(~0u, odd ? w[0] : w[1], 1), b = __shfl_xor_sync(~0u, odd ? w[2] : w[3], 1);
  (odd ? w[0] : w[1]) = a;
  (odd ? w[2] : w[3]) = b;
  const uint32_t c = __shfl_xor_sync(~0u, high ? w[0] : w[2], 2), d = __shfl_xor_sync(~0u, high ? w[1] : w[3], 2);
  (high ? w[0] : w[2]) = c;
  (high ? w[1] : w[3]) = d;
}

__device__ __forceinline__ uint32_t Pack(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  uint32_t word;
  memcpy(&word, &pair, sizeof(word));
  return word;
}
__device__ __forceinline__ void Unpack(uint32_t word, float* low, float* high) {
  *low = __uint_as_float(word << 16);
  *high = __uint_as_float(word & 0xffff0000u);
}

// Stores (loads) columns [0, columns) of 32 at `row`; every lane of the quad must call it. `active`: whether
// this row takes part. Whole vectors where alignment and columns allow.
template <typename S>
__device__ __forceinline__ void StoreRow(S* row, const float (&v)[8], int columns, bool vectors, bool active, int t);

template <>
__device__ __forceinline__ void StoreRow<BFloat16>(BFloat16* row, const float (&v)[8], int columns, bool vectors,
                                                   bool active, int t) {
  uint32_t w[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) w[i] = Pack(v[2 * i], v[2 * i + 1]);
  TransposeQuad(w, t);
  if (!active) return;
  if (vectors && 8 * t + 8 <= columns) {
    *reinterpret_cast<uint4*>(row + 8 * t) = make_uint4(w[0], w[1], w[2], w[3]);
    return;
  }
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    if (8 * t + i < columns) row[8 * t + i].bits = static_cast<uint16_t>(w[i / 2] >> (i % 2 * 16));
  }
}

template <>
__device__ __forceinline__ void StoreRow<float>(float* row, const float (&v)[8], int columns, bool vectors, bool active,
                                                int t) {
  if (!active) return;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int c = 8 * i + 2 * t;
    if (vectors && c + 2 <= columns) {
      *reinterpret_cast<float2*>(row + c) = make_float2(v[2 * i], v[2 * i + 1]);
    } else {
      if (c < columns) row[c] = v[2 * i];
      if (c + 1 < columns) row[c + 1] = v[2 * i + 1];
    }
  }
}

// Past the first level cache: the ring is written while the kernel runs.
template <typename S>
__device__ __forceinline__ void LoadRow(const S* row, float (&v)[8], int columns, bool vectors, bool active, int t);

template <>
__device__ __forceinline__ void LoadRow<BFloat16>(const BFloat16* row, float (&v)[8], int columns, bool vectors,
                                                  bool active, int t) {
  uint32_t w[4] = {};
  if (active) {
    if (vectors && 8 * t + 8 <= columns) {
      const uint4 loaded = __ldcg(reinterpret_cast<const uint4*>(row + 8 * t));
      w[0] = loaded.x, w[1] = loaded.y, w[2] = loaded.z, w[3] = loaded.w;
    } else {
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        if (8 * t + i < columns) {
          w[i / 2] |= static_cast<uint32_t>(__ldcg(reinterpret_cast<const unsigned short*>(row + 8 * t + i)))
                      << (i % 2 * 16);
        }
      }
    }
  }
  TransposeQuad(w, t);
#pragma unroll
  for (int i = 0; i < 4; ++i) Unpack(w[i], &v[2 * i], &v[2 * i + 1]);
}

template <>
__device__ __forceinline__ void LoadRow<float>(const float* row, float (&v)[8], int columns, bool vectors, bool active,
                                               int t) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int c = 8 * i + 2 * t;
    float2 pair = make_float2(0, 0);
    if (active && vectors && c + 2 <= columns) {
      pair = __ldcg(reinterpret_cast<const float2*>(row + c));
    } else if (active) {
      if (c < columns) pair.x = __ldcg(row + c);
      if (c + 1 < columns) pair.y = __ldcg(row + c + 1);
    }
    v[2 * i] = pair.x;
    v[2 * i + 1] = pair.y;
  }
}

template <typename S>
__device__ __forceinline__ float Rounded(float value);
template <>
__device__ __forceinline__ float Rounded<float>(float value) {
  return value;
}
template <>
__device__ __forceinline__ float Rounded<BFloat16>(float value) {
  return __bfloat162float(__float2bfloat16_rn(value));
}

// As exact as the storage dtype can show.
template <typename S>
__device__ __forceinline__ float Sigmoid(float value);
template <>
__device__ __forceinline__ float Sigmoid<float>(float value) {
  return 1.0f / (1.0f + expf(-value));
}
template <>
__device__ __forceinline__ float Sigmoid<BFloat16>(float value) {
  return __fdividef(1.0f, 1.0f + __expf(-value));
}

// ---- the stages ----

// One CTA's math warps on one task. S is the storage dtype.
template <typename S>
class Stages {
 public:
  // warp: of the 8 that hold the tile.
  __device__ Stages(const Params& params, int warp, int lane)
      : p_(params),
        partials_(static_cast<int>(CeilDiv(params.dims.intermediate, kTileN))),
        row_(16 * warp + lane / 4),
        lane_(lane),
        t_(lane % 4),
        activation_{static_cast<float>(params.swiglu_limit)} {}

  // What the sums of a weight gradient begin with: the carry, or zeros.
  __device__ __forceinline__ void Begin(const Work& w, float (&sum)[kSums]) const {
    const bool carried = w.task.carry_in;
    // Careful: without an operation between the loads and the first product ptxas puts the loads into the
    // products' pipeline and then serialises all of them (its warning C7515). One that it cannot see is one.
    const float one = p_.dims.hidden > 0 ? 1.0f : 0.0f;
    ForCarry(w, [&](float* at, int columns, bool vectors, bool active, int j) {
      float v[8];
      LoadRow<float>(at, v, columns, vectors, active && carried, t_);
#pragma unroll
      for (float& value : v) value *= one;
      Put(sum, j, v);
    });
  }

  __device__ __forceinline__ void End(const Work& w, float (&sum)[kSums]) const {
    switch (RoutedOp(w.task.op)) {
      case Op::kGateUp: return GateUp(w, sum);
      case Op::kDown: return Out(w, sum, p_.y);
      case Op::kDgradDown: return DgradDown(w, sum);
      case Op::kDgradGateUp:
        Out(w, sum, p_.d_x);
        if (w.task.tile == 0 && !w.shared && !p_.dims.Exchanges()) StoreRouterGradient(w);
        return;
      case Op::kGradGateUp:
      case Op::kGradDown: return WeightGradient(w, sum);
      default: return;
    }
  }

 private:
  // The 8 values of row `half` in 32-column group j / 2: j = 2 * group + half.
  __device__ static void Get(const float (&sum)[kSums], int j, float (&v)[8]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      v[2 * i] = sum[16 * (j / 2) + 4 * i + 2 * (j % 2)];
      v[2 * i + 1] = sum[16 * (j / 2) + 4 * i + 2 * (j % 2) + 1];
    }
  }
  __device__ static void Put(float (&sum)[kSums], int j, const float (&v)[8]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      sum[16 * (j / 2) + 4 * i + 2 * (j % 2)] = v[2 * i];
      sum[16 * (j / 2) + 4 * i + 2 * (j % 2) + 1] = v[2 * i + 1];
    }
  }

  __device__ static S* At(void* base, int64_t element) {
    return base == nullptr ? nullptr : static_cast<S*>(base) + element;
  }
  // Whether rows of this length keep 16-byte vectors aligned (8-byte ones of float).
  template <typename T>
  __device__ static bool Vectors(int64_t columns) {
    return columns % (sizeof(T) == 2 ? 8 : 2) == 0;
  }
  __device__ int64_t Width(const Work& w) const {
    return w.shared ? p_.dims.shared_intermediate : p_.dims.intermediate;
  }
  __device__ bool Backward() const { return p_.pass.direction == Direction::kBackward; }
  __device__ bool KeepsContext(const Work& w) const { return w.task.macrobatch == 0 && p_.pass.context; }
  __device__ void* Gate(const Work& w) const {
    if (w.shared) return p_.pass.context ? p_.context.shared_gate : p_.ring.shared_gate;
    return KeepsContext(w) ? p_.context.gate : p_.ring.gate;
  }
  __device__ void* Up(const Work& w) const {
    if (w.shared) return p_.pass.context ? p_.context.shared_up : p_.ring.shared_up;
    return KeepsContext(w) ? p_.context.up : p_.ring.up;
  }

  // Gate in the first half of the tile's columns, up in the second.
  __device__ __forceinline__ void GateUp(const Work& w, const float (&sum)[kSums]) const {
    const int64_t width = Width(w);
    const bool vectors = Vectors<S>(width);
    void *gate = Gate(w), *up = Up(w), *h = w.shared ? p_.ring.shared_h : p_.ring.h;
    const bool clears = !w.shared && KeepsContext(w);  // padding rows leave the call as zeros
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const int row = row_ + j % 2 * 8, column = w.column + j / 2 * 32;
      const int columns = static_cast<int>(Min(32, width - column));
      const bool exists = row < w.count;
      const int64_t at = (static_cast<int64_t>(w.row) + row) * width + column;
      float g[8], u[8];
      Get(sum, j, g);
      Get(sum, j + 8, u);
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        g[i] = exists ? Rounded<S>(g[i]) : 0.0f;
        u[i] = exists ? Rounded<S>(u[i]) : 0.0f;
      }
      if (gate != nullptr) {
        StoreRow(At(gate, at), g, columns, vectors, exists || clears, t_);
        StoreRow(At(up, at), u, columns, vectors, exists || clears, t_);
      }
      if (Backward()) continue;  // recomputing: dgrad-down makes h itself
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const float clamped = activation_.Gate(g[i]);
        g[i] = SwiGlu<float>::Forward(clamped, activation_.Up(u[i]), Sigmoid<S>(clamped));
      }
      StoreRow(At(h, at), g, columns, vectors, exists, t_);
    }
  }

  // o or dx: the shared expert's to `shared`, the routed experts' to the ring or, on one rank, straight to
  // the return window.
  __device__ __forceinline__ void Out(const Work& w, const float (&sum)[kSums], void* shared) const {
    const int64_t hidden = p_.dims.hidden;
    const bool vectors = Vectors<S>(hidden);
    S* rows[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = row_ + 8 * half;
      const int64_t in_ring = static_cast<int64_t>(w.row) + row;
      rows[half] = row >= w.count        ? nullptr
                   : w.shared            ? At(shared, in_ring * hidden)
                   : p_.dims.Exchanges() ? At(p_.ring.out, in_ring * hidden)
                                         : At(p_.ring.returned, Source(w, row) * hidden);
    }
#pragma unroll
    for (int j = 0; j < 16; ++j) {
      const int column = w.column + j / 2 * 32;
      float v[8];
      Get(sum, j, v);
      StoreRow(rows[j % 2] + column, v, static_cast<int>(Min(32, hidden - column)), vectors, rows[j % 2] != nullptr,
               t_);
    }
  }

  // The route of a block's row.
  __device__ int64_t Source(const Work& w, int row) const {
    return p_.schedule.row_source[w.task.block * p_.dims.row_tile + row];
  }

  __device__ float Weight(const Work& w, int row) const {
    if (w.shared) return 1.0f;
    if (row >= w.count) return 0.0f;
    return p_.dims.Exchanges() ? __ldcg(static_cast<const float*>(p_.ring.weights) + w.row + row)
                               : static_cast<const float*>(p_.router_weights)[Source(w, row)];
  }

  // From dh' in the sums: h again, its share of dw = <dh', h>, dg, du and w * h.
  __device__ __forceinline__ void DgradDown(const Work& w, const float (&sum)[kSums]) const {
    const int64_t width = Width(w);
    const bool vectors = Vectors<S>(width);
    void *gate = Gate(w), *up = Up(w);
    void* h = w.shared ? p_.ring.shared_h : p_.ring.h;
    void* d_gate = w.shared ? p_.ring.shared_d_gate : p_.ring.d_gate;
    void* d_up = w.shared ? p_.ring.shared_d_up : p_.ring.d_up;
    const float weight[2] = {Weight(w, row_), Weight(w, row_ + 8)};
    float d_weight[2] = {};
#pragma unroll
    for (int j = 0; j < 16; ++j) {
      const int half = j % 2, row = row_ + half * 8, column = w.column + j / 2 * 32;
      const int columns = static_cast<int>(Min(32, width - column));
      const bool exists = row < w.count, stores = exists || !w.shared;  // padding rows: zeros, for the weight gradients
      const int64_t at = (static_cast<int64_t>(w.row) + row) * width + column;
      float g[8], u[8], d_h[8], wh[8];
      LoadRow<S>(At(gate, at), g, columns, vectors, exists, t_);
      LoadRow<S>(At(up, at), u, columns, vectors, exists, t_);
      Get(sum, j, d_h);
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const float clamped = activation_.Gate(g[i]), sigmoid = Sigmoid<S>(clamped);
        const float made = Rounded<S>(SwiGlu<float>::Forward(clamped, activation_.Up(u[i]), sigmoid));
        // Columns beyond the last one are zero in gate and up, so in h.
        d_weight[half] += exists ? d_h[i] * made : 0.0f;
        wh[i] = exists ? weight[half] * made : 0.0f;
        float dg, du;
        activation_.Backward(g[i], u[i], sigmoid, weight[half] * d_h[i], &dg, &du);
        g[i] = exists ? dg : 0.0f;
        u[i] = exists ? du : 0.0f;
      }
      StoreRow(At(d_gate, at), g, columns, vectors, stores, t_);
      StoreRow(At(d_up, at), u, columns, vectors, stores, t_);
      StoreRow(At(h, at), wh, columns, vectors, stores, t_);
    }
    if (w.shared) return;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float total = d_weight[half];
      total += __shfl_xor_sync(~0u, total, 1);
      total += __shfl_xor_sync(~0u, total, 2);
      const int row = row_ + half * 8;
      if (t_ == 0 && row < w.count) {
        static_cast<float*>(p_.ring.d_weights)[(static_cast<int64_t>(w.row) + row) * partials_ + w.task.tile] = total;
      }
    }
  }

  __device__ void StoreRouterGradient(const Work& w) const {
    const int row = row_ - lane_ / 4 + lane_;  // one lane a row
    if (lane_ < 16 && row < w.count) {
      static_cast<float*>(p_.ring.returned_d_weights)[Source(w, row)] = SumPartials(p_, w.row + row, partials_);
    }
  }

 public:
  __device__ static float SumPartials(const Params& p, int64_t ring_row, int partials) {
    const float* partial = static_cast<const float*>(p.ring.d_weights) + ring_row * partials;
    float sum = 0;
    for (int tile = 0; tile < partials; ++tile) sum += __ldcg(partial + tile);
    return sum;
  }

 private:
  // A weight gradient's tile by 32-column groups of the matrix `which` (0 gate, 1 up, 2 down), with the
  // element where each begins: visit(which, element, columns, row exists, j).
  template <typename Visit>
  __device__ __forceinline__ void ForGradient(const Work& w, Visit visit) const {
    const bool down = RoutedOp(w.task.op) == Op::kGradDown;
    const int64_t width = Width(w), rows = down ? width : p_.dims.hidden, across = down ? p_.dims.hidden : width;
#pragma unroll
    for (int j = 0; j < 16; ++j) {
      const int which = down ? 2 : j / 8, row = w.m + row_ + j % 2 * 8;
      const int column = w.column + (down ? j / 2 : j / 2 % 4) * 32;
      visit(which, static_cast<int64_t>(row) * across + column, static_cast<int>(Min(32, across - column)), across,
            rows, row < rows, j);
    }
  }

  template <typename Visit>
  __device__ __forceinline__ void ForCarry(const Work& w, Visit visit) const {
    ForGradient(w, [&](int which, int64_t at, int columns, int64_t across, int64_t, bool exists, int j) {
      float* carry = static_cast<float*>(p_.ring.carry) + which * p_.dims.hidden * p_.dims.intermediate;
      visit(carry + at, columns, Vectors<float>(across), exists, j);
    });
  }

  __device__ __forceinline__ void WeightGradient(const Work& w, const float (&sum)[kSums]) const {
    if (w.task.carry_out)
      return ForCarry(w, [&](float* at, int columns, bool vectors, bool active, int j) {
        float v[8];
        Get(sum, j, v);
        StoreRow(at, v, columns, vectors, active, t_);
      });
    const Gradients& to = w.shared ? p_.d_shared : p_.d_routed;
    ForGradient(w, [&](int which, int64_t at, int columns, int64_t across, int64_t rows, bool exists, int j) {
      const Gradient& gradient = which == 0 ? to.gate : which == 1 ? to.up : to.down;
      const int64_t element = w.task.expert * rows * across + at;
      float v[8];
      Get(sum, j, v);
      if (gradient.type == ScalarType::kFloat32) {
        StoreRow(static_cast<float*>(gradient.values) + element, v, columns, Vectors<float>(across), exists, t_);
      } else {
        StoreRow(static_cast<BFloat16*>(gradient.values) + element, v, columns, Vectors<BFloat16>(across), exists, t_);
      }
    });
  }

  const Params& p_;
  const int partials_, row_, lane_, t_;
  const SwiGlu<float> activation_;
};

}  // namespace mok::cuda

#endif  // MOK_CUDA_STAGES_CUH_

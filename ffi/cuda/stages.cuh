// What becomes of a tile after its product: the activation and its gradient, the router weights' gradient,
// rounding, and where each result goes. Shared by the portable and the Hopper kernel.
//
// Code size matters here: fully unrolled, the stages overflow the instruction cache and take ten times as
// long (H200, 2026-11-29). So those that calculate are loops over groups of 32 columns, on 8 or 16 sums that a
// switch selects; those that only store are unrolled.
#ifndef MOK_CUDA_STAGES_CUH_
#define MOK_CUDA_STAGES_CUH_

#include <limits>
#include <type_traits>

#include "../numerics.h"
#include "fragment.cuh"
#include "gemm.cuh"
#include "mxfp8.cuh"

namespace mok::cuda {

// As exact as the storage dtype can show.
template <typename S>
__device__ __forceinline__ float Sigmoid(float value);
template <>
__device__ __forceinline__ float Sigmoid<float>(float value) {
  return 1.0f / (1.0f + expf(-value));
}
template <>
__device__ __forceinline__ float Sigmoid<BFloat16>(float value) {
  constexpr float kLog2E = 1.44269504f;
  return ptx::Reciprocal(1.0f + ptx::PowerOfTwo(-kLog2E * value));
}

// ---- the stages ----

// One CTA's math warps on one task. S is the storage dtype; whole: rows of every matrix are a multiple of 8
// long, so that vectors are aligned and there or not as wholes; mxfp8: of the routed experts h, dg and du are
// rounded to it.
template <typename S, bool whole, bool mxfp8 = false>
class Stages {
 public:
  // warp: of the 8 that hold the tile.
  __device__ Stages(const Params& params, int warp, int lane)
      : p_(params),
        partials_(static_cast<int>(CeilDiv(params.dims.intermediate, kTileN))),
        warp_row_(16 * warp),
        lane_(lane),
        t_(lane % 4),
        activation_{static_cast<float>(params.swiglu_limit)} {}

  // What the sums of a weight gradient begin with: the carry, or zeros.
  __device__ __forceinline__ void Begin(const Work& w, float (&sum)[kSums]) const {
    const bool down = IsDown(w);
    // Careful: without an operation between the loads and the first product ptxas puts the loads into the
    // products' pipeline and then serialises all of them (its warning C7515). One that it cannot see is one.
    const float one = p_.dims.hidden > 0 ? 1.0f : 0.0f;
    const int64_t rows = GradientRows(w), across = GradientColumns(w);
#pragma unroll
    for (int i = 0; i < kSums; ++i) sum[i] = 0;
    if (w.task.carry_in) {
#pragma unroll
      for (int i = 0; i < kSums; ++i) {
        const int which = down ? 2 : i / 64, row = w.m + Row(i / 2 % 2);
        const int column = w.column + (down ? i / 16 : i / 16 % 4) * 32 + i / 4 % 4 * 8 + 2 * t_ + i % 2;
        if (row < rows && column < across) sum[i] = __ldcg(Carry(which) + row * across + column);
      }
    }
#pragma unroll
    for (int i = 0; i < kSums; ++i) sum[i] *= one;
  }

  // What dgrad-down reads and writes, half group by half group (fragment.cuh), in this order and once each:
  // load(index, gate, up) and store(index, d_gate, d_up, h). What is loaded of rows and columns that do not exist is
  // not used; what is stored of them is zero.
  template <typename Load, typename Store>
  __device__ __forceinline__ void End(const Work& w, const float (&sum)[kSums], Load&& load, Store&& store) const {
    const bool clamps = p_.swiglu_limit < kInfinite;
    switch (RoutedOp(w.task.op)) {
      case Op::kGateUp: return clamps ? GateUp<true>(w, sum) : GateUp<false>(w, sum);
      case Op::kDgradDown: return clamps ? DgradDown<true>(w, sum, load, store) : DgradDown<false>(w, sum, load, store);
      case Op::kDown:
      case Op::kDgradGateUp:
        Out(w, sum);
        if (Backward() && w.task.tile == 0 && !w.shared && !p_.dims.Pushes()) StoreRouterGradient(w);
        return;
      case Op::kGradGateUp:
      case Op::kGradDown: return WeightGradient(w, sum);
      default: return;
    }
  }

  // `load` and `store` of End in global memory.
  struct FromMemory {
    const Stages& stages;
    const Work& w;

    __device__ __forceinline__ void operator()(int index, Half<S>& gate, Half<S>& up) const {
      const int64_t at = stages.Place(w, index);
      const int columns = stages.Row(index % 2) < w.count ? stages.Columns(w, index) : 0;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        gate.at[i].template Load<whole>(At(stages.Gate(w), at + 8 * i), columns - 8 * i);
        up.at[i].template Load<whole>(At(stages.Up(w), at + 8 * i), columns - 8 * i);
      }
    }
  };
  struct ToMemory {
    const Stages& stages;
    const Work& w;

    __device__ __forceinline__ void operator()(int index, const Half<S>& d_gate, const Half<S>& d_up,
                                               const Half<S>& h) const {
      const Ring& ring = stages.p_.ring;
      const int64_t at = stages.Place(w, index);
      // Padding rows of the ring too: the weights' gradients read them.
      const int columns = stages.Row(index % 2) < w.count || !w.shared ? stages.Columns(w, index) : 0;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        d_gate.at[i].template Store<whole>(At(w.shared ? ring.shared_d_gate : ring.d_gate, at + 8 * i),
                                           columns - 8 * i);
        d_up.at[i].template Store<whole>(At(w.shared ? ring.shared_d_up : ring.d_up, at + 8 * i), columns - 8 * i);
        h.at[i].template Store<whole>(At(w.shared ? ring.shared_h : ring.h, at + 8 * i), columns - 8 * i);
      }
    }
  };

  // Where gate and up of a task's rows lie.
  __device__ void* Gate(const Work& w) const {
    if (w.shared) return p_.pass.context ? p_.context.shared_gate : p_.ring.shared_gate;
    return KeepsContext(w) ? p_.context.gate : p_.ring.gate;
  }
  __device__ void* Up(const Work& w) const {
    if (w.shared) return p_.pass.context ? p_.context.shared_up : p_.ring.shared_up;
    return KeepsContext(w) ? p_.context.up : p_.ring.up;
  }

  __device__ static float SumPartials(const Params& p, int64_t ring_row, int partials) {
    const float* partial = static_cast<const float*>(p.ring.d_weights) + ring_row * partials;
    float sum = 0;
    for (int tile = 0; tile < partials; ++tile) sum += __ldcg(partial + tile);
    return sum;
  }

 private:
  static constexpr double kInfinite = std::numeric_limits<double>::infinity();

  __device__ int Row(int half) const { return warp_row_ + lane_ / 4 + 8 * half; }  // of the tile
  __device__ static S* At(void* base, int64_t element) {
    return base == nullptr ? nullptr : static_cast<S*>(base) + element;
  }
  __device__ int Width(const Work& w) const {
    return static_cast<int>(w.shared ? p_.dims.shared_intermediate : p_.dims.intermediate);
  }
  __device__ bool Backward() const { return p_.pass.direction == Direction::kBackward; }
  __device__ bool KeepsContext(const Work& w) const { return w.task.macrobatch == 0 && p_.pass.context; }
  // Of a half group of dgrad-down's: where its first pair lies in its matrix, and how many columns are left there.
  __device__ int64_t Place(const Work& w, int index) const {
    return (static_cast<int64_t>(w.row) + Row(index % 2)) * Width(w) + w.column + 32 * (index / 2) + 2 * t_;
  }
  __device__ int Columns(const Work& w, int index) const { return Width(w) - w.column - 32 * (index / 2) - 2 * t_; }

  // Gate in the first half of the tile's columns, up in the second.
  template <bool clamps>
  __device__ __forceinline__ void GateUp(const Work& w, const float (&sum)[kSums]) const {
    const int width = Width(w), first = w.column + 8 * t_, count = w.count;
    void *gate = Gate(w), *up = Up(w);
    const bool forward = !Backward();                  // recomputing: dgrad-down makes h itself
    const bool clears = !w.shared && KeepsContext(w);  // padding rows leave the call as zeros
    const int64_t at = (static_cast<int64_t>(w.row) + Row(0)) * width + first, below = int64_t{8} * width;
    S *to_gate = At(gate, at), *to_up = At(up, at), *to_h = At(w.shared ? p_.ring.shared_h : p_.ring.h, at);
#pragma unroll 1
    for (int group = 0; group < 4; ++group) {
      Group gates, ups;
      SelectGroup(sum, group, gates);
      SelectGroup(sum, group + 4, ups);
      const int columns = width - first - 32 * group;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const bool exists = Row(half) < count;
        const int64_t offset = half * below + 32 * group;
        Vector<S> g, u;
        g.FromSums(gates[half], t_);
        u.FromSums(ups[half], t_);
        if (!exists) g.Clear(), u.Clear();
        if (gate != nullptr) {
          g.template Store<whole>(to_gate + offset, exists || clears ? columns : 0);
          u.template Store<whole>(to_up + offset, exists || clears ? columns : 0);
        }
        if (!forward) continue;
        float gv[8], uv[8];
        g.Widen(gv);
        u.Widen(uv);
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          const float clamped = clamps ? activation_.Gate(gv[i]) : gv[i];
          gv[i] = SwiGlu<float>::Forward(clamped, clamps ? activation_.Up(uv[i]) : uv[i], Sigmoid<S>(clamped));
        }
        Vector<S> h;
        h.Round(gv);
        if constexpr (mxfp8) {
          if (!w.shared) RoundToMx<whole>(h, columns);
        }
        h.template Store<whole>(to_h + offset, exists ? columns : 0);
      }
    }
  }

  // o or dx: the shared expert's to y or d_x, the routed experts' straight to this rank's return window or, where
  // another rank's is meant, to the ring, from where they are pushed.
  __device__ __forceinline__ void Out(const Work& w, const float (&sum)[kSums]) const {
    void* shared = Backward() ? p_.d_x : p_.y;
    const int hidden = static_cast<int>(p_.dims.hidden);
    S* rows[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = Row(half);
      const int64_t in_ring = static_cast<int64_t>(w.row) + row;
      if (row >= w.count) {
        rows[half] = nullptr;
      } else if (w.shared) {
        rows[half] = At(shared, in_ring * hidden);
      } else {
        const int64_t route = OwnRoute(p_, Source(w, row));
        rows[half] = route >= 0 ? At(p_.ring.returned, route * hidden) : At(p_.ring.out, in_ring * hidden);
      }
    }
    StoreTile<S, 0, 8>(sum, rows, w.column, hidden);
  }

  // Groups [begin, end) of the sums to columns from `column` on of two rows (null: none).
  template <typename T, int begin, int end>
  __device__ __forceinline__ void StoreTile(const float (&sum)[kSums], T* const (&rows)[2], int column,
                                            int columns) const {
    column += 8 * t_;
#pragma unroll
    for (int group = begin; group < end; ++group, column += 32) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float pairs[4][2];
#pragma unroll
        for (int i = 0; i < 8; ++i) pairs[i / 2][i % 2] = sum[16 * group + i / 2 * 4 + half * 2 + i % 2];
        Vector<T> v;
        v.FromSums(pairs, t_);
        v.template Store<whole>(rows[half] + column, rows[half] == nullptr ? 0 : columns - column);
      }
    }
  }

  // The route of a block's row.
  __device__ int64_t Source(const Work& w, int row) const {
    return p_.schedule.row_source[w.task.block * p_.dims.row_tile + row];
  }

  __device__ float Weight(const Work& w, int row) const {
    if (row >= w.count) return 0.0f;
    if (w.shared) return 1.0f;
    return p_.dims.Exchanges() ? __ldcg(static_cast<const float*>(p_.ring.weights) + w.row + row)
                               : static_cast<const float*>(p_.router_weights)[Source(w, row)];
  }

  // From dh' in the sums: h again, its share of dw = <dh', h>, dg, du and w * h. Padding rows come out zero,
  // for the weight gradients: their gate, up, weight and dh' are taken as zero.
  //
  // Pair by pair as the sums lie, without a transpose: this is bound by its instructions (H200, 2026-11-30: 47 for an
  // element, 21,600 cycles for a tile).
  template <bool clamps, typename Load, typename Store>
  __device__ __forceinline__ void DgradDown(const Work& w, const float (&sum)[kSums], Load&& load,
                                            Store&& store) const {
    const bool full = warp_row_ + 16 <= w.count && w.column + kTileN <= Width(w);  // the warp's part of the tile
    float weight = Weight(w, Row(0)), other_weight = Weight(w, Row(1));            // of this row and of the other one
    float d_weight = 0, other_d_weight = 0;
#pragma unroll 1
    for (int index = 0; index < kSums / 8; ++index) {  // both rows in turn
      float d_h[4][2];
      SelectHalf(sum, index, d_h);
      Half<S> gate, up, h;
      load(index, gate, up);
      if (!full) {
        const int columns = Row(index % 2) < w.count ? Columns(w, index) : 0;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          if (columns - 8 * i <= 0) gate.at[i].Clear(), up.at[i].Clear();
          // Of columns beyond the last one too: 0 * Inf of an infinite dy is NaN, and so is its product with h = 0.
#pragma unroll
          for (int c = 0; c < 2; ++c) d_h[i][c] = 8 * i + c < columns ? d_h[i][c] : 0.0f;
        }
      }
      float sigmoid[4][2];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float g[2], u[2], hidden[2];
        gate.at[i].Widen(g);
        up.at[i].Widen(u);
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          const float clamped = clamps ? activation_.Gate(g[c]) : g[c];
          sigmoid[i][c] = Sigmoid<S>(clamped);
          hidden[c] = SwiGlu<float>::Forward(clamped, clamps ? activation_.Up(u[c]) : u[c], sigmoid[i][c]);
        }
        h.at[i].Round(hidden);  // first the h that the forward pass multiplied by Wd
      }
      if constexpr (mxfp8) {
        if (!w.shared) RoundToMx<whole>(h, Columns(w, index));
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float g[2], u[2], hidden[2];
        gate.at[i].Widen(g);
        up.at[i].Widen(u);
        h.at[i].Widen(hidden);
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          d_weight += d_h[i][c] * hidden[c];
          hidden[c] *= weight;
          const float d = weight * d_h[i][c];
          if (clamps) {
            float d_g, d_u;
            activation_.Backward(g[c], u[c], sigmoid[i][c], d, &d_g, &d_u);
            g[c] = d_g;
            u[c] = d_u;
          } else {
            const float silu = g[c] * sigmoid[i][c];
            g[c] = d * u[c] * (sigmoid[i][c] + silu * (1.0f - sigmoid[i][c]));
            u[c] = d * silu;
          }
        }
        gate.at[i].Round(g);
        up.at[i].Round(u);
        h.at[i].Round(hidden);
      }
      if constexpr (mxfp8) {
        if (!w.shared) {
          RoundToMx<whole>(gate, Columns(w, index));
          RoundToMx<whole>(up, Columns(w, index));
        }
      }
      store(index, gate, up, h);
      const float last_weight = weight, last_d_weight = d_weight;
      weight = other_weight, other_weight = last_weight;
      d_weight = other_d_weight, other_d_weight = last_d_weight;
    }
    if (w.shared) return;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float total = half == 0 ? d_weight : other_d_weight;
      total += __shfl_xor_sync(~0u, total, 1);
      total += __shfl_xor_sync(~0u, total, 2);
      if (t_ == 0 && Row(half) < w.count) {
        const int64_t row = static_cast<int64_t>(w.row) + Row(half);
        static_cast<float*>(p_.ring.d_weights)[row * partials_ + w.task.tile] = total;
      }
    }
  }

  __device__ void StoreRouterGradient(const Work& w) const {
    const int row = warp_row_ + lane_;  // one lane a row
    if (lane_ < 16 && row < w.count) {
      static_cast<float*>(p_.ring.returned_d_weights)[Source(w, row)] = SumPartials(p_, w.row + row, partials_);
    }
  }

  // ---- weight gradients: gate in the first half of the tile's columns and up in the second, or down ----

  __device__ static bool IsDown(const Work& w) { return RoutedOp(w.task.op) == Op::kGradDown; }
  __device__ int GradientRows(const Work& w) const { return IsDown(w) ? Width(w) : static_cast<int>(p_.dims.hidden); }
  __device__ int GradientColumns(const Work& w) const {
    return IsDown(w) ? static_cast<int>(p_.dims.hidden) : Width(w);
  }
  __device__ float* Carry(int which) const {
    return static_cast<float*>(p_.ring.carry) + which * p_.dims.hidden * p_.dims.intermediate;
  }

  __device__ __forceinline__ void WeightGradient(const Work& w, const float (&sum)[kSums]) const {
    const Gradients& to = w.shared ? p_.d_shared : p_.d_routed;
    const bool down = IsDown(w);
    StoreHalf<0>(w, sum, down ? to.down : to.gate, down ? 2 : 0, w.column);
    StoreHalf<4>(w, sum, down ? to.down : to.up, down ? 2 : 1, down ? w.column + 128 : w.column);
  }

  // Half a tile's columns, from group `begin` on, to the carry or the gradient.
  template <int begin>
  __device__ __forceinline__ void StoreHalf(const Work& w, const float (&sum)[kSums], const Gradient& to, int which,
                                            int column) const {
    const int64_t rows = GradientRows(w), across = GradientColumns(w), skipped = w.task.expert * rows;
    const auto store = [&](auto* base) {
      using T = std::remove_pointer_t<decltype(base)>;
      T* at[2];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int64_t row = w.m + Row(half);
        at[half] = row < rows ? base + row * across : nullptr;
      }
      StoreTile<T, begin, begin + 4>(sum, at, column, static_cast<int>(across));
    };
    if (w.task.carry_out) store(Carry(which));
    else if (to.type == ScalarType::kFloat32) store(static_cast<float*>(to.values) + skipped * across);
    else store(static_cast<BFloat16*>(to.values) + skipped * across);
  }

  const Params& p_;
  const int partials_, warp_row_, lane_, t_;
  const SwiGlu<float> activation_;
};

}  // namespace mok::cuda

#endif  // MOK_CUDA_STAGES_CUH_

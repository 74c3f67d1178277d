// One task of the list in tasks.h, what its target says of tiles, and the arithmetic of both. Knows neither XLA
// nor CUDA.
#ifndef MOK_TASK_H_
#define MOK_TASK_H_

#include <cstdint>
#include <type_traits>

#include "numerics.h"

namespace mok {

inline constexpr int64_t kMostMovedRows = 32;  // by a communication task that is not a whole block: a lane each

// What the list takes from its target, beside Dims::row_tile.
struct Tiles {
  struct Shape {
    int64_t rows, columns;
  };
  int64_t gate_up_columns;   // of h in a tile of gate-up, which makes as many of gate and of up
  int64_t d_hidden_columns;  // of a tile of dgrad-down
  int64_t hidden_columns;    // of a tile of down and dgrad-gate-up
  Shape gate_up_gradient;    // a tile of it has as many of gate and of up
  Shape down_gradient;
  int64_t group;                 // rows of tiles walked column by column, about
  int64_t communication_values;  // of a communication task, about, of 1 to kMostMovedRows rows; 0: a whole block
  bool gathers;                  // reads x and dy where they are if they need neither travel nor be converted
};

// In the wider type of the two.
template <typename A, typename B>
MOK_HD constexpr std::common_type_t<A, B> CeilDiv(A a, B b) {
  return (a + b - 1) / b;
}
template <typename A, typename B>
MOK_HD constexpr std::common_type_t<A, B> RoundUp(A a, B b) {
  return CeilDiv(a, b) * b;
}
template <typename A, typename B>
MOK_HD constexpr std::common_type_t<A, B> Min(A a, B b) {
  return a < b ? a : b;
}
template <typename A, typename B>
MOK_HD constexpr std::common_type_t<A, B> Max(A a, B b) {
  return a > b ? a : b;
}

// What tasks are counted in. On a GPU one warp decodes all tasks of a multiprocessor, and divides often:
// there 64 bits would take several times as long, and memory ends long before 32 do.
#ifdef __CUDA_ARCH__
using Index = int32_t;
#else
using Index = int64_t;
#endif

enum class Op : int32_t {
  kNone,
  // communication
  kDispatch,
  kCombine,
  kReverseCombine,
  kReverseDispatch,
  // compute, routed experts
  kGateUp,
  kDown,
  kDgradDown,
  kDgradGateUp,
  kGradGateUp,
  kGradDown,
  // compute, shared expert
  kSharedGateUp,
  kSharedDown,
  kSharedDgradDown,
  kSharedDgradGateUp,
  kSharedGradGateUp,
  kSharedGradDown,
};

MOK_HD inline bool IsPull(Op op) { return op == Op::kDispatch || op == Op::kReverseCombine; }

// All of `count` counters from `counter` on must equal `target`.
struct Wait {
  Index counter;
  Index count;
  Index target;
};

struct Task {
  Op op = Op::kNone;
  Index macrobatch = 0;
  Index block = 0;   // row block (shared: token block); weight gradients: the first of the segment
  Index blocks = 1;  // weight gradients: how many blocks of the segment
  Index tile = 0;    // column tile; weight gradients: tile of the [rows, columns] grid, row-major
  Index expert = 0;
  bool carry_in = false;   // weight gradients: the expert began in an earlier macrobatch
  bool carry_out = false;  // ... and goes on in a later one
  Index signal = -1;       // the counter that this task increments, or -1
  // Those that wait for nothing have no counters. Which one goes where is known at compile time, so that a
  // GPU keeps them in registers.
  static constexpr int kWaits = 3;
  Wait waits[kWaits] = {};

  template <int index>
  MOK_HD void WaitFor(Index counter, Index target, Index count = 1) {
    waits[index] = {counter, target > 0 ? count : 0, target};
  }
};

}  // namespace mok

#endif  // MOK_TASK_H_

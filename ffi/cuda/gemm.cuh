// What a compute task multiplies: which boxes of which matrices. Shared by the portable and the Hopper
// kernel, which differ in how they bring the boxes to the tensor cores.
//
// Every task is one product of a 128 x 256 tile, D = sum over k of A[m, k] B[n, k], in one fragment layout
// (fragment.cuh). An operand whose contraction runs along a matrix's rows is Major::kK, else Major::kMn.
#ifndef MOK_CUDA_GEMM_CUH_
#define MOK_CUDA_GEMM_CUH_

#include "../params.h"
#include "../tasks.h"
#include "megakernel.h"
#include "ptx.cuh"

namespace mok::cuda {

inline constexpr int kTileM = 128, kTileN = 256;

// Row-major [matrices, rows, columns], or null.
struct Matrix {
  const void* base;
  int64_t columns, rows, matrices;
};

enum MatrixId : int16_t {
  kX,
  kContextX,
  kDY,
  kH,
  kDGate,
  kDUp,
  kGate,
  kUp,
  kContextGate,
  kContextUp,
  kGateWeight,
  kUpWeight,
  kDownWeight,
  kGateForGradient,
  kUpForGradient,
  kSharedX,
  kSharedDY,
  kSharedH,
  kSharedDGate,
  kSharedDUp,
  kSharedGate,
  kSharedUp,
  kSharedGateWeight,
  kSharedUpWeight,
  kSharedDownWeight,
  kNumMatrices
};

struct Matrices {
  Matrix at[kNumMatrices];
};

// Where x and dy are not brought into the ring, kX and kDY are the caller's arrays, read by row index.
inline Matrices MatricesOf(const Params& p, bool pulls) {
  const Dims& d = p.dims;
  const int64_t rows = d.macrobatch, width = d.intermediate, shared = d.shared_intermediate, e = d.local_experts;
  Matrices m{};
  m.at[kX] = pulls ? Matrix{p.ring.x, d.hidden, rows, 1} : Matrix{p.x, d.hidden, d.tokens, 1};
  m.at[kContextX] = {p.context.x, d.hidden, rows, 1};
  m.at[kDY] = pulls ? Matrix{p.ring.d_y, d.hidden, rows, 1} : Matrix{p.d_y, d.hidden, d.tokens, 1};
  m.at[kH] = {p.ring.h, width, rows, 1};
  m.at[kDGate] = {p.ring.d_gate, width, rows, 1};
  m.at[kDUp] = {p.ring.d_up, width, rows, 1};
  m.at[kGate] = {p.ring.gate, width, rows, 1};
  m.at[kUp] = {p.ring.up, width, rows, 1};
  m.at[kContextGate] = {p.context.gate, width, rows, 1};
  m.at[kContextUp] = {p.context.up, width, rows, 1};
  m.at[kGateWeight] = {p.routed.gate.values, width, d.hidden, e};
  m.at[kUpWeight] = {p.routed.up.values, width, d.hidden, e};
  // In each pass w_down has one reader.
  const bool backward = p.pass.direction == Direction::kBackward;
  m.at[kDownWeight] = {backward ? p.routed.down_for_gradient.values : p.routed.down.values, d.hidden, width, e};
  m.at[kGateForGradient] = {p.routed.gate_for_gradient.values, width, d.hidden, e};
  m.at[kUpForGradient] = {p.routed.up_for_gradient.values, width, d.hidden, e};
  m.at[kSharedX] = {p.x, d.hidden, d.tokens, 1};
  m.at[kSharedDY] = {p.d_y, d.hidden, d.tokens, 1};
  m.at[kSharedH] = {p.ring.shared_h, shared, d.tokens, 1};
  m.at[kSharedDGate] = {p.ring.shared_d_gate, shared, d.tokens, 1};
  m.at[kSharedDUp] = {p.ring.shared_d_up, shared, d.tokens, 1};
  m.at[kSharedGate] = {p.pass.context ? p.context.shared_gate : p.ring.shared_gate, shared, d.tokens, 1};
  m.at[kSharedUp] = {p.pass.context ? p.context.shared_up : p.ring.shared_up, shared, d.tokens, 1};
  m.at[kSharedGateWeight] = {p.shared.gate.values, shared, d.hidden, 1};
  m.at[kSharedUpWeight] = {p.shared.up.values, shared, d.hidden, 1};
  m.at[kSharedDownWeight] = {p.shared.down.values, d.hidden, shared, 1};
  return m;
}

struct Operand {
  int16_t first, second;  // the matrix, and the one that takes over (see Gemm)
  int32_t mn, k, z;       // where the tile begins along M or N, along the contraction, and the expert
  bool gathered;          // rows are places in the schedule, whose row_source names the matrix's rows
};

struct Gemm {
  Operand a, b;
  int32_t steps;  // of kStep along the contraction; may be 0
  int32_t split;  // from this step on both operands are the second matrix, again from its beginning
  bool halves;    // columns 128.. of b are those of the second matrix from `mn` on
};

// What the workers of a CTA need to know of a task.
struct Work {
  Task task;  // kNone: nothing to do
  Gemm gemm;
  int32_t count;   // rows of the block that exist
  int32_t row;     // the block's first row in the ring (shared: token)
  int32_t column;  // first column of the output tile; weight gradients: see m
  int32_t m;       // weight gradients: first row of the output tile
  bool shared;
  int16_t gate;  // dgrad-down: the matrix that holds gate of these rows; the next one holds up
};

__host__ __device__ inline bool IsShared(Op op) { return op >= Op::kSharedGateUp; }
__host__ __device__ inline Op RoutedOp(Op op) {  // what it computes, whosever it is
  return IsShared(op) ? static_cast<Op>(static_cast<int>(op) - static_cast<int>(Op::kSharedGateUp) +
                                        static_cast<int>(Op::kGateUp))
                      : op;
}

// row_count: Schedule::row_count or a copy. step: elements of one step along the contraction.
__device__ inline void Describe(const Params& p, const TaskList& list, const int32_t* row_count, const Tiles& tiles,
                                const Task& task, int step, Work* work) {
  const Dims& d = p.dims;
  const bool shared = IsShared(task.op), pulls = list.Pulls();
  const int width = static_cast<int>(shared ? d.shared_intermediate : d.intermediate);
  const int hidden = static_cast<int>(d.hidden);
  const int16_t to_shared = shared ? kSharedGateWeight - kGateWeight : 0;
  const int16_t to_shared_ring = shared ? kSharedH - kH : 0;
  const int16_t gate = kGateWeight + to_shared, up = kUpWeight + to_shared, down = kDownWeight + to_shared;
  const int16_t gate_for_gradient = shared ? kSharedGateWeight : kGateForGradient;
  const int16_t up_for_gradient = shared ? kSharedUpWeight : kUpForGradient;
  const int16_t h = kH + to_shared_ring, d_gate = kDGate + to_shared_ring, d_up = kDUp + to_shared_ring;
  const bool kept_x = d.Exchanges() && task.macrobatch == 0 && p.pass.context;
  const int16_t x = shared ? kSharedX : kept_x ? kContextX : kX, d_y = shared ? kSharedDY : kDY;
  const bool gathered = !shared && !pulls;

  Work w{};
  w.task = task;
  w.shared = shared;
  const int64_t first_row = task.block * d.row_tile;
  if (shared) {
    w.row = static_cast<int32_t>(first_row);
    w.count = static_cast<int32_t>(Min(d.row_tile, d.tokens - first_row));
  } else {
    w.row = static_cast<int32_t>(first_row - task.macrobatch * d.macrobatch);
    const int end = list.RowOffset(task.expert) + row_count[task.expert];
    w.count = static_cast<int32_t>(Max(0, Min(d.row_tile, end - first_row)));
  }
  // A gathered row is named by its place in the schedule, any other by its place in its matrix.
  const int row = gathered ? static_cast<int>(first_row) : w.row;
  const int z = static_cast<int>(task.expert);
  Gemm& g = w.gemm;
  g.split = 1 << 30;
  const auto steps = [step](int64_t length) { return static_cast<int>(CeilDiv(length, step)); };
  switch (RoutedOp(task.op)) {
    case Op::kGateUp:
      w.column = static_cast<int>(task.tile * tiles.gate_up_columns);
      g = {{x, x, row, 0, 0, gathered}, {gate, up, w.column, 0, z, false}, steps(hidden), g.split, true};
      break;
    case Op::kDown:
      w.column = static_cast<int>(task.tile * tiles.hidden_columns);
      g = {{h, h, w.row, 0, 0, false}, {down, down, w.column, 0, z, false}, steps(width), g.split, false};
      break;
    case Op::kDgradDown:
      w.column = static_cast<int>(task.tile * tiles.d_hidden_columns);
      w.gate = shared ? kSharedGate : task.macrobatch == 0 && p.pass.context ? kContextGate : kGate;
      g = {{d_y, d_y, row, 0, 0, gathered}, {down, down, w.column, 0, z, false}, steps(hidden), g.split, false};
      break;
    case Op::kDgradGateUp:
      w.column = static_cast<int>(task.tile * tiles.hidden_columns);
      g = {{d_gate, d_up, w.row, 0, 0, false},
           {gate_for_gradient, up_for_gradient, w.column, 0, z, false},
           2 * steps(width),
           steps(width),
           false};
      break;
    case Op::kGradGateUp:
    case Op::kGradDown: {
      const bool of_down = RoutedOp(task.op) == Op::kGradDown;
      const Tiles::Shape& tile = of_down ? tiles.down_gradient : tiles.gate_up_gradient;
      const int64_t across = CeilDiv(of_down ? hidden : width, tile.columns);
      w.m = static_cast<int>(task.tile / across * tile.rows);
      w.column = static_cast<int>(task.tile % across * tile.columns);
      // Rows beyond an expert's last one are zero up to the end of its block.
      int64_t rows = task.blocks * d.row_tile;
      if (shared) {
        rows = d.tokens;
      } else if (task.blocks > 0) {
        rows = Min(rows, list.RowOffset(task.expert) + row_count[task.expert] - first_row);
      }
      if (of_down) {
        g = {{h, h, w.m, w.row, 0, false}, {d_y, d_y, w.column, row, 0, gathered}, steps(rows), g.split, false};
      } else {
        g = {{x, x, w.m, row, 0, gathered}, {d_gate, d_up, w.column, w.row, 0, false}, steps(rows), g.split, true};
      }
      break;
    }
    default: break;
  }
  *work = w;
}

// A box of 64 along M (A: index 0..1) or N (B: 0..3) and one step along the contraction.
struct Box {
  int16_t matrix;
  int32_t mn, k, z;
};
__device__ inline Box BoxOf(const Gemm& g, const Operand& operand, bool halves, int index, int at, int step) {
  const bool second = halves ? index >= 2 : at >= g.split;
  return {second ? operand.second : operand.first, operand.mn + 64 * (halves ? index & 1 : index),
          operand.k + step * (at >= g.split ? at - g.split : at), operand.z};
}

}  // namespace mok::cuda

#endif  // MOK_CUDA_GEMM_CUH_

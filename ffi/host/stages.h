// The stages of one rank as plain loops: what each task of tasks.h computes. One instance per storage
// dtype. Called by job.h, from several threads at once, each with a task of its own.
//
// Only rows that exist are computed: a block's padding rows are never read, so the ring needs no zeros.
// Every product covers one block in full, so a result's bits depend on its row's place in the segment
// and on the shapes, not on minibatch, macrobatch or thread.
#ifndef MOK_HOST_STAGES_H_
#define MOK_HOST_STAGES_H_

#include <cstdint>
#include <cstring>
#include <type_traits>
#include <vector>

#include "../params.h"
#include "../tasks.h"
#include "gemm.h"
#include "vectors.h"

namespace mok::host {

// 128 rows (Dims::row_tile): each packed weight element is then used by 128 multiplications.
inline constexpr int64_t kRowTile = 128;
inline constexpr int64_t kColumns = 256;
static_assert(kColumns % kMxBlock == 0, "a tile quantises whole blocks of its row");
inline constexpr Tiles kTiles = {kColumns, kColumns, kColumns, {kColumns, kColumns}, {kColumns, kColumns}, 1, 0, true};
// For the default minibatch; a constant, so that shapes do not depend on the machine.
inline constexpr int64_t kComputeUnits = 4;

template <typename S>
class Stages {
  using Wide = typename Numerics<S>::Wide;
  static constexpr bool kWidens = !std::is_same_v<S, Wide>, kQuantises = std::is_same_v<S, BFloat16>;

 public:
  // peers: one per rank of the group, this one included.
  Stages(const Params& params, const std::vector<Peer>& peers)
      : p_(params), d_(params.dims), peers_(peers), activation_{static_cast<Wide>(params.swiglu_limit)} {}

  void Run(const TaskList& list, const Task& task) const {
    switch (task.op) {
      case Op::kNone: return;
      case Op::kDispatch: return Dispatch(task);
      case Op::kCombine: return Combine(task);
      case Op::kReverseCombine: return ReverseCombine(task);
      case Op::kReverseDispatch: return ReverseDispatch(list, task);
      case Op::kGateUp: return GateUp(Routed(task), task);
      case Op::kDown: return Down(Routed(task), task);
      case Op::kDgradDown: return DgradDown(Routed(task), task, list.DHiddenTiles());
      case Op::kDgradGateUp: return DgradGateUp(Routed(task), task, list.DHiddenTiles());
      case Op::kGradGateUp:
      case Op::kGradDown: return WeightGradient(task, false);
      case Op::kSharedGateUp: return GateUp(Shared(task), task);
      case Op::kSharedDown: return Down(Shared(task), task);
      case Op::kSharedDgradDown: return DgradDown(Shared(task), task, 0);
      case Op::kSharedDgradGateUp: return DgradGateUp(Shared(task), task, 0);
      case Op::kSharedGradGateUp:
      case Op::kSharedGradDown: return WeightGradient(task, true);
    }
  }

  // Context rows that no route fills are zero: they leave the call as residuals.
  void ClearUnusedContext() const {
    const int64_t rows = Min(p_.schedule.row_offset[d_.local_experts], d_.macrobatch);
    const auto clear = [&](void* buffer, int64_t width) {
      if (buffer != nullptr) std::memset(At(buffer, rows * width), 0, (d_.macrobatch - rows) * width * sizeof(S));
    };
    clear(p_.context.x, d_.hidden);
    clear(p_.context.gate, d_.intermediate);
    clear(p_.context.up, d_.intermediate);
  }

  // MXFP8: the x (backward: and dy) of tokens [begin, end) as all ranks pull it.
  void Stage(int64_t begin, int64_t end) const {
    if constexpr (kQuantises) {
      const auto stage = [&](const void* from, void* to) {
        if (to == nullptr) return;
        for (int64_t t = begin; t < end; ++t) {
          ToMx(At(from, t * d_.hidden), d_.hidden, static_cast<uint8_t*>(to) + t * MxRowBytes(d_.hidden));
        }
      };
      stage(p_.x, p_.ring.staged_x);
      stage(p_.d_y, p_.ring.staged_d_y);
    }
  }

  // y (or dx) of tokens [begin, end): the shared part, then the slots in order; rounded once.
  void Epilogue(int64_t begin, int64_t end) const {
    const bool backward = p_.pass.direction == Direction::kBackward;
    const Wide* weights = static_cast<const Wide*>(p_.router_weights);
    const Wide* d_weights = static_cast<const Wide*>(p_.ring.returned_d_weights);
    Wide* sum = Scratch<Wide>(Slot::kRow, d_.hidden);
    for (int64_t t = begin; t < end; ++t) {
      S* out = At(backward ? p_.d_x : p_.y, t * d_.hidden);
      const bool shared = d_.shared_intermediate > 0;
      for (int64_t c = 0; c < d_.hidden; ++c) sum[c] = shared ? Numerics<S>::Widen(out[c]) : Wide(0);
      for (int64_t route = t * d_.top_k; route < (t + 1) * d_.top_k; ++route) {
        const bool valid = p_.ids[route] >= 0 && p_.ids[route] < d_.ranks * d_.local_experts;
        if (backward) static_cast<Wide*>(p_.d_router_weights)[route] = valid ? d_weights[route] : Wide(0);
        if (!valid) continue;  // its slot of the window was never written
        const S* returned = At(p_.ring.returned, route * d_.hidden);
        const Wide weight = backward ? Wide(1) : weights[route];
        for (int64_t c = 0; c < d_.hidden; ++c) sum[c] += weight * Numerics<S>::Widen(returned[c]);
      }
      for (int64_t c = 0; c < d_.hidden; ++c) out[c] = Numerics<S>::Round(sum[c]);
    }
  }

 private:
  static S* At(void* buffer, int64_t element) { return static_cast<S*>(buffer) + element; }
  static const S* At(const void* buffer, int64_t element) { return static_cast<const S*>(buffer) + element; }

  // ---- communication ----

  // The rows of a block that exist.
  int64_t Count(const Task& task, int64_t block) const {
    const int64_t row = block * d_.row_tile;
    return Min(d_.row_tile, p_.schedule.row_offset[task.expert] + p_.schedule.row_count[task.expert] - row);
  }
  int64_t RingRow(const Task& task, int64_t block) const {
    return block * d_.row_tile - task.macrobatch * d_.macrobatch;
  }
  const int32_t* Source(int64_t block) const { return p_.schedule.row_source + block * d_.row_tile; }

  // Where the pulled x rows of a macrobatch lie.
  void* PulledX(const Task& task) const {
    return d_.Exchanges() && task.macrobatch == 0 && p_.pass.context ? p_.context.x : p_.ring.x;
  }

  void Pull(const Task& task, void* to, const void* Peer::* from) const {
    const int64_t n = Count(task, task.block), routes = d_.Routes();
    for (int64_t i = 0; i < n; ++i) {
      const int64_t source = Source(task.block)[i];
      const int64_t token = source % routes / d_.top_k;
      const void* base = peers_[source / routes].*from;
      S* row = At(to, (RingRow(task, task.block) + i) * d_.hidden);
      if constexpr (kQuantises) {
        if (p_.pass.mxfp8) {
          FromMx(static_cast<const uint8_t*>(base) + token * MxRowBytes(d_.hidden), d_.hidden, row);
          continue;
        }
      }
      std::memcpy(row, At(base, token * d_.hidden), d_.hidden * sizeof(S));
    }
  }

  void Dispatch(const Task& task) const {
    Pull(task, PulledX(task), &Peer::x);
    if (PulledX(task) == p_.context.x) ClearPadding(task, p_.context.x, d_.hidden);
  }

  void ReverseCombine(const Task& task) const {
    Pull(task, p_.ring.d_y, &Peer::d_y);
    if (PulledX(task) == p_.ring.x) Pull(task, p_.ring.x, &Peer::x);
    if (!d_.Exchanges()) return;
    const int64_t n = Count(task, task.block), routes = d_.Routes();
    for (int64_t i = 0; i < n; ++i) {
      const int64_t source = Source(task.block)[i];
      static_cast<Wide*>(p_.ring.weights)[RingRow(task, task.block) + i] =
          static_cast<const Wide*>(peers_[source / routes].router_weights)[source % routes];
    }
  }

  void Combine(const Task& task) const {
    const int64_t n = Count(task, task.block), routes = d_.Routes();
    for (int64_t i = 0; i < n; ++i) {
      const int64_t source = Source(task.block)[i];
      if (OwnRoute(p_, source) >= 0) continue;
      std::memcpy(At(peers_[source / routes].returned, source % routes * d_.hidden),
                  At(p_.ring.out, (RingRow(task, task.block) + i) * d_.hidden), d_.hidden * sizeof(S));
    }
  }

  void ReverseDispatch(const TaskList& list, const Task& task) const {
    Combine(task);
    const int64_t n = Count(task, task.block), routes = d_.Routes();
    for (int64_t i = 0; i < n; ++i) {
      const int64_t source = Source(task.block)[i];
      static_cast<Wide*>(peers_[source / routes].returned_d_weights)[source % routes] =
          SumPartials(RingRow(task, task.block) + i, list.DHiddenTiles());
    }
  }

  Wide SumPartials(int64_t ring_row, int64_t tiles) const {
    const Wide* partial = static_cast<const Wide*>(p_.ring.d_weights) + ring_row * tiles;
    Wide sum = 0;
    for (int64_t tile = 0; tile < tiles; ++tile) sum += partial[tile];
    return sum;
  }

  void ClearPadding(const Task& task, void* buffer, int64_t width) const {
    const int64_t n = Count(task, task.block);
    std::memset(At(buffer, (RingRow(task, task.block) + n) * width), 0, (d_.row_tile - n) * width * sizeof(S));
  }

  // ---- what one block of the routed or the shared expert reads and writes ----

  struct Block {
    int64_t count;  // rows that exist
    int64_t row;    // its first row in the ring (shared: token)
    int64_t width;  // I or I_s
    int64_t expert;
    const Weights* weights;
    Rows<S> x, d_y;
    void *gate, *up;  // null: not kept
    void *h, *d_gate, *d_up;
    bool keeps_context;
  };

  Block Routed(const Task& task) const { return RoutedBlock(task, task.block); }
  Block RoutedBlock(const Task& task, int64_t block) const {
    Block b{};
    b.count = Count(task, block);
    b.row = RingRow(task, block);
    b.width = d_.intermediate;
    b.expert = task.expert;
    b.weights = &p_.routed;
    if (Pulls(d_, kTiles, p_.pass)) {
      b.x = {At(PulledX(task), b.row * d_.hidden), d_.hidden};
      b.d_y = {At(p_.ring.d_y, b.row * d_.hidden), d_.hidden};
    } else {
      b.x = {At(p_.x, 0), d_.hidden, Source(block), d_.top_k};
      b.d_y = {At(p_.d_y, 0), d_.hidden, Source(block), d_.top_k};
    }
    b.keeps_context = task.macrobatch == 0 && p_.pass.context;
    b.gate = b.keeps_context ? p_.context.gate : p_.ring.gate;
    b.up = b.keeps_context ? p_.context.up : p_.ring.up;
    b.h = p_.ring.h;
    b.d_gate = p_.ring.d_gate;
    b.d_up = p_.ring.d_up;
    return b;
  }

  Block Shared(const Task& task) const { return SharedBlock(task.block); }
  Block SharedBlock(int64_t block) const {
    Block b{};
    b.row = block * d_.row_tile;
    b.count = Min(d_.row_tile, d_.tokens - b.row);
    b.width = d_.shared_intermediate;
    b.weights = &p_.shared;
    b.x = {At(p_.x, b.row * d_.hidden), d_.hidden};
    b.d_y = {At(p_.d_y, b.row * d_.hidden), d_.hidden};
    b.gate = p_.pass.context ? p_.context.shared_gate : p_.ring.shared_gate;
    b.up = p_.pass.context ? p_.context.shared_up : p_.ring.shared_up;
    b.h = p_.ring.shared_h;
    b.d_gate = p_.ring.shared_d_gate;
    b.d_up = p_.ring.shared_d_up;
    return b;
  }

  bool Backward() const { return p_.pass.direction == Direction::kBackward; }

  // ---- GEMM stages ----

  void GateUp(const Block& b, const Task& task) const {
    const int64_t first = task.tile * kColumns, columns = Min(kColumns, b.width - first);
    const int64_t n = b.count;
    int64_t pitch;
    const Wide* x = Widen(b.x, n, 0, d_.hidden, Slot::kLeft, &pitch);
    Wide* gate = Scratch<Wide>(Slot::kFirst, n * columns);
    Wide* up = Scratch<Wide>(Slot::kSecond, n * columns);
    Multiply(x, pitch, Operand(b.weights->gate, b.expert, d_.hidden) + first, b.weights->gate.pitch, Transpose::kNo,
             gate, n, columns, d_.hidden, false);
    Multiply(x, pitch, Operand(b.weights->up, b.expert, d_.hidden) + first, b.weights->up.pitch, Transpose::kNo, up, n,
             columns, d_.hidden, false);
    Wide* sigmoid = Scratch<Wide>(Slot::kRow, columns);
    for (int64_t i = 0; i < n; ++i) {
      const int64_t at = (b.row + i) * b.width + first;
      Wide *g = gate + i * columns, *u = up + i * columns;
      RoundRow(g, columns, b.gate == nullptr ? nullptr : At(b.gate, at));
      RoundRow(u, columns, b.up == nullptr ? nullptr : At(b.up, at));
      if (Backward()) continue;  // recomputing: the input gradient makes h itself
      for (int64_t c = 0; c < columns; ++c) g[c] = activation_.Gate(g[c]);
      Sigmoid(g, sigmoid, columns);
      S* h = At(b.h, at);
      for (int64_t c = 0; c < columns; ++c) {
        h[c] = Numerics<S>::Round(SwiGlu<Wide>::Forward(g[c], activation_.Up(u[c]), sigmoid[c]));
      }
      Quantize(b, h, columns);
    }
    if (b.keeps_context && task.tile == 0) {
      ClearPadding(task, b.gate, b.width);
      ClearPadding(task, b.up, b.width);
    }
  }

  void Down(const Block& b, const Task& task) const {
    const int64_t first = task.tile * kColumns, columns = Min(kColumns, d_.hidden - first);
    int64_t pitch;
    const Wide* h = Widen(Rows<S>{At(b.h, b.row * b.width), b.width}, b.count, 0, b.width, Slot::kLeft, &pitch);
    Wide* out = Scratch<Wide>(Slot::kFirst, b.count * columns);
    Multiply(h, pitch, Operand(b.weights->down, b.expert, b.width) + first, b.weights->down.pitch, Transpose::kNo, out,
             b.count, columns, b.width, false);
    WriteOut(b, task, out, first, columns, p_.y);
  }

  // A tile of o or dx: the shared expert's into `shared`, the routed experts' straight into this rank's return window
  // or, where another rank's is meant, into the ring, from where they are pushed.
  void WriteOut(const Block& b, const Task& task, const Wide* tile, int64_t first, int64_t columns,
                void* shared) const {
    const bool routed = b.weights == &p_.routed;
    for (int64_t i = 0; i < b.count; ++i) {
      const int64_t own = routed ? OwnRoute(p_, Source(task.block)[i]) : -1;
      S* out =
          own >= 0 ? At(p_.ring.returned, own * d_.hidden) : At(routed ? p_.ring.out : shared, (b.row + i) * d_.hidden);
      for (int64_t c = 0; c < columns; ++c) out[first + c] = Numerics<S>::Round(tile[i * columns + c]);
    }
  }

  // dh' = dY Wd^T; then in one pass over the tile: h again, its share of dw, dg, du and w * h.
  void DgradDown(const Block& b, const Task& task, int64_t partials) const {
    const int64_t first = task.tile * kColumns, columns = Min(kColumns, b.width - first);
    const WeightOperand& down = b.weights->down_for_gradient;
    int64_t pitch;
    const Wide* d_y = Widen(b.d_y, b.count, 0, d_.hidden, Slot::kLeft, &pitch);
    Wide* d_h = Scratch<Wide>(Slot::kFirst, b.count * columns);
    Multiply(d_y, pitch, Operand(down, b.expert, b.width) + first * down.pitch, down.pitch, Transpose::kYes, d_h,
             b.count, columns, d_.hidden, false);
    Wide* clamped = Scratch<Wide>(Slot::kRow, 3 * columns);
    Wide *sigmoid = clamped + columns, *h = sigmoid + columns;
    for (int64_t i = 0; i < b.count; ++i) {
      const int64_t at = (b.row + i) * b.width + first;
      const S *gate = At(b.gate, at), *up = At(b.up, at);
      S *d_gate = At(b.d_gate, at), *d_up = At(b.d_up, at), *weighted_h = At(b.h, at);
      const Wide weight = Weight(b, task, i);
      for (int64_t c = 0; c < columns; ++c) clamped[c] = activation_.Gate(Numerics<S>::Widen(gate[c]));
      Sigmoid(clamped, sigmoid, columns);
      for (int64_t c = 0; c < columns; ++c) {
        const Wide u = activation_.Up(Numerics<S>::Widen(up[c]));
        weighted_h[c] = Numerics<S>::Round(SwiGlu<Wide>::Forward(clamped[c], u, sigmoid[c]));
      }
      // The rounded h that the forward pass multiplied by Wd.
      Quantize(b, weighted_h, columns);
      for (int64_t c = 0; c < columns; ++c) h[c] = Numerics<S>::Widen(weighted_h[c]);
      const Wide* row = d_h + i * columns;
      if (partials > 0)
        static_cast<Wide*>(p_.ring.d_weights)[(b.row + i) * partials + task.tile] = Dot(row, h, columns);
      for (int64_t c = 0; c < columns; ++c) {
        Wide d_g, d_u;
        activation_.Backward(Numerics<S>::Widen(gate[c]), Numerics<S>::Widen(up[c]), sigmoid[c], weight * row[c], &d_g,
                             &d_u);
        d_gate[c] = Numerics<S>::Round(d_g);
        d_up[c] = Numerics<S>::Round(d_u);
        weighted_h[c] = Numerics<S>::Round(weight * h[c]);
      }
      Quantize(b, d_gate, columns);
      Quantize(b, d_up, columns);
    }
  }

  Wide Weight(const Block& b, const Task& task, int64_t i) const {
    if (b.weights != &p_.routed) return Wide(1);
    if (d_.Exchanges()) return static_cast<const Wide*>(p_.ring.weights)[b.row + i];
    return static_cast<const Wide*>(p_.router_weights)[Source(task.block)[i]];
  }

  // dx = dg Wg^T + du Wu^T, one accumulation.
  void DgradGateUp(const Block& b, const Task& task, int64_t partials) const {
    const int64_t first = task.tile * kColumns, columns = Min(kColumns, d_.hidden - first);
    Wide* out = Scratch<Wide>(Slot::kFirst, b.count * columns);
    const auto add = [&](const WeightOperand& weight, const void* d_rows, bool accumulate) {
      int64_t pitch;
      const Wide* rows = Widen(Rows<S>{At(d_rows, b.row * b.width), b.width}, b.count, 0, b.width, Slot::kLeft, &pitch);
      Multiply(rows, pitch, Operand(weight, b.expert, d_.hidden) + first * weight.pitch, weight.pitch, Transpose::kYes,
               out, b.count, columns, b.width, accumulate);
    };
    add(b.weights->gate_for_gradient, b.d_gate, false);
    add(b.weights->up_for_gradient, b.d_up, true);
    WriteOut(b, task, out, first, columns, p_.d_x);
    if (task.tile == 0 && partials > 0 && !d_.Pushes()) {
      for (int64_t i = 0; i < b.count; ++i) {
        static_cast<Wide*>(p_.ring.returned_d_weights)[Source(task.block)[i]] = SumPartials(b.row + i, partials);
      }
    }
  }

  // A tile of dWg and dWu, or of dWd, over a segment's blocks in ascending order.
  void WeightGradient(const Task& task, bool shared) const {
    const bool down = task.op == Op::kGradDown || task.op == Op::kSharedGradDown;
    const int64_t width = shared ? d_.shared_intermediate : d_.intermediate;
    const int64_t rows = down ? width : d_.hidden, columns = down ? d_.hidden : width;
    const int64_t across = CeilDiv(columns, kColumns);
    const int64_t row0 = task.tile / across * kColumns, m = Min(kColumns, rows - row0);
    const int64_t column0 = task.tile % across * kColumns, n = Min(kColumns, columns - column0);
    Wide* first = Scratch<Wide>(Slot::kFirst, m * n);
    Wide* second = down ? nullptr : Scratch<Wide>(Slot::kSecond, m * n);
    const int64_t which = down ? 2 : 0;
    Load(task, which, row0, column0, columns, m, n, first);
    if (!down) Load(task, 1, row0, column0, columns, m, n, second);
    for (int64_t block = task.block; block < task.block + task.blocks; ++block) {
      const Block b = shared ? SharedBlock(block) : RoutedBlock(task, block);
      const auto ring = [&](void* buffer) { return Rows<S>{At(buffer, b.row * width), width}; };
      int64_t left_pitch;
      const Wide* left = Widen(down ? ring(b.h) : b.x, b.count, row0, m, Slot::kLeft, &left_pitch);
      const auto add = [&](const Rows<S>& right, Wide* sum) {
        int64_t pitch;
        const Wide* wide = Widen(right, b.count, column0, n, Slot::kRight, &pitch);
        Gemm(left, left_pitch, Transpose::kYes, wide, pitch, Transpose::kNo, sum, n, m, n, b.count, true);
      };
      if (down) {
        add(b.d_y, first);
      } else {
        add(ring(b.d_gate), first);
        add(ring(b.d_up), second);
      }
    }
    const Gradients& to = shared ? p_.d_shared : p_.d_routed;
    Store(task, which, row0, column0, rows, columns, m, n, first, down ? to.down : to.gate);
    if (!down) Store(task, 1, row0, column0, rows, columns, m, n, second, to.up);
  }

  Wide* Carry(int64_t which) const { return static_cast<Wide*>(p_.ring.carry) + which * d_.hidden * d_.intermediate; }

  void Load(const Task& task, int64_t which, int64_t row0, int64_t column0, int64_t columns, int64_t m, int64_t n,
            Wide* sum) const {
    for (int64_t i = 0; i < m; ++i) {
      if (task.carry_in) {
        std::memcpy(sum + i * n, Carry(which) + (row0 + i) * columns + column0, n * sizeof(Wide));
      } else {
        std::memset(sum + i * n, 0, n * sizeof(Wide));
      }
    }
  }

  void Store(const Task& task, int64_t which, int64_t row0, int64_t column0, int64_t rows, int64_t columns, int64_t m,
             int64_t n, const Wide* sum, const Gradient& to) const {
    for (int64_t i = 0; i < m; ++i) {
      if (task.carry_out) {
        std::memcpy(Carry(which) + (row0 + i) * columns + column0, sum + i * n, n * sizeof(Wide));
        continue;
      }
      const int64_t at = (task.expert * rows + row0 + i) * columns + column0;
      for (int64_t c = 0; c < n; ++c) StoreAs(to, at + c, sum[i * n + c]);
    }
  }

  static void StoreAs(const Gradient& to, int64_t at, Wide value) {
    switch (to.type) {
      case ScalarType::kFloat32: static_cast<float*>(to.values)[at] = static_cast<float>(value); return;
      case ScalarType::kFloat64: static_cast<double*>(to.values)[at] = static_cast<double>(value); return;
      case ScalarType::kBFloat16: static_cast<BFloat16*>(to.values)[at] = ToBFloat16(static_cast<float>(value)); return;
    }
  }

  // ---- operands ----

  static const S* Operand(const WeightOperand& weight, int64_t expert, int64_t rows) {
    return At(weight.values, expert * rows * weight.pitch);
  }

  // Columns [first, first + columns) of n rows in the accumulation dtype: in place where they already
  // are, else copied.
  static const Wide* Widen(const Rows<S>& rows, int64_t n, int64_t first, int64_t columns, Slot slot, int64_t* pitch) {
    if constexpr (!kWidens) {
      if (rows.index == nullptr) {
        *pitch = rows.pitch;
        return rows.base + first;
      }
    }
    Wide* wide = Scratch<Wide>(slot, n * columns);
    for (int64_t i = 0; i < n; ++i) {
      const S* row = rows[i] + first;
      for (int64_t c = 0; c < columns; ++c) wide[i * columns + c] = Numerics<S>::Widen(row[c]);
    }
    *pitch = columns;
    return wide;
  }

  // out [m, n] (+)= a [m, k] op(b), b in storage dtype.
  static void Multiply(const Wide* a, int64_t a_pitch, const S* b, int64_t b_pitch, Transpose transpose, Wide* out,
                       int64_t m, int64_t n, int64_t k, bool accumulate) {
    if constexpr (!kWidens) {
      Gemm(a, a_pitch, Transpose::kNo, b, b_pitch, transpose, out, n, m, n, k, accumulate);
    } else {
      constexpr int64_t kChunk = 256;  // of the contraction: bounds the converted copy
      if (k == 0 && !accumulate) std::memset(out, 0, m * n * sizeof(Wide));
      for (int64_t at = 0; at < k; at += kChunk) {
        const int64_t depth = Min(kChunk, k - at);
        const bool yes = transpose == Transpose::kYes;
        int64_t pitch;
        const Wide* wide = Widen(Rows<S>{b + (yes ? at : at * b_pitch), b_pitch}, yes ? n : depth, 0, yes ? depth : n,
                                 Slot::kConverted, &pitch);
        Gemm(a + at, a_pitch, Transpose::kNo, wide, pitch, transpose, out, n, m, n, depth, accumulate || at > 0);
      }
    }
  }

  // n values of a routed expert's row to MXFP8 and back in place: whole blocks, the row's last ones or not.
  void Quantize(const Block& b, S* row, int64_t n) const {
    if constexpr (kQuantises) {
      if (p_.pass.mxfp8 && b.weights == &p_.routed) RoundToMx(row, n);
    }
  }

  // Rounds a row to the storage dtype in place, and stores it where wanted.
  static void RoundRow(Wide* row, int64_t n, S* store) {
    for (int64_t c = 0; c < n; ++c) {
      const S rounded = Numerics<S>::Round(row[c]);
      row[c] = Numerics<S>::Widen(rounded);
      if (store != nullptr) store[c] = rounded;
    }
  }

  const Params& p_;
  const Dims& d_;
  const std::vector<Peer>& peers_;
  const SwiGlu<Wide> activation_;
};

}  // namespace mok::host

#endif  // MOK_HOST_STAGES_H_

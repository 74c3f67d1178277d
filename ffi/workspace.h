// Sizes that follow from the caller's sizes: capacity, default minibatch and macrobatch, and where each
// ring buffer lies in the call's scratch. The one place that computes them, for Python too.
#ifndef MOK_WORKSPACE_H_
#define MOK_WORKSPACE_H_

#include <cstdint>

#include "params.h"
#include "tasks.h"

namespace mok {

// Most padded rows that any routing can give one rank: every route of every rank, and a tile less one
// row of padding for each expert that can have a row. Nothing can overflow it, so nothing is dropped.
MOK_HD inline int64_t Capacity(int64_t ranks, int64_t routes, int64_t local_experts, int64_t row_tile) {
  const int64_t rows = ranks * routes;
  const int64_t padded = rows + Min(local_experts, rows) * (row_tile - 1);
  return Max(row_tile, padded / row_tile * row_tile);
}

// Rows that fill `units` compute units with two waves of gate+up tiles, before rounding to the row tile.
// Source: Mixture-of-Kittens; 74 units of 256x256 and I = 2048 give its 2368 rows.
MOK_HD inline int64_t MinibatchEstimate(int64_t units, int64_t row_tile, int64_t columns, int64_t intermediate) {
  return CeilDiv(2 * units * row_tile * columns, 2 * intermediate);
}

struct Minibatches {
  int64_t forward, backward;
};

// The default ones; forward a multiple of backward. Measured on an H200, 2026-11-30: benchmarks/h200.md.
inline Minibatches DefaultMinibatches(const Dims& d, const Tiles& tiles, int64_t units) {
  // Rows that read an expert's weights together: a balanced expert's, or a group's of a large one.
  const auto rows_of = [&](int64_t experts) { return Min(d.Routes() / experts, tiles.group * d.row_tile); };
  // An expert that a minibatch's end cuts reads its weights once more, so forward four experts fit, but no more than
  // a quarter of all rows. Backward what one stage writes is best read while the second level cache holds it: no more
  // than an expert, and two waves of tiles in a step (dgrad-down, and dgrad-gate-up of the minibatch before).
  const int64_t estimate = MinibatchEstimate(units, d.row_tile, 2 * tiles.gate_up_columns, d.intermediate);
  const int64_t forward = Max(estimate, 4 * rows_of(Max(d.local_experts, 16)));
  const int64_t tiles_of_block =
      CeilDiv(d.intermediate, tiles.d_hidden_columns) + CeilDiv(d.hidden, tiles.hidden_columns);
  const int64_t waves = CeilDiv(2 * units, Max(1, tiles_of_block)) * d.row_tile;
  const int64_t backward = Min(RoundUp(Max(waves, rows_of(d.local_experts)), d.row_tile), d.capacity);
  return {RoundUp(Min(forward, d.capacity), backward), backward};
}

// Fills minibatch, macrobatch (0: default) and capacity of otherwise complete Dims, for a pass. The passes differ in
// the minibatch alone.
inline void PlanRows(Dims* dims, const Tiles& tiles, int64_t units, Direction direction) {
  dims->capacity = Capacity(dims->ranks, dims->Routes(), dims->local_experts, dims->row_tile);
  // A given minibatch beyond all rows would only waste memory; the macrobatch stays a multiple of it.
  if (dims->minibatch > dims->capacity) {
    dims->minibatch = dims->capacity;
    dims->macrobatch = dims->macrobatch == 0 ? 0 : dims->capacity;
  }
  Minibatches minibatch{dims->minibatch, dims->minibatch};
  if (dims->minibatch == 0) {
    minibatch = DefaultMinibatches(*dims, tiles, units);
    // A given macrobatch must stay a multiple.
    if (dims->macrobatch > 0 && dims->macrobatch % minibatch.forward != 0) {
      minibatch = {dims->row_tile, dims->row_tile};
    }
  }
  dims->minibatch = direction == Direction::kForward ? minibatch.forward : minibatch.backward;
  const int64_t all = RoundUp(dims->capacity, minibatch.forward);
  if (dims->macrobatch == 0) {
    // The balanced load is what this rank sends itself; a quarter of slack, and half a tile of padding
    // for each expert.
    const int64_t balanced = dims->Routes() + dims->Routes() / 4 + dims->local_experts * dims->row_tile / 2;
    dims->macrobatch = dims->ranks == 1 ? all : RoundUp(balanced, minibatch.forward);
  }
  dims->macrobatch = Min(dims->macrobatch, all);
}

// Routes whose experts one thread block of cuda/schedule.cu counts, and what it needs to remember: a
// ticket, then for each expert and rank a count and, for each chunk, the routes before it.
inline constexpr int64_t kRoutesPerChunk = 2048;
MOK_HD inline int64_t ScheduleChunks(const Dims& d) { return Max(1, CeilDiv(d.Routes(), kRoutesPerChunk)); }
MOK_HD inline int64_t ScheduleScratch(const Dims& d) {
  return 16 + d.local_experts * d.ranks * (1 + ScheduleChunks(d));
}

// Lays the ring out from `base` (null: only measures). Returns the bytes of one rank, a multiple of 64.
inline int64_t LayOutRing(const Dims& d, const Pass& pass, const Tiles& tiles, int64_t storage_bytes,
                          int64_t wide_bytes, char* base, Ring* ring) {
  int64_t used = 0;
  const auto take = [&](bool wanted, int64_t elements, int64_t bytes) -> void* {
    if (!wanted || elements == 0) return nullptr;
    char* at = base == nullptr ? nullptr : base + used;
    used += RoundUp(elements * bytes, 64);
    return at;
  };
  const bool backward = pass.direction == Direction::kBackward;
  const bool exchanges = d.Exchanges(), pulls = Pulls(d, tiles, pass);
  const bool several = d.capacity > d.macrobatch;  // more than one macrobatch is possible
  const bool replays = backward && (several || !pass.context);
  const int64_t rows = d.macrobatch, s = storage_bytes, w = wide_bytes;
  const int64_t shared = d.tokens * d.shared_intermediate;
  *ring = Ring{};
  ring->x = take(pulls, rows * d.hidden, s);
  ring->h = take(true, rows * d.intermediate, s);
  ring->out = take(exchanges, rows * d.hidden, s);
  ring->gate = take(replays, rows * d.intermediate, s);
  ring->up = take(replays, rows * d.intermediate, s);
  ring->d_y = take(backward && pulls, rows * d.hidden, s);
  ring->d_gate = take(backward, rows * d.intermediate, s);
  ring->d_up = take(backward, rows * d.intermediate, s);
  ring->weights = take(backward && exchanges, rows, w);
  ring->d_weights = take(backward, rows * CeilDiv(d.intermediate, tiles.d_hidden_columns), w);
  ring->shared_h = take(true, shared, s);
  ring->shared_gate = take(backward && !pass.context, shared, s);
  ring->shared_up = take(backward && !pass.context, shared, s);
  ring->shared_d_gate = take(backward, shared, s);
  ring->shared_d_up = take(backward, shared, s);
  ring->staged_x = take(pass.mxfp8 && !d.peers, d.tokens * MxRowBytes(d.hidden), 1);
  ring->staged_d_y = take(pass.mxfp8 && !d.peers && backward, d.tokens * MxRowBytes(d.hidden), 1);
  ring->carry =
      take(backward && several && (pass.gate_up_gradient || pass.down_gradient), 3 * d.hidden * d.intermediate, w);
  ring->returned = take(!d.peers, d.Routes() * d.hidden, s);  // else in the arena
  ring->returned_d_weights = take(backward && !d.peers, d.Routes(), w);
  ring->counters = static_cast<int32_t*>(take(true, CounterLayout(d).total, sizeof(int32_t)));
  ring->control = static_cast<int32_t*>(take(true, kControlWords, sizeof(int32_t)));
  ring->schedule_scratch = static_cast<int32_t*>(take(!backward, ScheduleScratch(d), sizeof(int32_t)));
  return used;
}

}  // namespace mok

#endif  // MOK_WORKSPACE_H_

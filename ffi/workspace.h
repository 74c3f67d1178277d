// Sizes that follow from the caller's sizes: capacity, default minibatch and macrobatch, and where each
// buffer lies in the call's scratch and in the peers' arenas. The one place that computes them, for Python too.
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

// Fills minibatch, macrobatch (0: default) and capacity of otherwise complete Dims. forward: for a forward pass; it
// differs in the minibatch alone.
inline void PlanRows(Dims* dims, const Tiles& tiles, int64_t units, bool forward) {
  dims->capacity = Capacity(dims->ranks, dims->Routes(), dims->local_experts, dims->row_tile);
  if (dims->minibatch == 0) {
    const int64_t estimate = MinibatchEstimate(units, dims->row_tile, 2 * tiles.gate_up_columns, dims->intermediate);
    // Two balanced experts, or two of the groups in which a large expert reads its weights anyway. A forward pass takes
    // twice as many (H200, S3: 4 %; why is not understood), if they are half of all at most.
    const int64_t uncut = 2 * Min(dims->Routes() / dims->local_experts, tiles.group * dims->row_tile);
    dims->minibatch = RoundUp(Max(estimate, uncut), dims->row_tile);
    if (forward && 4 * dims->minibatch <= dims->capacity) dims->minibatch *= 2;
  }
  dims->minibatch = Min(dims->minibatch, dims->capacity);
  if (dims->macrobatch == 0) {
    // The balanced load is what this rank sends itself; a quarter of slack, and half a tile of padding
    // for each expert.
    const int64_t balanced = dims->Routes() + dims->Routes() / 4 + dims->local_experts * dims->row_tile / 2;
    dims->macrobatch = dims->ranks == 1 ? dims->capacity : RoundUp(balanced, dims->row_tile);
  }
  dims->macrobatch = Min(dims->macrobatch, dims->capacity);
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
  ring->out = take(d.Pushes(), rows * d.hidden, s);
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

// What peers exchange lies in arenas, behind a control block: see cuda/arena.h.
inline constexpr int64_t kArenaControlBytes = 16384;

// Offsets in an arena, the same on every rank and for MXFP8, whose rows of x and dy are smaller unless H < 48:
// 16 KiB, 2 T H s, 8 T K, T K (H s + 4), each part rounded up to 256 bytes; s: bytes of an element of x.
struct ArenaLayout {
  int64_t x, d_y, router_weights, ids, returned, returned_d_weights, total;
};
inline ArenaLayout LayOutArena(const Dims& d, int64_t storage_bytes) {
  ArenaLayout at{};
  at.total = kArenaControlBytes;
  const auto take = [&at](int64_t bytes) {
    const int64_t begin = at.total;
    at.total += RoundUp(bytes, 256);
    return begin;
  };
  const int64_t row_bytes = Max(d.hidden * storage_bytes, MxRowBytes(d.hidden));
  at.x = take(d.tokens * row_bytes);
  at.d_y = take(d.tokens * row_bytes);
  at.router_weights = take(d.Routes() * 4);
  at.ids = take(d.Routes() * 4);
  at.returned = take(d.Routes() * d.hidden * storage_bytes);
  at.returned_d_weights = take(d.Routes() * 4);
  return at;
}

}  // namespace mok

#endif  // MOK_WORKSPACE_H_

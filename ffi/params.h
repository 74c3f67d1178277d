// What one call is told: sizes, and each buffer's shape, writer and readers. Filled by handlers.cc,
// read by host/ and cuda/. Knows neither XLA nor CUDA.
#ifndef MOK_PARAMS_H_
#define MOK_PARAMS_H_

#include <cstdint>

#include "numerics.h"

namespace mok {

enum class ScalarType : int32_t { kFloat32, kFloat64, kBFloat16 };
enum class Activation : int32_t { kSwiGlu };
enum class Direction : int32_t { kForward, kBackward };

// Sizes on one rank. All ranks of a group have the same.
struct Dims {
  int64_t tokens;               // T
  int64_t hidden;               // H
  int64_t intermediate;         // I
  int64_t shared_intermediate;  // I_s; 0: no shared expert
  int64_t local_experts;        // E_l
  int64_t ranks;                // R
  int64_t top_k;                // K
  int64_t row_tile;             // rows of one tile; each expert's segment is padded to it
  int64_t minibatch;            // rows that a stage takes at a time, about; a multiple of row_tile
  int64_t macrobatch;           // rows that the ring holds; likewise
  int64_t capacity;             // most rows that any routing can give one rank; a multiple of row_tile
  bool peers;                   // ranks are devices, which meet in arenas (cuda/arena.h): so may a single one

  MOK_HD int64_t Routes() const { return tokens * top_k; }
  // Whether rows come from ranks, this one too, and whether results go to other ranks: a rank's own go straight to its
  // return window.
  MOK_HD bool Exchanges() const { return ranks > 1 || peers; }
  MOK_HD bool Pushes() const { return ranks > 1; }
};

// What a call is to do beside its sizes.
struct Pass {
  Direction direction;
  bool context;           // forward: write macrobatch 0's activations; backward: they are there
  bool gate_up_gradient;  // which weight gradients are wanted
  bool down_gradient;
  bool shared_gate_up_gradient;
  bool shared_down_gradient;
  bool mxfp8;  // the routed experts multiply MXFP8 values, and x and dy travel as such
};

// A weight [experts, rows, pitch] as one GEMM reads it. The input gradient has an operand of its own, because
// MXFP8 rounds along the contraction, which there are the columns and in the forward pass the rows; otherwise both
// are the same.
struct WeightOperand {
  const void* values;  // S, MXFP8 values too, which it holds exactly
  int64_t pitch;       // elements from one row to the next
};

struct Weights {
  WeightOperand gate, up;  // [experts, hidden, width]
  WeightOperand down;      // [experts, width, hidden]
  WeightOperand gate_for_gradient, up_for_gradient, down_for_gradient;
  const void* gate_bias;  // [experts, width] and so on; must be null: not built yet
  const void* up_bias;
  const void* down_bias;
};

// A weight's gradient: rounded once from the accumulator, null where not wanted.
struct Gradient {
  void* values;
  ScalarType type;
};
struct Gradients {
  Gradient gate, up, down;
};

// What one rank shows its peers: frozen while the kernel runs, but for the return window, whose slots each have
// one writer.
struct Peer {
  const void* x;               // S [T, H], with MXFP8 T rows of MxRowBytes(H)
  const void* d_y;             // likewise, backward
  const void* router_weights;  // W [T, K]
  void* returned;              // S [T*K, H]: o in the forward pass, dx in the backward pass
  void* returned_d_weights;    // W [T*K], backward
};

// Rows of this rank, written by the schedule, read by everything after it, kept for the backward pass.
struct Schedule {
  int32_t* row_source;  // [capacity] rank * T*K + route, or -1 in padding and beyond the last row
  int32_t* row_offset;  // [E_l + 1] each expert's first row, padded to the row tile; last: all rows
  int32_t* row_count;   // [E_l] each expert's rows without padding
};

// Kept from forward to backward: macrobatch 0 of the routed experts and all of the shared one. Null
// where there is none. Rows that hold nothing are zero.
struct Context {
  void* x;            // S [macrobatch, H], only if rows travel
  void* gate;         // S [macrobatch, I]
  void* up;           // S [macrobatch, I]
  void* shared_gate;  // S [T, I_s]
  void* shared_up;    // S [T, I_s]
};

inline constexpr int64_t kControlWords = 32;

// Scratch, at offsets of workspace.h. A row r of macrobatch m lies at ring row r - m * macrobatch.
struct Ring {
  void* x;                    // S [macrobatch, H]  pulled; read by gate-up and its weight gradient
  void* h;                    // S [macrobatch, I]  forward: h; backward: w * h
  void* out;                  // S [macrobatch, H]  forward: o; backward: dx; of other ranks' rows, pushed from here
  void* gate;                 // S [macrobatch, I]  backward, recomputed
  void* up;                   // S [macrobatch, I]
  void* d_y;                  // S [macrobatch, H]  backward, pulled
  void* d_gate;               // S [macrobatch, I]  backward
  void* d_up;                 // S [macrobatch, I]
  void* weights;              // W [macrobatch]     backward, pulled router weights
  void* d_weights;            // W [macrobatch, column tiles of I] backward, partial sums of <dh', h>
  void* shared_h;             // S [T, I_s]         forward: h; backward: h
  void* shared_gate;          // S [T, I_s]         backward, recomputed
  void* shared_up;            // S [T, I_s]
  void* shared_d_gate;        // S [T, I_s]         backward
  void* shared_d_up;          // S [T, I_s]
  void* staged_x;             // T MxRowBytes(H)    MXFP8: x as this rank and its peers pull it
  void* staged_d_y;           // T MxRowBytes(H)    likewise, backward
  void* carry;                // W [3, H*I]         weight gradient of the expert that straddles two macrobatches
  void* returned;             // S [T*K, H]         the return window, written by this rank and its peers
  void* returned_d_weights;   // W [T*K]
  int32_t* counters;          // see tasks.h
  int32_t* control;           // CUDA, [kControlWords], zeroed with the counters; see cuda/megakernel.h
  int32_t* schedule_scratch;  // CUDA, forward; see cuda/schedule.cu
};

// One rank's call. S is the storage dtype (`type`), W its accumulation dtype.
struct Params {
  Dims dims;
  Pass pass;
  ScalarType type;
  Activation activation;
  double swiglu_limit;  // infinite: no clamp
  int64_t rank;
  const void* shared_scale;  // W [T]; must be null: not built yet

  const int32_t* ids;  // [T, K] global expert ids; outside [0, R*E_l): no expert
  const void* x;
  const void* router_weights;
  const void* d_y;
  Weights routed, shared;

  Schedule schedule;
  Context context;
  Ring ring;

  void* y;                 // S [T, H]; holds the shared expert's part until the epilogue
  void* d_x;               // S [T, H]; likewise
  void* d_router_weights;  // W [T, K]
  Gradients d_routed, d_shared;
};

// Of a row that came from this rank itself, given as in Schedule::row_source, the route; of others -1.
MOK_HD inline int64_t OwnRoute(const Params& p, int64_t source) {
  const int64_t routes = p.dims.Routes(), route = source - p.rank * routes;
  return route >= 0 && route < routes ? route : -1;
}

inline Peer PeerOf(const Params& p) {
  const bool mxfp8 = p.pass.mxfp8;
  return {mxfp8 ? p.ring.staged_x : p.x, mxfp8 ? p.ring.staged_d_y : p.d_y, p.router_weights, p.ring.returned,
          p.ring.returned_d_weights};
}

}  // namespace mok

#endif  // MOK_PARAMS_H_

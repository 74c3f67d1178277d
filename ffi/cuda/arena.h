// The peer buffers: an arena is memory of mok_jax's own on one device, in which a rank stages what its peers pull
// and finds what they push. All layers of a process share it, forward and backward pass alike. Made and mapped
// before anything compiles (mok_jax/distributed.py); a call only looks its table up.
//
// Why one of each buffer is enough, and two barriers a call: a rank stages, then meets its peers; they pull and
// push, then all meet again. So staged memory is not written while somebody pulls from it: whoever stages for
// the next call has passed the second barrier. And the return window is not pushed into while its owner reads
// it: whoever pushes in the next call has passed that call's first barrier, which the owner reaches after its
// epilogue. tests/test_protocol.py explores the orders.
#ifndef MOK_CUDA_ARENA_H_
#define MOK_CUDA_ARENA_H_

#include <cstdint>
#include <cstring>

#include "../params.h"
#include "../workspace.h"
#include "megakernel.h"
#include "status.h"

namespace mok::cuda {

// What the ranks of a call must agree on. Not how many calls each has made: that is what the barrier's epoch says.
struct Signature {
  static constexpr int kWords = kSignatureWords;
  // Direction, dtype (3: MXFP8), context, then sizes in the order of SignatureOf; the bits of swiglu_limit, a float;
  // and how many calls this rank's host has refused. One that refuses a call which others make is a call behind from
  // then on, and would go on with like calls.
  int32_t words[kWords];
};

inline Signature SignatureOf(const Params& p, int32_t refused) {
  const Dims& d = p.dims;
  const auto word = [](auto value) { return static_cast<int32_t>(value); };
  const auto limit = static_cast<float>(p.swiglu_limit);
  int32_t limit_bits;
  std::memcpy(&limit_bits, &limit, sizeof(limit_bits));
  return {{word(p.pass.direction), word(p.pass.mxfp8 ? 3 : word(p.type)), word(p.pass.context), word(d.tokens),
           word(d.hidden), word(d.intermediate), word(d.shared_intermediate), word(d.local_experts), word(d.ranks),
           word(d.top_k), word(d.minibatch), word(d.macrobatch), limit_bits, refused}};
}

// A rank's arrival at a barrier, written by that rank into the arena of another one.
struct alignas(64) Arrival {
  Signature signature;
  uint32_t aborted;  // its call has failed
  uint32_t epoch;    // written last
};

// The beginning of an arena, all zero at first. Epochs only grow, so nothing is ever reset; of two in turn each
// has its own arrivals, since a rank can be one barrier ahead of another but not two.
struct Control {
  uint32_t epoch;    // of the last barrier that this rank came to; its own kernels count it
  uint32_t abandon;  // sticky, written by any rank: the group has failed
  uint32_t owner;    // whether a call is under way; its own kernels set and clear it
  Arrival arrivals[2][kMaxRanks];
};
static_assert(sizeof(Control) <= kArenaControlBytes, "the control block has its place");

// One device's place among its peers.
struct Group {
  int64_t rank, ranks;
  int64_t number;  // of the group
  int64_t bytes;   // of each arena
  char* arenas[kMaxRanks];

  MOK_HD Control* ControlOf(int64_t of) const { return reinterpret_cast<Control*>(arenas[of]); }
};

// The group of a device in a table; null: there is none. What it points to stays valid until the table is gone.
const Group* FindGroup(int64_t table, int ordinal);

}  // namespace mok::cuda

#endif  // MOK_CUDA_ARENA_H_

// Barriers between the ranks of a group. One CTA, a thread for each peer; epochs count in device memory, so
// that nothing but the stream's order ties a call to the next one. No other kernel waits for a peer.
//
// A fault between ranks sets the call's abort flag, which makes its results NaN, and is told to the host once. One
// that leaves the group out of step (kMissing, kDiffers, kOverlaps, kMisplaced) abandons it on every rank that can
// be reached: every later call fails at once, without waiting, until a table is made anew.
#include <algorithm>

#include "exchange.h"
#include "kernels.h"
#include "ptx.cuh"
#include "publish.cuh"

namespace mok::cuda {
namespace {

constexpr int kThreads = 96, kStageThreads = 512;
static_assert(kThreads >= kMaxRanks, "a thread for each peer");
constexpr int64_t kWordBytes = sizeof(uint4);

__device__ volatile uint32_t& Abandoned(const Meeting& m, int64_t rank) { return m.group.ControlOf(rank)->abandon; }

// By one thread, on its own rank.
__device__ void Fail(const Meeting& m, ExchangeStatus status) {
  m.call_control[kAbortFlag] = m.call_control[kGivenUp] = 1;
  status.group = static_cast<int32_t>(m.group.number);
  status.rank = static_cast<int32_t>(m.group.rank);
  status.ranks = static_cast<int32_t>(m.group.ranks);
  for (int i = 0; i < Signature::kWords; ++i) status.mine[i] = m.signature.words[i];
  Report report{};
  report.timeout_ns = m.timeout_ns;
  report.exchange = status;
  Publish(m.reports, report);
}

__global__ void Enter(const __grid_constant__ Meeting m) {
  Control* own = m.group.ControlOf(m.group.rank);
  ExchangeStatus status{};
  if (m.place[0] != m.group.rank || m.place[1] != m.group.number) {
    status.fault = Fault::kMisplaced;
    status.peer = m.place[0];
  } else if (Abandoned(m, m.group.rank) != 0) {
    status.fault = Fault::kAbandoned;
  } else if (atomicExch(&own->owner, 1u) != 0) {
    status.fault = Fault::kOverlaps;
  } else {
    return;
  }
  Fail(m, status);
  if (status.fault == Fault::kAbandoned) return;
  for (int64_t r = 0; r < m.group.ranks; ++r) Abandoned(m, r) = 1;
  __threadfence_system();
}

__global__ void __launch_bounds__(kThreads) Barrier(const __grid_constant__ Meeting m, int barrier) {
  __shared__ ExchangeStatus status;
  __shared__ uint32_t epoch, abandoned;
  __shared__ int differs, aborted;  // the first rank that does
  Control* own = m.group.ControlOf(m.group.rank);
  const int r = threadIdx.x, ranks = static_cast<int>(m.group.ranks);
  if (r == 0) {
    status = {};
    epoch = ++own->epoch;
    abandoned = Abandoned(m, m.group.rank);
    differs = aborted = ranks;
  }
  __syncthreads();
  if (abandoned != 0) {  // since Enter, if that has not told; nobody waits for this rank any more
    if (r == 0 && m.call_control[kAbortFlag] == 0) {
      status.fault = Fault::kAbandoned;
      status.barrier = barrier;
      status.epoch = static_cast<int32_t>(epoch);
      Fail(m, status);
    }
    return;
  }
  const bool peer = r < ranks;
  const uint32_t slot = epoch % 2;
  if (peer) {
    // A thread of its own for each word would be faster; a barrier's time goes into the way there and back.
    Arrival* to = &m.group.ControlOf(r)->arrivals[slot][m.group.rank];
    for (int i = 0; i < Signature::kWords; ++i) {
      *static_cast<volatile int32_t*>(&to->signature.words[i]) = m.signature.words[i];
    }
    *static_cast<volatile uint32_t*>(&to->aborted) = m.call_control[kAbortFlag];
    // All that earlier kernels of this stream wrote, and the words above, before the epoch.
    __threadfence_system();
    ptx::StoreReleaseSystem(&to->epoch, epoch);
    const Arrival* from = &own->arrivals[slot][r];
    uint64_t deadline = 0;
    for (uint32_t polls = 1;; ++polls) {
      if (ptx::LoadAcquireSystem(&from->epoch) == epoch) break;
      __nanosleep(polls < 256 ? 20 : 200);
      if (polls % 64 != 0) continue;
      const bool given_up = Abandoned(m, m.group.rank) != 0;
      const uint64_t now = ptx::GlobalTimer();
      if (deadline == 0) deadline = now + m.timeout_ns;
      if (!given_up && now <= deadline) continue;
      if (given_up) atomicExch(&abandoned, 1u);
      atomicOr(&status.missing[r / 32], 1u << r % 32);
      break;
    }
    if (ptx::LoadAcquireSystem(&from->epoch) == epoch) {
      bool same = true;
      for (int i = 0; i < Signature::kWords; ++i) same = same && from->signature.words[i] == m.signature.words[i];
      if (!same) atomicMin(&differs, r);
      if (from->aborted != 0 && r != m.group.rank) atomicMin(&aborted, r);
    }
  }
  __syncthreads();
  const bool missing = (status.missing[0] | status.missing[1] | status.missing[2]) != 0;
  const bool out_of_step = missing || differs < ranks;
  if (r == 0 && (out_of_step || aborted < ranks)) {
    status.barrier = barrier;
    status.epoch = static_cast<int32_t>(epoch);
    // What explains the rest comes first: a rank with another call makes later ones miss it.
    if (differs < ranks) {
      status.fault = Fault::kDiffers;
      status.peer = differs;
      for (int i = 0; i < Signature::kWords; ++i) {
        status.theirs[i] = own->arrivals[slot][differs].signature.words[i];
      }
    } else if (missing) {
      status.fault = abandoned != 0 ? Fault::kAbandoned : Fault::kMissing;
    } else {
      status.fault = Fault::kAborted;
      status.peer = aborted;
    }
    Fail(m, status);
  }
  if (peer && out_of_step) {
    Abandoned(m, r) = 1;
    __threadfence_system();
  }
}

// Words of 16 bytes from `first` on, `stride` apart, several of which are under way at once.
template <int at_once>
__device__ void CopyWords(void* to, const void* from, int64_t words, int64_t first, int64_t stride) {
  auto* out = static_cast<uint4*>(to);
  const auto* in = static_cast<const uint4*>(from);
  for (; first < words; first += at_once * stride) {
    uint4 word[at_once];
#pragma unroll
    for (int i = 0; i < at_once; ++i) {
      if (first + i * stride < words) word[i] = __ldcs(in + first + i * stride);
    }
#pragma unroll
    for (int i = 0; i < at_once; ++i) {
      if (first + i * stride < words) out[first + i * stride] = word[i];
    }
  }
}

// Copies arrays into the arena. Not by cudaMemcpyAsync: once the group is given up a rank must not write any more into
// what a peer, which may have passed the barrier that this rank left, still pulls from.
__global__ void __launch_bounds__(kStageThreads)
    Stage(const __grid_constant__ Meeting m, const __grid_constant__ StagedArrays arrays) {
  if (m.call_control[kAbortFlag] != 0) return;
  const int64_t stride = int64_t{gridDim.x} * kStageThreads, first = int64_t{blockIdx.x} * kStageThreads + threadIdx.x;
  for (const auto& [offset, array, bytes] : arrays.at) {
    char* to = m.group.arenas[m.group.rank] + offset;
    const char* from = static_cast<const char*>(array);
    // XLA's buffers begin at multiples of 64 bytes at least.
    CopyWords<4>(to, from, bytes / kWordBytes, first, stride);
    const int64_t in_tail = bytes / kWordBytes * kWordBytes + first;
    if (in_tail < bytes) to[in_tail] = from[in_tail];
  }
}

// Up to half a millisecond, every 256th time up to half a second; from the epoch, which no two calls have in common.
__global__ void Pause(const __grid_constant__ Meeting m, int phase) {
  uint32_t hash = m.group.ControlOf(m.group.rank)->epoch * 64 + static_cast<uint32_t>(8 * m.group.rank + phase);
  for (int i = 0; i < 3; ++i) hash = (hash ^ hash >> 15) * 0x9e3779b1u;
  const uint64_t end = ptx::GlobalTimer() + (hash >> 8) % 500000 * (hash % 256 == 0 ? 1000 : 1);
  while (ptx::GlobalTimer() < end) __nanosleep(1000);
}

__global__ void __launch_bounds__(kStageThreads)
    MoveRows(const __grid_constant__ Meeting m, Traffic traffic, const __grid_constant__ TrafficRows rows) {
  if (m.call_control[kAbortFlag] != 0) return;
  const bool both = traffic == Traffic::kBoth;
  const bool pulls = traffic == Traffic::kPull || (both && blockIdx.x % 2 == 0);
  const int64_t cta = both ? blockIdx.x / 2 : blockIdx.x, ctas = both ? gridDim.x / 2 : gridDim.x;
  constexpr int kWarps = kStageThreads / 32;
  const int64_t ranks = m.group.ranks, rank = m.group.rank;
  const auto copy = [&](char* to, const char* from) {
    CopyWords<8>(to, from, rows.row_bytes / kWordBytes, threadIdx.x % 32, 32);
  };
  for (int64_t row = cta * kWarps + threadIdx.x / 32; row < rows.routes; row += ctas * kWarps) {
    char* peer = m.group.arenas[(rank + 1 + row) % ranks];
    if (pulls) {
      copy(rows.pulled + row * rows.row_bytes, peer + rows.x + row % rows.tokens * rows.row_bytes);
    } else {
      const int64_t slot = row / ranks * ranks + rank;
      copy(peer + rows.returned + slot * rows.row_bytes, rows.pushed + row * rows.row_bytes);
    }
  }
}

__global__ void Leave(const __grid_constant__ Meeting m) { m.group.ControlOf(m.group.rank)->owner = 0; }

}  // namespace

const char* LoadExchange() { return Load(Enter, Barrier, Stage, MoveRows, Pause, Leave); }

const char* LaunchEnter(const Meeting& meeting, cudaStream_t stream) {
  Enter<<<1, 1, 0, stream>>>(meeting);
  return Launched();
}

const char* LaunchStage(const Meeting& meeting, const StagedArrays& arrays, int sms, cudaStream_t stream) {
  int64_t bytes = 0;
  for (const auto& array : arrays.at) bytes = std::max(bytes, array.bytes);
  if (bytes == 0) return nullptr;
  const int64_t blocks = std::min<int64_t>(2 * sms, CeilDiv(bytes, kWordBytes * kStageThreads));
  Stage<<<static_cast<unsigned>(blocks), kStageThreads, 0, stream>>>(meeting, arrays);
  return Launched();
}

const char* LaunchBarrier(const Meeting& meeting, int barrier, cudaStream_t stream) {
  Barrier<<<1, kThreads, 0, stream>>>(meeting, barrier);
  return Launched();
}

const char* LaunchTraffic(const Meeting& meeting, Traffic traffic, const TrafficRows& rows, int sms,
                          cudaStream_t stream) {
  MoveRows<<<static_cast<unsigned>(sms), kStageThreads, 0, stream>>>(meeting, traffic, rows);
  return Launched();
}

const char* LaunchPause(const Meeting& meeting, int phase, cudaStream_t stream) {
  Pause<<<1, 1, 0, stream>>>(meeting, phase);
  return Launched();
}

const char* LaunchLeave(const Meeting& meeting, cudaStream_t stream) {
  Leave<<<1, 1, 0, stream>>>(meeting);
  return Launched();
}

}  // namespace mok::cuda

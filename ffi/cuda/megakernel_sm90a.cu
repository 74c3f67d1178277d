// The megakernel for Hopper: bfloat16, persistent, one CTA an SM. Launched by megakernel.cu.
//
// Warps of a CTA: 0 brings boxes to shared memory by the copy engine; 1 takes tickets, waits for their
// counters and describes the tasks, one ahead; 2 moves rows (dispatch, combine and their reverses) through
// buffers of its own; 3 signals finished tasks, whose fence would hold up a warp that multiplies; 4 to 11 are
// two warpgroups that multiply 64 rows each and finish the tile. The warpgroups are not tied to each other,
// so one multiplies while the other finishes.
#include <new>

#include "gemm.cuh"
#include "megakernel_sm90a.h"
#include "ptx.cuh"
#include "queue.cuh"
#include "stages.cuh"

namespace mok::cuda {
namespace {

constexpr int kThreads = 384, kMathWarps = 8;
constexpr int kStages = 4, kStep = 64;      // of the pipeline; elements of the contraction
constexpr int kBoxBytes = 64 * 128;         // 64 rows of 64 bfloat16
constexpr int kStageBytes = 6 * kBoxBytes;  // two boxes of A, four of B
constexpr int kWorkSlots = 2;
constexpr int kCachedExperts = 512;
// Careful: more than the CTA was launched with (65536 / 384, rounded down to a multiple of 8) and the second
// warpgroup waits for registers for ever.
constexpr int kLaunchRegisters = 168, kOtherRegisters = 72, kMathRegisters = 216;
static_assert(kOtherRegisters + 2 * kMathRegisters <= 3 * kLaunchRegisters, "no registers are to be had");
constexpr int kMoveBuffers = 6, kMoveBytes = 4096;
constexpr int kLag = 4;  // pieces on their way in while another goes out
static_assert(kLag < kMoveBuffers, "a piece's buffer must be free when it comes in");

struct Shared {
  uint8_t stages[kStages][kStageBytes];  // 1024-byte aligned: the swizzle counts from there
  uint8_t moves[kMoveBuffers][kMoveBytes];
  uint8_t zeros[kMoveBytes];
  int32_t row_offset[kCachedExperts + 1], row_count[kCachedExperts];  // copies, if all experts fit
  const int32_t* row_counts;                                          // these or the originals
  TaskList list;
  Work work[kWorkSlots];
  // full: the copy engine's bytes (1 arrival), waited for by the math warps; empty: the math warps (8), by
  // the copying warp. work_full: the ticket warp (1), by all that work on the slot; finished: the math warps
  // (8), by the signalling warp; work_empty: the copying and the signalling warp (2), by the ticket warp.
  // moved: the copy engine's bytes (1), by the moving warp.
  uint64_t full[kStages], empty[kStages];
  uint64_t work_full[kWorkSlots], finished[kWorkSlots], work_empty[kWorkSlots];
  uint64_t moved[kMoveBuffers];
};
// Careful: the host's size, an upper bound: Index, and so TaskList and Work, is wider there.
constexpr int kSharedBytes = sizeof(Shared) + 1024;
static_assert(kSharedBytes <= 232448, "a CTA of sm_90 has 227 KiB");

// A position in a ring of buffers and the parity of its barriers.
template <int size>
struct Cursor {
  int at = 0;
  uint32_t parity = 0;
  __device__ void Next() {
    if (++at == size) {
      at = 0;
      parity ^= 1;
    }
  }
};

// ---- warp 0: the copy engine ----

__device__ void Copy(const Maps& maps, Shared& s) {
  Cursor<kStages> stage;
  for (Cursor<kWorkSlots> slot;; slot.Next()) {
    ptx::BarrierWait(ptx::Shared(&s.work_full[slot.at]), slot.parity);
    const Op op = RoutedOp(s.work[slot.at].task.op);
    const Gemm g = s.work[slot.at].gemm;
    ptx::BarrierArrive(ptx::Shared(&s.work_empty[slot.at]));
    if (op == Op::kNone) return;
    const bool gradient = op == Op::kGradGateUp || op == Op::kGradDown;
    const bool b_along_k = op == Op::kDgradDown || op == Op::kDgradGateUp;
    // Orders the copies after the ordinary stores that the ticket warp has waited for.
    ptx::FenceProxyAsync();
    for (int at = 0; at < g.steps; ++at, stage.Next()) {
      ptx::BarrierWait(ptx::Shared(&s.empty[stage.at]), stage.parity ^ 1);
      const uint32_t full = ptx::Shared(&s.full[stage.at]), to = ptx::Shared(s.stages[stage.at]);
      ptx::BarrierArriveExpect(full, kStageBytes);
#pragma unroll
      for (int i = 0; i < 6; ++i) {
        const Box box = i < 2 ? BoxOf(g, g.a, false, i, at, kStep) : BoxOf(g, g.b, g.halves, i - 2, at, kStep);
        const bool along_k = i < 2 ? !gradient : b_along_k;
        ptx::CopyTensor(to + i * kBoxBytes, &maps.at[box.matrix], full, along_k ? box.k : box.mn,
                        along_k ? box.mn : box.k, box.z);
      }
    }
  }
}

// ---- warp 1: tickets ----

// What the input gradient of h will read when its product is done, long after it left the cache.
__device__ void Prefetch(const Params& p, const Work& w, int lane) {
  const Stages<BFloat16, true> stages(p, 0, 0);
  const int64_t width = w.shared ? p.dims.shared_intermediate : p.dims.intermediate;
  const int bytes = static_cast<int>(2 * Min(kTileN, width - w.column));
  for (int row = lane; row < w.count; row += 32) {
    const int64_t at = (static_cast<int64_t>(w.row) + row) * width + w.column;
    for (const void* from : {stages.Gate(w), stages.Up(w)}) {
      ptx::PrefetchBulk(static_cast<const BFloat16*>(from) + at, bytes);
    }
  }
}

__device__ void HandOut(const Params& p, const Launch& launch, Shared& s, int lane) {
  const Tiles tiles = TilesOf(Path::kHopper);
  const TaskList& list = s.list;
  const int tasks = list.NumCompute();
  int ahead = TakeTicket(p, kComputeTicket, lane);  // one ticket ahead, which hides the atomic's way
  for (Cursor<kWorkSlots> slot;; slot.Next()) {
    Task task;
    int ticket;
    do {
      ticket = __shfl_sync(~0u, ahead, 0);
      ahead = TakeTicket(p, kComputeTicket, lane);
      task = ticket < tasks ? list.Compute(ticket) : Task{};
    } while (ticket < tasks && task.op == Op::kNone);
    if (!WaitForCounters(p, launch, task, lane)) task = Task{};
    ptx::BarrierWait(ptx::Shared(&s.work_empty[slot.at]), slot.parity ^ 1);
    if (lane == 0) {
      if (task.op == Op::kNone) {
        s.work[slot.at].task.op = Op::kNone;
      } else {
        Describe(p, list, s.row_counts, tiles, task, kStep, &s.work[slot.at]);
      }
      ptx::BarrierArrive(ptx::Shared(&s.work_full[slot.at]));
    }
    __syncwarp();
    if (task.op == Op::kNone) return;
    if (RoutedOp(task.op) == Op::kDgradDown) Prefetch(p, s.work[slot.at], lane);
  }
}

// ---- warp 2: moving rows ----

// Copies through shared memory, in pieces, by one thread. Only the copy engine touches the data.
class Mover {
 public:
  __device__ Mover(uint8_t (&buffers)[kMoveBuffers][kMoveBytes], uint64_t (&barriers)[kMoveBuffers],
                   const uint8_t* zeros)
      : buffers_(ptx::Shared(buffers)), barriers_(ptx::Shared(barriers)), zeros_(ptx::Shared(zeros)) {}

  // from: null for zeros.
  __device__ void Move(const void* from, void* to, int64_t bytes) {
    for (int64_t at = 0; at < bytes; at += kMoveBytes) {
      const int piece = static_cast<int>(Min(kMoveBytes, bytes - at));
      In(from == nullptr ? nullptr : static_cast<const char*>(from) + at, static_cast<char*>(to) + at, piece);
    }
  }

  // Until everything is written.
  __device__ void Finish() {
    for (int i = 0; i < kLag; ++i) In(nullptr, nullptr, 0);
    ptx::StoreBulkWait<0>();
    ptx::FenceProxyAsync();  // orders the copies before the signal that lets others read them
  }

 private:
  // Starts a piece and sends the one kLag before it out.
  __device__ void In(const void* from, void* to, int bytes) {
    // The buffer's piece before this one went out kMoveBuffers - kLag steps ago.
    ptx::StoreBulkWaitRead<kMoveBuffers - kLag - 1>();
    const uint32_t barrier = barriers_ + in_.at * sizeof(uint64_t);
    if (from != nullptr) {
      ptx::BarrierArriveExpect(barrier, bytes);
      ptx::LoadBulk(buffers_ + in_.at * kMoveBytes, from, bytes, barrier);
    }
    const int oldest = steps_ % kLag;
    if (bytes_[oldest] > 0) {
      uint32_t source = zeros_;
      if (loaded_[oldest]) {
        source = buffers_ + slot_[oldest] * kMoveBytes;
        ptx::BarrierWait(barriers_ + slot_[oldest] * sizeof(uint64_t), parity_ >> slot_[oldest] & 1);
        parity_ ^= 1u << slot_[oldest];
      }
      ptx::StoreBulk(to_[oldest], source, bytes_[oldest]);
    }
    ptx::StoreBulkCommit();
    to_[oldest] = to;
    bytes_[oldest] = bytes;
    loaded_[oldest] = from != nullptr;
    slot_[oldest] = in_.at;
    in_.Next();
    ++steps_;
  }

  const uint32_t buffers_, barriers_, zeros_;
  Cursor<kMoveBuffers> in_;
  uint32_t parity_ = 0;  // of each buffer's barrier
  uint32_t steps_ = 0;
  void* to_[kLag] = {};
  int bytes_[kLag] = {};
  int slot_[kLag] = {};
  bool loaded_[kLag] = {};
};

__device__ void MoveRows(const Params& p, const PeerTable& peers, const Launch& launch, Shared& s, int lane) {
  const TaskList& list = s.list;
  const Dims& d = p.dims;
  // Careful: below, one lane moves one row's weight.
  static_assert(TilesOf(Path::kHopper).communication_rows <= 32, "a communication task has a row for each lane");
  const int64_t tasks = list.NumCommunication(), routes = d.Routes(), row_bytes = d.hidden * 2;
  Mover mover(s.moves, s.moved, s.zeros);
  const auto row = [row_bytes](const void* base, int64_t index) {
    return const_cast<char*>(static_cast<const char*>(base)) + index * row_bytes;
  };
  for (int ticket; (ticket = __shfl_sync(~0u, TakeTicket(p, kCommunicationTicket, lane), 0)) < tasks;) {
    const Task task = list.Communication(ticket);
    if (!WaitForCounters(p, launch, task, lane)) return;
    const Moved moved = MovedBy(p, list, s.row_counts, task);
    const int32_t* sources = p.schedule.row_source + moved.first;
    const bool pulls = task.op == Op::kDispatch || task.op == Op::kReverseCombine;
    if (lane == 0) {
      // Orders the copies after the ordinary stores just waited for.
      ptx::FenceProxyAsync();
      void* x = pulls ? PulledX(p, list, task) : nullptr;
      for (int i = 0; i < moved.rows; ++i) {
        const bool exists = i < moved.count;
        if (!pulls && !exists) break;
        const int64_t source = exists ? sources[i] : 0;
        const Peer& peer = peers.at[source / routes];
        const int64_t ring_row = moved.ring_row + i, token = source % routes / d.top_k;
        if (x != nullptr) mover.Move(exists ? row(peer.x, token) : nullptr, row(x, ring_row), row_bytes);
        if (task.op == Op::kReverseCombine) {
          mover.Move(exists ? row(peer.d_y, token) : nullptr, row(p.ring.d_y, ring_row), row_bytes);
        }
        if (!pulls) mover.Move(row(p.ring.out, ring_row), row(peer.returned, source % routes), row_bytes);
      }
      mover.Finish();
    }
    if (d.Exchanges() && lane < moved.count) {
      const int64_t source = sources[lane], ring_row = moved.ring_row + lane;
      const Peer& peer = peers.at[source / routes];
      if (task.op == Op::kReverseCombine) {
        static_cast<float*>(p.ring.weights)[ring_row] = static_cast<const float*>(peer.router_weights)[source % routes];
      } else if (task.op == Op::kReverseDispatch) {
        static_cast<float*>(peer.returned_d_weights)[source % routes] =
            Stages<BFloat16, true>::SumPartials(p, ring_row, static_cast<int>(list.DHiddenTiles()));
      }
    }
    __threadfence();  // every lane's weights, before lane 0 signals for all
    __syncwarp();
    if (lane == 0) Signal(p, task);
  }
}

// ---- warp 3: signals ----

__device__ void SignalFinished(const Params& p, Shared& s) {
  for (Cursor<kWorkSlots> slot;; slot.Next()) {
    ptx::BarrierWait(ptx::Shared(&s.work_full[slot.at]), slot.parity);
    const Task& task = s.work[slot.at].task;
    if (task.op == Op::kNone) return;
    ptx::BarrierWait(ptx::Shared(&s.finished[slot.at]), slot.parity);
    Signal(p, task);
    ptx::BarrierArrive(ptx::Shared(&s.work_empty[slot.at]));
  }
}

// ---- warps 4 to 11: products ----

// begun: the sums hold something.
template <ptx::Major a_major, ptx::Major b_major, bool begun>
__device__ __forceinline__ void Multiply(Shared& s, Cursor<kStages>& stage, int steps, int group, int lane,
                                         float (&sum)[kSums]) {
  // 16 elements of the contraction further, in units of a descriptor's address.
  constexpr int kA = (a_major == ptx::Major::kK ? 32 : 16 * 128) >> 4;
  constexpr int kB = (b_major == ptx::Major::kK ? 32 : 16 * 128) >> 4;
  uint32_t before = 0;
  ptx::Hold(sum);
  for (int at = 0; at < steps; ++at, stage.Next()) {
    ptx::BarrierWait(ptx::Shared(&s.full[stage.at]), stage.parity);
    const uint32_t address = ptx::Shared(s.stages[stage.at]);
    const uint64_t a = ptx::Descriptor(address + group * kBoxBytes, kBoxBytes);
    const uint64_t b = ptx::Descriptor(address + 2 * kBoxBytes, kBoxBytes);
    ptx::WgmmaFence();
#pragma unroll
    for (int i = 0; i < kStep / 16; ++i) {
      ptx::Wgmma<a_major, b_major>(sum, a + i * kA, b + i * kB, begun || at > 0 || i > 0);
    }
    ptx::WgmmaCommit();
    if (at > 0) {
      ptx::WgmmaWait<1>();  // the step before has read its stage
      if (lane == 0) ptx::BarrierArrive(before);
    }
    before = ptx::Shared(&s.empty[stage.at]);
  }
  ptx::WgmmaWait<0>();
  ptx::Hold(sum);
  if (steps > 0 && lane == 0) ptx::BarrierArrive(before);
}

__device__ void Calculate(const Params& p, Shared& s, int warp, int lane) {
  using ptx::Major;
  const int group = warp / 4;
  const Stages<BFloat16, true> stages(p, warp, lane);
  Cursor<kStages> stage;
  float sum[kSums];
  for (Cursor<kWorkSlots> slot;; slot.Next()) {
    ptx::BarrierWait(ptx::Shared(&s.work_full[slot.at]), slot.parity);
    const Work& w = s.work[slot.at];
    const Op op = RoutedOp(w.task.op);
    if (op == Op::kNone) return;
    const int steps = w.gemm.steps;
    if (op == Op::kGateUp || op == Op::kDown) {
      Multiply<Major::kK, Major::kMn, false>(s, stage, steps, group, lane, sum);
    } else if (op == Op::kDgradDown || op == Op::kDgradGateUp) {
      Multiply<Major::kK, Major::kK, false>(s, stage, steps, group, lane, sum);
    } else {
      stages.Begin(w, sum);
      Multiply<Major::kMn, Major::kMn, true>(s, stage, steps, group, lane, sum);
    }
    stages.End(w, sum);
    __syncwarp();
    if (lane == 0) ptx::BarrierArrive(ptx::Shared(&s.finished[slot.at]));
  }
}

__global__ void __launch_bounds__(kThreads, 1)
    HopperKernel(const __grid_constant__ Params p, const __grid_constant__ PeerTable peers,
                 const __grid_constant__ Maps maps, const __grid_constant__ Launch launch) {
  extern __shared__ uint8_t raw[];
  Shared& s = *reinterpret_cast<Shared*>((reinterpret_cast<uintptr_t>(raw) + 1023) / 1024 * 1024);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; ++i) {
      ptx::BarrierInit(ptx::Shared(&s.full[i]), 1);
      ptx::BarrierInit(ptx::Shared(&s.empty[i]), kMathWarps);
    }
    for (int i = 0; i < kWorkSlots; ++i) {
      ptx::BarrierInit(ptx::Shared(&s.work_full[i]), 1);
      ptx::BarrierInit(ptx::Shared(&s.finished[i]), kMathWarps);
      ptx::BarrierInit(ptx::Shared(&s.work_empty[i]), 2);
    }
    for (auto& barrier : s.moved) ptx::BarrierInit(ptx::Shared(&barrier), 1);
    ptx::BarrierInitFence();
    s.row_counts = p.dims.local_experts <= kCachedExperts ? s.row_count : p.schedule.row_count;
  }
  for (int i = threadIdx.x; i < kMoveBytes / 4; i += kThreads) reinterpret_cast<uint32_t*>(s.zeros)[i] = 0;
  // Waiting for counters empties the first level cache again and again: what decoding a task reads is copied.
  const bool cached = p.dims.local_experts <= kCachedExperts;
  for (int i = threadIdx.x; cached && i <= p.dims.local_experts; i += kThreads) {
    s.row_offset[i] = p.schedule.row_offset[i];
    if (i < p.dims.local_experts) s.row_count[i] = p.schedule.row_count[i];
  }
  ptx::FenceProxyAsync();  // the zeros, before they are copied out
  __syncthreads();
  if (threadIdx.x == 0) {
    new (&s.list) TaskList(p.dims, TilesOf(Path::kHopper), p.pass, cached ? s.row_offset : p.schedule.row_offset);
  }
  __syncthreads();
  if (warp < 4) {
    ptx::GiveRegisters<kOtherRegisters>();
    if (warp == 0) {
      if (lane == 0) Copy(maps, s);
    } else if (warp == 1) {
      HandOut(p, launch, s, lane);
    } else if (warp == 2) {
      MoveRows(p, peers, launch, s, lane);
    } else {
      if (lane == 0) SignalFinished(p, s);
    }
  } else {
    ptx::TakeRegisters<kMathRegisters>();
    Calculate(p, s, warp - 4, lane);
  }
}

}  // namespace

const char* LoadHopperKernel() {
  cudaFuncAttributes attributes;
  cudaError_t error = cudaFuncGetAttributes(&attributes, HopperKernel);
  if (error == cudaSuccess) {
    error = cudaFuncSetAttribute(HopperKernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes);
  }
  if (error != cudaSuccess) return cudaGetErrorString(error);
  if (attributes.numRegs < kLaunchRegisters) {
    return "this compiler gave the Hopper kernel too few registers to share out; build with CUDA 13.0 and "
           "without -G or a register limit, or use MoKConfig(portable=True)";
  }
  return nullptr;
}

const char* LaunchHopperKernel(const Params& params, const PeerTable& peers, const Maps& maps, const Launch& launch,
                               cudaStream_t stream) {
  HopperKernel<<<launch.sms, kThreads, kSharedBytes, stream>>>(params, peers, maps, launch);
  const cudaError_t error = cudaGetLastError();
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

}  // namespace mok::cuda

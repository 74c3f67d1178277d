// The megakernel for Hopper: bfloat16, persistent, one CTA an SM. Launched by megakernel.cu.
//
// Two CTAs are a cluster and take two tasks at a time, neighbours in the list. Where these have an operand in
// common each CTA brings half of it to both, so that the second level cache is read less; where not, each
// works by itself, with as many steps as the other so that their pipelines stay in line.
//
// Warps of a CTA: 0 brings boxes to shared memory by the copy engine; 1 takes tickets, waits for their
// counters and describes the tasks, one ahead; 2 moves rows (dispatch, combine and their reverses) through
// buffers of its own; 3 sends out the results of dgrad-down and signals finished tasks, whose fence would hold
// up a warp that multiplies; 4 to 11 are two warpgroups that multiply 64 rows each and finish the tile. The
// warpgroups are not tied to each other, so one multiplies while the other finishes.
#include <new>

#include "gemm.cuh"
#include "hopper.cuh"
#include "hopper_mover.cuh"
#include "megakernel_sm90a.h"
#include "ptx.cuh"
#include "queue.cuh"
#include "stages.cuh"

namespace mok::cuda {
namespace {

// ---- warp 0: the copy engine ----

// Steps [begin, end) of a product, whose operands are the same matrices throughout. All that one step does not
// change is worked out before: one thread has about a thousand cycles for a step.
template <Common common>
__device__ __forceinline__ void CopySteps(const Maps& maps, Shared& s, Cursor<kStages>& stage, const Gemm& g,
                                          bool a_along_k, bool b_along_k, int begin, int end, int rank) {
  constexpr bool kOfBoth[2] = {common == Common::kA, common == Common::kB};
  constexpr int kBoxesA = kOfBoth[0] ? 1 : 2, kBoxes = kBoxesA + (kOfBoth[1] ? 2 : 4);
  if (begin >= end) return;
  const CUtensorMap* map[kBoxes];
  int x[kBoxes], y[kBoxes], z[kBoxes], place[kBoxes];
#pragma unroll
  for (int i = 0; i < kBoxes; ++i) {
    const bool is_a = i < kBoxesA, along_k = is_a ? a_along_k : b_along_k;
    const int index = is_a ? i + kOfBoth[0] * rank : i - kBoxesA + kOfBoth[1] * 2 * rank;  // this CTA's part
    const Box box = is_a ? BoxOf(g, g.a, false, index, begin, kStep) : BoxOf(g, g.b, g.halves, index, begin, kStep);
    map[i] = &maps.at[box.matrix];
    x[i] = along_k ? box.k : box.mn;
    y[i] = along_k ? box.mn : box.k;
    z[i] = box.z;
    place[i] = (is_a ? index : 2 + index) * kBoxBytes;
  }
  const int x_step[2] = {a_along_k ? kStep : 0, b_along_k ? kStep : 0};
  for (int at = begin; at < end; ++at, stage.Next()) {
    ptx::BarrierWait(ptx::Shared(&s.empty[stage.at]), stage.parity ^ 1);
    const uint32_t full = ptx::Shared(&s.full[stage.at]), to = ptx::Shared(s.stages[stage.at]);
    ptx::BarrierArriveExpect(full, kStageBytes);
#pragma unroll
    for (int i = 0; i < kBoxes; ++i) {
      const int operand = i < kBoxesA ? 0 : 1;
      if (kOfBoth[operand]) ptx::CopyTensorToBoth(to + place[i], map[i], full, x[i], y[i], z[i]);
      else ptx::CopyTensor(to + place[i], map[i], full, x[i], y[i], z[i]);
      x[i] += x_step[operand];
      y[i] += kStep - x_step[operand];
    }
  }
}

__device__ __forceinline__ void CopyGateUp(const Maps& maps, Shared& s, Cursor<kStages>& stage, int16_t gate, int row,
                                           int column) {
  for (int at = 0; at < kFinishingSteps; ++at, stage.Next(), column += kStep) {
    ptx::BarrierWait(ptx::Shared(&s.empty[stage.at]), stage.parity ^ 1);
    const uint32_t full = ptx::Shared(&s.full[stage.at]), to = ptx::Shared(s.stages[stage.at]);
    ptx::BarrierArriveExpect(full, kFinishingBytes);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      ptx::CopyTensor(to + i * kBoxBytes, &maps.at[gate + i / 2], full, column, row + 64 * (i % 2), 0);
    }
  }
}

__device__ int StepsOf(const Work& w) {
  return w.gemm.steps + (RoutedOp(w.task.op) == Op::kDgradDown ? kFinishingSteps : 0);
}

__device__ void Copy(const Maps& maps, Shared& s, int rank) {
  Cursor<kStages> stage;
  bool apart = false;     // the task before had nothing in common with the other CTA's
  uint32_t parities = 0;  // of other_done
  for (Cursor<kWorkSlots> slot;; slot.Next()) {
    ptx::BarrierWait(ptx::Shared(&s.work_full[slot.at]), slot.parity);
    const PairWork& w = s.work[slot.at];
    const Op op = RoutedOp(w.task.op);
    const Gemm g = w.gemm;
    const Common common = w.common;
    const int steps = w.steps, row = w.row, column = w.column;
    const int16_t gate = w.gate;
    const bool last = w.last;
    ptx::BarrierArrive(ptx::Shared(&s.work_empty[slot.at]));
    if (last) return;
    if (apart) {  // nothing has told yet that the other CTA's stages are free
      const int before = (slot.at + kWorkSlots - 1) % kWorkSlots;
      ptx::BarrierWait(ptx::Shared(&s.other_done[before]), parities >> before & 1);
      parities ^= 1u << before;
    }
    apart = common == Common::kNothing;
    const bool a_along_k = op != Op::kGradGateUp && op != Op::kGradDown;
    const bool b_along_k = op == Op::kDgradDown || op == Op::kDgradGateUp;
    // Orders the copies after the ordinary stores that the ticket warp has waited for.
    ptx::FenceProxyAsync();
    for (const bool second : {false, true}) {
      const int split = Min(g.split, g.steps), begin = second ? split : 0, end = second ? g.steps : split;
      switch (common) {
        case Common::kA: CopySteps<Common::kA>(maps, s, stage, g, a_along_k, b_along_k, begin, end, rank); break;
        case Common::kB: CopySteps<Common::kB>(maps, s, stage, g, a_along_k, b_along_k, begin, end, rank); break;
        default: CopySteps<Common::kNothing>(maps, s, stage, g, a_along_k, b_along_k, begin, end, rank);
      }
    }
    int done = g.steps;
    if (op == Op::kDgradDown) {
      CopyGateUp(maps, s, stage, gate, row, column);
      done += kFinishingSteps;
    }
    for (int at = done; at < steps; ++at, stage.Next()) {  // the other CTA's
      ptx::BarrierWait(ptx::Shared(&s.empty[stage.at]), stage.parity ^ 1);
      ptx::BarrierArrive(ptx::Shared(&s.full[stage.at]));
    }
  }
}

// ---- warp 1: tickets ----

__device__ bool Same(const Operand& a, const Operand& b) {
  return a.first == b.first && a.mn == b.mn && a.k == b.k && a.z == b.z;
}

__device__ Common CommonOf(const Work& one, const Work& other) {
  const Gemm &g = one.gemm, &h = other.gemm;
  if (one.task.op != other.task.op || g.steps != h.steps || g.steps == 0) return Common::kNothing;
  return Same(g.b, h.b) ? Common::kB : Same(g.a, h.a) ? Common::kA : Common::kNothing;
}

// The cluster's next ticket: its first CTA takes them, one ahead, which hides the atomic's way, and tells the
// second one.
class Tickets {
 public:
  __device__ Tickets(const Params& p, Shared& s, int rank, int lane) : p_(p), s_(s), rank_(rank), lane_(lane) {
    if (rank == 0) ahead_ = TakeTicket(p, kComputeTicket, lane);
  }

  __device__ int Next() {
    const uint32_t full = ptx::Shared(&s_.ticket_full[at_.at]), empty = ptx::Shared(&s_.ticket_empty[at_.at]);
    int32_t* mail = &s_.tickets[at_.at];
    int ticket;
    if (rank_ == 0) {
      ticket = __shfl_sync(~0u, ahead_, 0);
      ahead_ = TakeTicket(p_, kComputeTicket, lane_);
      ptx::BarrierWait(empty, at_.parity ^ 1);
      if (lane_ == 0) ptx::StoreMapped(ptx::MapShared(ptx::Shared(mail), 1), ticket, ptx::MapShared(full, 1));
    } else {
      ptx::BarrierWaitCluster(full, at_.parity);
      ticket = *static_cast<volatile int32_t*>(mail);
      __syncwarp();
      if (lane_ == 0) {
        ptx::BarrierArriveExpect(full, sizeof(int32_t));
        ptx::BarrierArriveMapped(ptx::MapShared(empty, 0));
      }
    }
    at_.Next();
    return ticket;
  }

 private:
  const Params& p_;
  Shared& s_;
  const int rank_, lane_;
  int ahead_ = 0;
  Cursor<kWorkSlots> at_;
};

__device__ void HandOut(const Params& p, const Launch& launch, Shared& s, int rank, int lane) {
  const Tiles tiles = TilesOf(Path::kHopper);
  const TaskList& list = s.list;
  const int tasks = list.NumCompute();
  Tickets tickets(p, s, rank, lane);
  bool fine = true;
  for (Cursor<kWorkSlots> slot;; slot.Next()) {
    const int first = 2 * tickets.Next(), index = first + (rank ^ (lane & 1));
    // Even lanes decode this CTA's task, odd lanes the other one's.
    TaskList::Run& run = s.runs[lane & 1];
    const bool ended = index < tasks && (index < run.begin || index >= run.end);
    __syncwarp();  // every lane has looked
    if (ended) {
      const TaskList::Run next = list.RunOf(index);
      if (lane < 2) run = next;
    }
    __syncwarp();
    const Task task = index < tasks ? list.Compute(run, index) : Task{};
    if (lane == 0) s.waited = task;
    __syncwarp();
    // After a wait that failed the rest goes on without waiting: the other CTA may count on this one.
    fine = fine && WaitForCounters(p, launch, s.waited, lane);
    ptx::BarrierWait(ptx::Shared(&s.work_empty[slot.at]), slot.parity ^ 1);
    PairWork& w = s.work[slot.at];
    if (lane < 2) Describe(p, list, s.row_counts, tiles, task, kStep, lane == 0 ? static_cast<Work*>(&w) : &s.other);
    __syncwarp();
    if (lane == 0) {
      w.common = CommonOf(w, s.other);
      w.steps = Max(1, Max(StepsOf(w), StepsOf(s.other)));
      w.last = first >= tasks;
      ptx::BarrierArrive(ptx::Shared(&s.work_full[slot.at]));
    }
    __syncwarp();
    if (first >= tasks) return;
  }
}

// ---- warp 3: results of dgrad-down, signals ----

// By one thread. stage: of the first step after the product.
__device__ void SendOut(const Params& p, const Maps& maps, Shared& s, const PairWork& w, int rank, int stage,
                        uint32_t parity) {
  const bool apart = w.common == Common::kNothing;
  const int width = static_cast<int>(w.shared ? p.dims.shared_intermediate : p.dims.intermediate);
  const int rows = w.shared ? w.count : kTileM;  // padding rows of the ring too
  const int16_t to_shared = w.shared ? kSharedH - kH : 0;
  const int16_t ids[3] = {kDGate, kDUp, kH};
  ptx::FenceProxyAsync();  // orders the copies after what the ticket warp has waited for
  for (int i = 0; i < kFinishingSteps; ++i, stage = (stage + 1) % kStages) {
    ptx::BarrierWait(ptx::Shared(&s.written[stage]), parity);
    const uint32_t from = ptx::Shared(s.stages[stage]);
    const int column = w.column + i * kStep;
    if (column < width) {
#pragma unroll
      for (int box = 0; box < 6; ++box) {
        const int row = 64 * (box % 2);
        if (row >= rows) continue;
        ptx::StoreTensor(&maps.at[ids[box / 2] + to_shared], from + box * kBoxBytes, column, w.row + row, 0);
      }
      ptx::StoreBulkCommit();
      ptx::StoreBulkWaitRead<0>();
    }
    for (const int cta : {rank, apart ? rank : rank ^ 1}) {
      ptx::BarrierArriveMapped(ptx::MapShared(ptx::Shared(&s.empty[stage]), cta), kMathWarps);
    }
  }
}

__device__ void SignalFinished(const Params& p, const Maps& maps, Shared& s, int rank) {
  int stage = 0;
  uint32_t parity = 0;  // of all of `written`: a task of dgrad-down takes each stage once
  static_assert(kFinishingSteps == kStages, "each stage is written once by a task");
  for (Cursor<kWorkSlots> slot;; slot.Next()) {
    ptx::BarrierWait(ptx::Shared(&s.work_full[slot.at]), slot.parity);
    const PairWork& w = s.work[slot.at];
    if (w.last) return;
    const bool sends = RoutedOp(w.task.op) == Op::kDgradDown;
    if (sends) {
      SendOut(p, maps, s, w, rank, (stage + w.gemm.steps) % kStages, parity);
      parity ^= 1;
    }
    if (w.common == Common::kNothing) {
      ptx::BarrierArriveMapped(ptx::MapShared(ptx::Shared(&s.other_done[slot.at]), rank ^ 1));
    }
    stage = (stage + w.steps) % kStages;
    if (sends) {
      ptx::StoreBulkWait<0>();
      ptx::FenceProxyAsync();  // orders the copies before the signal that lets others read them
    }
    ptx::BarrierWait(ptx::Shared(&s.finished[slot.at]), slot.parity);
    Signal(p, w.task.signal);
    ptx::BarrierArrive(ptx::Shared(&s.work_empty[slot.at]));
  }
}

// ---- warps 4 to 11: products ----

// One lane for each CTA that the stage came from. empties: Shared::empty there, mapped.
__device__ __forceinline__ void Release(uint32_t empties, int stage, int lane) {
  if (lane < 2) ptx::BarrierArriveMapped(empties + stage * sizeof(uint64_t));
}

// begun: the sums hold something.
template <ptx::Major a_major, ptx::Major b_major, bool begun>
__device__ __forceinline__ void Multiply(Shared& s, Cursor<kStages>& stage, int steps, int group, uint32_t empties,
                                         int lane, float (&sum)[kSums]) {
  // 16 elements of the contraction further, in units of a descriptor's address.
  constexpr int kA = (a_major == ptx::Major::kK ? 32 : 16 * 128) >> 4;
  constexpr int kB = (b_major == ptx::Major::kK ? 32 : 16 * 128) >> 4;
  int before = 0;
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
      Release(empties, before, lane);
    }
    before = stage.at;
  }
  ptx::WgmmaWait<0>();
  ptx::Hold(sum);
  if (steps > 0) Release(empties, before, lane);
}

// Steps without a product: those of the other CTA, or of rows that do not exist.
__device__ __forceinline__ void Skip(Shared& s, Cursor<kStages>& stage, int steps, uint32_t empties, int lane) {
  for (int at = 0; at < steps; ++at, stage.Next()) {
    ptx::BarrierWait(ptx::Shared(&s.full[stage.at]), stage.parity);
    Release(empties, stage.at, lane);
  }
}

__device__ __forceinline__ void LoadHalf(uint32_t row, Half<BFloat16>& half) {
  uint32_t words[4];
  ptx::LoadMatrix4<false>(words, row);
#pragma unroll
  for (int i = 0; i < 4; ++i) half.at[i].w = words[i];
}
__device__ __forceinline__ void StoreHalf(const Half<BFloat16>& half, uint32_t row) {
  const uint32_t words[4] = {half.at[0].w, half.at[1].w, half.at[2].w, half.at[3].w};
  ptx::StoreMatrix4(words, row);
}

template <bool mxfp8>
__device__ void Calculate(const Params& p, Shared& s, int rank, int warp, int lane) {
  using ptx::Major;
  const int group = warp / 4;
  const Stages<BFloat16, true, mxfp8> stages(p, warp, lane);
  Cursor<kStages> stage;
  float sum[kSums];
  for (Cursor<kWorkSlots> slot;; slot.Next()) {
    ptx::BarrierWait(ptx::Shared(&s.work_full[slot.at]), slot.parity);
    const PairWork& w = s.work[slot.at];
    if (w.last) return;
    const Op op = RoutedOp(w.task.op);
    const bool apart = w.common == Common::kNothing;
    const uint32_t empties = ptx::MapShared(ptx::Shared(s.empty), apart ? rank : lane & 1);
    const bool by_rows = op != Op::kGradGateUp && op != Op::kGradDown;
    // Nothing to multiply: neither a task nor, of a block's last rows, one for this warpgroup.
    const bool idle = by_rows && 64 * group >= w.count;
    const int steps = idle ? 0 : w.gemm.steps;
    int left = w.steps - steps;
    if (steps > 0 || !by_rows) {
      if (op == Op::kGateUp || op == Op::kDown) {
        Multiply<Major::kK, Major::kMn, false>(s, stage, steps, group, empties, lane, sum);
      } else if (op == Op::kDgradDown || op == Op::kDgradGateUp) {
        Multiply<Major::kK, Major::kK, false>(s, stage, steps, group, empties, lane, sum);
      } else {
        stages.Begin(w, sum);
        Multiply<Major::kMn, Major::kMn, true>(s, stage, steps, group, empties, lane, sum);
      }
    }
    // Of a half group (fragment.cuh) in the stage that holds it: this lane's row of 8 columns of gate or dg.
    const auto place = [&](int index) {
      const int row = warp % 4 * 16 + index % 2 * 8 + lane % 8, chunk = (index / 2 % 2 * 4 + lane / 8) ^ (row % 8);
      return ptx::Shared(s.stages[stage.at]) + group * kBoxBytes + row * 128 + chunk * 16;
    };
    const auto load = [&](int index, Half<BFloat16>& gate, Half<BFloat16>& up) {
      if (index % 4 == 0) ptx::BarrierWait(ptx::Shared(&s.full[stage.at]), stage.parity);
      const uint32_t from = place(index);
      LoadHalf(from, gate);
      LoadHalf(from + 2 * kBoxBytes, up);
    };
    const auto store = [&](int index, const Half<BFloat16>& d_gate, const Half<BFloat16>& d_up,
                           const Half<BFloat16>& h) {
      const uint32_t to = place(index);
      StoreHalf(d_gate, to);
      StoreHalf(d_up, to + 2 * kBoxBytes);
      StoreHalf(h, to + 4 * kBoxBytes);
      if (index % 4 < 3) return;
      ptx::FenceProxyAsyncShared();  // before the copy engine reads
      __syncwarp();
      if (lane == 0) ptx::BarrierArrive(ptx::Shared(&s.written[stage.at]));
      stage.Next();
    };
    int skipped = left;
    if (op == Op::kDgradDown) {
      skipped = idle ? w.gemm.steps : 0;
      left -= kFinishingSteps;
    }
    Skip(s, stage, skipped, empties, lane);
    stages.End(w, sum, load, store);
    Skip(s, stage, left - skipped, empties, lane);
    if (apart && lane == 0) ptx::BarrierArriveMapped(ptx::MapShared(ptx::Shared(&s.other_done[slot.at]), rank ^ 1));
    __syncwarp();
    if (lane == 0) ptx::BarrierArrive(ptx::Shared(&s.finished[slot.at]));
    ptx::BarrierArrive(ptx::Shared(&s.work_empty[slot.at]));
  }
}

template <bool mxfp8>
__global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(kThreads, 1)
    HopperKernel(const __grid_constant__ Params p, const __grid_constant__ PeerTable peers,
                 const __grid_constant__ Maps maps, const __grid_constant__ Launch launch) {
  if (p.ring.control[kGivenUp] != 0) return;
  extern __shared__ uint8_t raw[];
  // Careful: from `raw` on, not by way of an integer, or each access is a generic one.
  Shared& s = *reinterpret_cast<Shared*>(raw + (1024 - ptx::Shared(raw) % 1024) % 1024);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, rank = static_cast<int>(ptx::ClusterRank());
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; ++i) {
      ptx::BarrierInit(ptx::Shared(&s.written[i]), kMathWarps);
      ptx::BarrierInit(ptx::Shared(&s.full[i]), 1);
      ptx::BarrierInit(ptx::Shared(&s.empty[i]), 2 * kMathWarps);
    }

    for (int i = 0; i < kWorkSlots; ++i) {
      ptx::BarrierInit(ptx::Shared(&s.work_full[i]), 1);
      ptx::BarrierInit(ptx::Shared(&s.finished[i]), kMathWarps);
      ptx::BarrierInit(ptx::Shared(&s.work_empty[i]), 2 + 32 * kMathWarps);
      ptx::BarrierInit(ptx::Shared(&s.other_done[i]), kMathWarps + 1);
      ptx::BarrierInit(ptx::Shared(&s.ticket_full[i]), 1);
      ptx::BarrierInit(ptx::Shared(&s.ticket_empty[i]), 1);
      ptx::BarrierArriveExpect(ptx::Shared(&s.ticket_full[i]), sizeof(int32_t));
    }
    for (auto& barrier : s.moved) ptx::BarrierInit(ptx::Shared(&barrier), 1);
    ptx::BarrierInitFence();
    s.row_counts = p.dims.local_experts <= kCachedExperts ? s.row_count : p.schedule.row_count;
  }
  for (int i = threadIdx.x; i < kZeroBytes / 4; i += kThreads) reinterpret_cast<uint32_t*>(s.zeros)[i] = 0;
  // Waiting for counters empties the first level cache again and again: what decoding a task reads is copied.
  const bool cached = p.dims.local_experts <= kCachedExperts;
  for (int i = threadIdx.x; cached && i <= p.dims.local_experts; i += kThreads) {
    s.row_offset[i] = p.schedule.row_offset[i];
    if (i < p.dims.local_experts) s.row_count[i] = p.schedule.row_count[i];
  }
  ptx::FenceProxyAsync();  // the zeros, before they are copied out
  __syncthreads();
  if (threadIdx.x == 0) {
    for (auto& run : s.runs) run.begin = run.end = 0;
    new (&s.list) TaskList(p.dims, TilesOf(Path::kHopper), p.pass, cached ? s.row_offset : p.schedule.row_offset);
  }
  __syncthreads();
  ptx::ClusterSync();  // the barriers are there before the other CTA arrives at them
  if (warp < 4) {
    ptx::GiveRegisters<kOtherRegisters>();
    if (warp == 0) {
      if (lane == 0) Copy(maps, s, rank);
    } else if (warp == 1) {
      HandOut(p, launch, s, rank, lane);
    } else if (warp == 2) {
      MoveRows<mxfp8>(p, peers, launch, s, rank, lane);
    } else {
      if (lane == 0) SignalFinished(p, maps, s, rank);
    }
  } else {
    ptx::TakeRegisters<kMathRegisters>();
    Calculate<mxfp8>(p, s, rank, warp - 4, lane);
  }
  ptx::ClusterSync();  // until then the other CTA may arrive here
}

}  // namespace

const char* LoadHopperKernel() {
  for (const auto kernel : {HopperKernel<false>, HopperKernel<true>}) {
    cudaFuncAttributes attributes;
    cudaError_t error = cudaFuncGetAttributes(&attributes, kernel);
    if (error == cudaSuccess) {
      error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes);
    }
    if (error != cudaSuccess) return cudaGetErrorString(error);
    if (attributes.numRegs < kLaunchRegisters) {
      return "this compiler gave the Hopper kernel too few registers to share out; build with CUDA 13.0 and "
             "without -G or a register limit, or use MoKConfig(portable=True)";
    }
  }
  return nullptr;
}

const char* LaunchHopperKernel(const Params& params, const PeerTable& peers, const Maps& maps, const Launch& launch,
                               cudaStream_t stream) {
  if (launch.sms < 2) return "the Hopper kernel needs two multiprocessors; use MoKConfig(portable=True)";
  const auto kernel = params.pass.mxfp8 ? HopperKernel<true> : HopperKernel<false>;
  kernel<<<launch.sms / 2 * 2, kThreads, kSharedBytes, stream>>>(params, peers, maps, launch);
  const cudaError_t error = cudaGetLastError();
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

}  // namespace mok::cuda

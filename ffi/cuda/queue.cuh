// Tickets, waits and signals of the task list on the device. Called by the warps that hand tasks out.
//
// A task's producers stand before it in its sequence or in the other one, every CTA works its tickets off in
// order, and each sequence has a CTA that takes its tickets, so a wait ends unless a counter is wrong. (Who holds
// back, see hopper_mover.cuh, has no ticket meanwhile.) A wait that does not end is reported once through Status,
// sets the call's abort flag, which ends every other wait too, and the kernel drains.
#ifndef MOK_CUDA_QUEUE_CUH_
#define MOK_CUDA_QUEUE_CUH_

#include "../params.h"
#include "../tasks.h"
#include "megakernel.h"
#include "ptx.cuh"

namespace mok::cuda {

__device__ inline void ReportStuck(const Params& p, const Launch& launch, const Task& task, int64_t counter,
                                   int32_t found, int64_t expected) {
  Status* status = launch.status;
  if (atomicCAS_system(&status->claim, 0u, 1u) == 0) {
    status->op = static_cast<int32_t>(task.op);
    status->rank = static_cast<int32_t>(p.rank);
    status->block = task.block;
    status->tile = task.tile;
    status->counter = counter;
    status->found = found;
    status->expected = expected;
    __threadfence_system();
    *static_cast<volatile uint32_t*>(&status->code) = 1;
  }
  atomicExch(p.ring.control + kAbortFlag, 1);
}

// By a whole warp: whether all of the task's counters came to be full. What their writers wrote before is
// then visible to this warp, and to whom it tells.
__device__ inline bool WaitForCounters(const Params& p, const Launch& launch, const Task& task, int lane) {
  bool fine = true;
  uint64_t deadline = 0;
#pragma unroll
  for (int w = 0; w < Task::kWaits; ++w) {
    const Wait wait = task.waits[w];
    for (int i = wait.counter + lane; i < wait.counter + wait.count && fine; i += 32) {
      int32_t found;
      for (uint32_t polls = 1; (found = ptx::LoadAcquire(p.ring.counters + i)) != wait.target; ++polls) {
        if (polls % 256 != 0) continue;
        if (ptx::LoadRelaxed(p.ring.control + kAbortFlag) != 0) {
          fine = false;
          break;
        }
        const uint64_t now = ptx::GlobalTimer();
        if (deadline == 0) deadline = now + launch.timeout_ns;
        if (now > deadline) {
          ReportStuck(p, launch, task, i, found, wait.target);
          fine = false;
          break;
        }
      }
    }
  }
  // What any lane has acquired, the others and whom they tell have now: a vote alone orders no memory.
  __syncwarp();
  return __all_sync(~0u, fine);
}

// The next ticket of a sequence, in lane 0.
__device__ inline int TakeTicket(const Params& p, ControlWord sequence, int lane) {
  return lane == 0 ? atomicAdd(p.ring.control + sequence, 1) : 0;
}

// By one thread, after a barrier with all that wrote the task's results: the fence and the release pass on to
// whoever acquires the counter what the barrier passed on to this thread.
__device__ inline void Signal(const Params& p, Index counter) {
  if (counter < 0) return;
  __threadfence();
  ptx::AddRelease(p.ring.counters + counter, 1);
}

// The rows that communication task `tile` of a block moves, and where they lie.
struct Moved {
  int64_t first;  // in the schedule
  int64_t ring_row;
  int rows, count;  // of the part, and those of them that exist
};
__device__ inline Moved MovedBy(const Params& p, const TaskList& list, const int32_t* row_count, const Task& task) {
  const Dims& d = p.dims;
  Moved moved;
  const int64_t skipped = task.tile * list.PartRows();
  moved.first = task.block * d.row_tile + skipped;
  moved.ring_row = moved.first - task.macrobatch * d.macrobatch;
  moved.rows = static_cast<int>(Min(list.PartRows(), d.row_tile - skipped));
  const int64_t end = list.RowOffset(task.expert) + row_count[task.expert];
  moved.count = static_cast<int>(Max(0, Min(moved.rows, end - moved.first)));
  return moved;
}

// Where pulled x rows lie, or null where this pass does not pull them.
__device__ inline void* PulledX(const Params& p, const TaskList& list, const Task& task) {
  const bool kept = p.dims.Exchanges() && task.macrobatch == 0 && p.pass.context;
  if (task.op == Op::kDispatch) return kept ? p.context.x : p.ring.x;
  return kept ? nullptr : p.ring.x;
}

}  // namespace mok::cuda

#endif  // MOK_CUDA_QUEUE_CUH_

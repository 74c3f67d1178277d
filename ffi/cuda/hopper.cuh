// What the warps of the Hopper kernel share: its sizes, a CTA's shared memory, and who waits for whom. Used by
// megakernel_sm90a.cu and hopper_mover.cuh.
#ifndef MOK_CUDA_HOPPER_CUH_
#define MOK_CUDA_HOPPER_CUH_

#include <cstdint>

#include "gemm.cuh"

namespace mok::cuda {

inline constexpr int kThreads = 384, kMathWarps = 8;
inline constexpr int kStages = 4, kStep = 64;      // of the pipeline; elements of the contraction
inline constexpr int kBoxBytes = 64 * 128;         // 64 rows of 64 bfloat16
inline constexpr int kStageBytes = 6 * kBoxBytes;  // two boxes of A, four of B
inline constexpr int kWorkSlots = 2;
inline constexpr int kCachedExperts = 256;
// Careful: more than the CTA was launched with (65536 / 384, rounded down to a multiple of 8) and the second
// warpgroup waits for registers for ever.
inline constexpr int kLaunchRegisters = 168, kOtherRegisters = 72, kMathRegisters = 216;
static_assert(kOtherRegisters + 2 * kMathRegisters <= 3 * kLaunchRegisters, "no registers are to be had");
inline constexpr int kMoveBuffers = 7, kMoveBytes = 4096, kZeroBytes = 512;

// Which operand the two tasks of a cluster have in common.
enum class Common { kNothing, kA, kB };

// After its product dgrad-down needs gate and up of its tile. The copy engine brings 64 columns of both in a step,
// as boxes in the order gate's upper and lower rows, up's upper and lower rows. The math warps put dg and du in their
// place and h into the last two boxes, and the signalling warp sends them out.
inline constexpr int kFinishingSteps = kTileN / kStep, kFinishingBytes = 4 * kBoxBytes;

// A CTA's task beside the other CTA's.
struct PairWork : Work {
  Common common;
  // Of the product and after it; the larger number of both CTAs. Careful: at least one, so that the math warps
  // do not run ahead of the copying warp, which must see each phase of other_done.
  int32_t steps;
  bool last;  // no tasks are left
};

struct MovedRow {
  const char* from;
  char* to;
};

struct Shared {
  uint8_t stages[kStages][kStageBytes];  // 1024-byte aligned: the swizzle counts from there
  uint8_t moves[kMoveBuffers][kMoveBytes];
  uint8_t zeros[kZeroBytes];
  MovedRow rows[2 * kMostMovedRows];                                  // of a task
  int32_t row_offset[kCachedExperts + 1], row_count[kCachedExperts];  // copies, if all experts fit
  const int32_t* row_counts;                                          // these or the originals
  TaskList list;
  PairWork work[kWorkSlots];
  TaskList::Run runs[2];        // that the ticket warp is in: of this CTA's task and of the other one's
  Work other;                   // the other CTA's, to compare
  Task waited;                  // the task whose counters the ticket warp waits for
  int32_t tickets[kWorkSlots];  // from the cluster's first CTA to its second
  // Barriers: who arrives (how often) and who waits.
  //   full          the copy engine's bytes (1)                                    math warps
  //   empty         math warps of both CTAs (16; without a common operand those    copying warp
  //                 of one, each twice); after `written` the signalling warp for them
  //   written       math warps (8), of a stage that holds results of dgrad-down    signalling warp
  //   other_done    the other CTA's math warps (8) and signalling warp, after      copying warp
  //                 tasks without a common operand
  //   work_full     ticket warp (1)                                                all that work on the slot
  //   finished      math warps (8)                                                 signalling warp
  //   work_empty    copying and signalling warp, each lane of the math warps       ticket warp
  //                 (NVIDIA's racecheck does not see that __syncwarp orders them before one that arrives for all)
  //   moved         the copy engine's bytes (1)                                    moving warp
  //   ticket_full   the first CTA's bytes (1)                                      the second's ticket warp
  //   ticket_empty  the second's ticket warp (1)                                   the first's
  uint64_t full[kStages], empty[kStages], written[kStages], other_done[kWorkSlots];
  uint64_t work_full[kWorkSlots], finished[kWorkSlots], work_empty[kWorkSlots];
  uint64_t moved[kMoveBuffers];
  uint64_t ticket_full[kWorkSlots], ticket_empty[kWorkSlots];
};
// Careful: the host's size, an upper bound: Index, and so TaskList and Work, is wider there.
inline constexpr int kSharedBytes = sizeof(Shared) + 1024;
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

}  // namespace mok::cuda

#endif  // MOK_CUDA_HOPPER_CUH_

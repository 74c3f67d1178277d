// What the host learns of waits that timed out. A rank's kernel fills its Status, in device memory and zeroed
// with the counters; the call's epilogue copies the first one filled to the device's Reports, in pinned memory
// that handlers.cc allocates before the first launch, keeps for the process's life and reads before every call.
#ifndef MOK_CUDA_STATUS_H_
#define MOK_CUDA_STATUS_H_

#include <cstdint>

namespace mok::cuda {

struct Status {
  uint32_t claim;  // 0, or taken by the one wait that fills the rest
  uint32_t code;   // 0: fine
  int32_t op;      // Op of the task that waited
  int32_t rank;
  int64_t block, tile;
  int64_t counter, found, expected;
};

// What went wrong between ranks; see exchange.cu.
enum class Fault : int32_t {
  kNone,
  kMissing,    // ranks did not come to a barrier in time
  kDiffers,    // a rank came with another call
  kAborted,    // a rank's call failed by itself
  kAbandoned,  // the group failed in an earlier call, or another rank gave it up
  kOverlaps,   // two calls at once
  kMisplaced,  // the device is at another place in the mesh than in the table
};

inline constexpr int kSignatureWords = 14;  // arena.h

struct ExchangeStatus {
  Fault fault;
  int32_t barrier;  // 0: before rows travel, 1: after
  int32_t group, rank, ranks;
  int32_t peer;         // kDiffers, kAborted: which rank; kMisplaced: the rank in the mesh
  int32_t epoch;        // of the barrier; 0: at none
  uint32_t missing[3];  // a bit for each rank that did not come, or not before another one gave up
  int32_t mine[kSignatureWords], theirs[kSignatureWords];  // theirs: kDiffers
};

// One for each call that failed, however many of its ranks and waits did.
struct Report {
  uint32_t number;  // from 1 on, over the process's life. Written last, after a system fence
  uint64_t timeout_ns;
  Status status;            // of a wait of a task, or
  ExchangeStatus exchange;  // of a fault between ranks, if it is one
};

// Call `number` reports at number % kReports: so many may go unread before one takes another's place, and even
// then the numbers tell how many there were.
inline constexpr uint32_t kReports = 16;
struct Reports {
  uint32_t last;  // number given; only this device's kernels touch it
  Report at[kReports];
};

}  // namespace mok::cuda

#endif  // MOK_CUDA_STATUS_H_

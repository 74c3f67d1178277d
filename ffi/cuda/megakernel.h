// The megakernels as the driver sees them: which exist, what they take, how they are launched. Needs the
// CUDA runtime's types and nothing of XLA.
#ifndef MOK_CUDA_MEGAKERNEL_H_
#define MOK_CUDA_MEGAKERNEL_H_

#include <cuda_runtime_api.h>

#include <cstdint>
#include <string>

#include "../params.h"
#include "../tasks.h"
#include "status.h"

namespace mok::cuda {

inline constexpr int64_t kRowTile = 128;
inline constexpr int kMaxRanks = 72;  // of one NVLink domain

// kPortable: compute capability 8.0 and later, mma.sync or plain FMA. kHopper: 9.0, wgmma and the copy engine.
enum class Path : int32_t { kPortable, kHopper };

// Hopper moves 128 KiB at a time: the first products wait until so much has come to every multiprocessor. Smaller
// pieces mean more tickets and waits; not measured.
//
// Both paths multiply tiles of 128 x 256. Hopper's copy engine reads 64 gathered rows in 64 requests and is
// too slow for it (450 TFLOP/s against 655; H200, 131072x4096x4096, 2026-11-29), so x and dy go by the ring.
MOK_HD constexpr Tiles TilesOf(Path path) {
  const bool hopper = path == Path::kHopper;
  return {128, 256, 256, {128, 128}, {128, 256}, 16, hopper ? 65536 : 0, !hopper};
}

struct PeerTable {
  Peer at[kMaxRanks];
};

struct Launch {
  int sms;
  Status* status;  // of the rank
  uint64_t timeout_ns;
  int num_comm_sms;  // portable kernels with ranks > 1: CTAs that communicate, all but one at most; 0: an eighth
};

// What words of Ring::control mean; all zero at the start. kGivenUp: set before the megakernel, which then does
// nothing: a rank that missed its peers must not write into their memory. kPulledBytes: the first of a
// uint64_t, for benchmarks. kStatus: the first of a Status.
enum ControlWord { kComputeTicket, kCommunicationTicket, kAbortFlag, kGivenUp, kPulledBytes, kStatus = 16 };
static_assert(kStatus * 4 % alignof(Status) == 0 && kStatus * 4 + sizeof(Status) <= kControlWords * 4,
              "a Status must fit behind the words");

// Makes every kernel ready on the current device, whose compute capability is given as 80, 90, ... Null, or
// what went wrong.
const char* LoadMegakernels(int capability);

// Empty, or what went wrong. Neither waits nor allocates.
std::string LaunchMegakernel(Path path, const Params& params, const PeerTable& peers, const Launch& launch,
                             cudaStream_t stream);

}  // namespace mok::cuda

#endif  // MOK_CUDA_MEGAKERNEL_H_

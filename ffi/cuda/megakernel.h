// The megakernels, as the driver sees them: tile sizes, loading, launching.
#ifndef MOK_CUDA_MEGAKERNEL_H_
#define MOK_CUDA_MEGAKERNEL_H_

#include <cuda_runtime_api.h>

#include <cstdint>

#include "../params.h"
#include "../tasks.h"
#include "status.h"

namespace mok::cuda {

inline constexpr int64_t kRowTile = 128;
inline constexpr int kMaxRanks = 72;
// Ring::control: tickets of compute and communication, then the flag that a wait sets when it times out.
inline constexpr int kControlWords = 16;
inline constexpr int kAbortFlag = 2;

enum class Path : int32_t { kPortable, kHopper };

// Every rank of the group, as a kernel parameter.
struct PeerTable {
  Peer at[kMaxRanks];
};

struct Launch {
  int sms;
  Status* status;
  uint64_t timeout_ns;
  int num_comm_sms;  // 0: default
};

constexpr Tiles TilesOf(Path, ScalarType) { return {256, 256, 256}; }

// Loads every megakernel of this compute capability on the current device; null, or an error.
const char* LoadMegakernels(int capability);

// Null, or an error.
const char* LaunchMegakernel(Path path, const Params& params, const PeerTable& peers, const Launch& launch,
                             cudaStream_t stream);

}  // namespace mok::cuda

#endif  // MOK_CUDA_MEGAKERNEL_H_

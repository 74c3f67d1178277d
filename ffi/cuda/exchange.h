// The kernels by which a call meets its peers, as the driver sees them. Each returns null or what CUDA says of
// the launch.
#ifndef MOK_CUDA_EXCHANGE_H_
#define MOK_CUDA_EXCHANGE_H_

#include <cuda_runtime_api.h>

#include <cstdint>

#include "arena.h"
#include "status.h"

namespace mok::cuda {

struct Meeting {
  Group group;
  Signature signature;
  const int32_t* place;   // the device's rank and group in the mesh
  int32_t* call_control;  // Ring::control, whose abort flag makes the call's results NaN
  Reports* reports;
  uint64_t timeout_ns;
};

const char* LoadExchange();
// The first kernel of a call, after its control words are zeroed: takes the arena.
const char* LaunchEnter(const Meeting& meeting, cudaStream_t stream);
struct StagedArrays {
  struct {
    int64_t offset;  // in this rank's arena
    const void* from;
    int64_t bytes;  // 0: no array
  } at[3];
};
// Copies the arrays there, unless the call has failed.
const char* LaunchStage(const Meeting& meeting, const StagedArrays& arrays, int sms, cudaStream_t stream);
// Waits until every rank of the group has come here with the same call, or for timeout_ns.
const char* LaunchBarrier(const Meeting& meeting, int barrier, cudaStream_t stream);
// For measurements: moves a row for each route as the megakernel does, each warp one at a time. kPull: from the peers'
// staged x to `pulled`; kPush: from `pushed` to the return windows, where rank r owns every slot that is r modulo the
// number of ranks; kBoth: half the CTAs each. The peers take turns. Rows of whole 16 bytes.
enum class Traffic : int64_t { kNone, kPull, kPush, kBoth };
struct TrafficRows {
  int64_t tokens, routes, row_bytes;
  int64_t x, returned;  // offsets in an arena
  char* pulled;
  const char* pushed;
};
const char* LaunchTraffic(const Meeting& meeting, Traffic traffic, const TrafficRows& rows, int sms,
                          cudaStream_t stream);
// A test mode: keeps the stream busy for a while, another one for each rank, call and phase.
const char* LaunchPause(const Meeting& meeting, int phase, cudaStream_t stream);
// The last kernel of a call: gives the arena back.
const char* LaunchLeave(const Meeting& meeting, cudaStream_t stream);

}  // namespace mok::cuda

#endif  // MOK_CUDA_EXCHANGE_H_

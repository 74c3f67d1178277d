// From every rank's expert ids to this rank's rows, bit for bit as host/schedule.h: count, add up, place.
//
// A chunk is kRoutesPerChunk routes of one rank. `Count` counts each chunk's routes for each local expert,
// `AddUp` makes of that the number of routes before each chunk and each expert's first row, `Place` finds
// the routes' places. Atomics only count, they decide no order. Ids may be anything.
//
// Scratch, in int32: [0] how many blocks of AddUp are done, reset by Count; from 16 on counts[expert, rank
// in turn]; then before[expert, source rank, chunk].
#include "../tasks.h"
#include "../workspace.h"
#include "kernels.h"

namespace mok::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kPerLane = kRoutesPerChunk / kThreads;  // a warp's routes are consecutive
static_assert(kRoutesPerChunk % kThreads == 0, "every lane of a chunk has the same number of routes");
// Experts that one block counts: bounds its shared memory whatever their number.
constexpr int kExperts = 512;

struct Arguments {
  Dims dims;
  int64_t rank;
  int64_t chunks;  // of one rank
  IdTable ids;
  Schedule out;
  int32_t* done;
  int32_t* counts;
  int32_t* before;

  __device__ int64_t Turn(int64_t source) const { return (source - rank + dims.ranks) % dims.ranks; }
};

// Where a block works: a chunk of a source rank, and some local experts.
struct Part {
  int64_t source, chunk;
  int first_expert, experts;

  __device__ explicit Part(const Arguments& a)
      : source(blockIdx.x / a.chunks),
        chunk(blockIdx.x % a.chunks),
        first_expert(static_cast<int>(blockIdx.y) * kExperts),
        experts(static_cast<int>(Min(kExperts, a.dims.local_experts - first_expert))) {}

  // Route `index` of the chunk as an expert of this part, or -1.
  __device__ int Expert(const Arguments& a, int64_t index) const {
    const int64_t route = chunk * kRoutesPerChunk + index;
    const int32_t id = route < a.dims.Routes() ? a.ids.at[source][route] : -1;
    const int64_t expert = int64_t{id} - a.rank * a.dims.local_experts - first_expert;
    return expert >= 0 && expert < experts ? static_cast<int>(expert) : -1;
  }
  __device__ int64_t Before(const Arguments& a, int expert) const {
    return ((first_expert + expert) * a.dims.ranks + source) * a.chunks + chunk;
  }
};

__device__ int64_t Lane(int step) { return threadIdx.x / 32 * (32 * kPerLane) + step * 32 + threadIdx.x % 32; }

// This lane's routes of the chunk as experts of the part, and how many routes each expert has: in one row of counts,
// or in a row for each warp. By a whole block, which may read the counts afterwards.
template <int rows>
__device__ void LoadAndCount(const Arguments& a, const Part& part, int (&expert)[kPerLane],
                             int (&counts)[rows][kExperts]) {
  static_assert(rows == 1 || rows == kWarps, "one row of counts, or one a warp");
  for (int w = 0; w < rows; ++w) {
    for (int e = threadIdx.x; e < part.experts; e += kThreads) counts[w][e] = 0;
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) expert[i] = part.Expert(a, Lane(i));
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    if (expert[i] >= 0) atomicAdd(&counts[rows == 1 ? 0 : threadIdx.x / 32][expert[i]], 1);
  }
  __syncthreads();
}

__global__ void __launch_bounds__(kThreads) Count(const __grid_constant__ Arguments a) {
  __shared__ int counts[1][kExperts];
  if (blockIdx.x == 0 && blockIdx.y == 0 && threadIdx.x == 0) *a.done = 0;
  // Padding rows and what lies behind the last row have no source. The row tile is a multiple of 4.
  const int64_t stride = int64_t{gridDim.x} * gridDim.y * kThreads;
  const int64_t block = int64_t{blockIdx.y} * gridDim.x + blockIdx.x;
  for (int64_t i = block * kThreads + threadIdx.x; i < a.dims.capacity / 4; i += stride) {
    reinterpret_cast<int4*>(a.out.row_source)[i] = make_int4(-1, -1, -1, -1);
  }
  if (blockIdx.x >= a.dims.ranks * a.chunks) return;  // blocks that only fill
  const Part part(a);
  int expert[kPerLane];
  LoadAndCount(a, part, expert, counts);
  for (int e = threadIdx.x; e < part.experts; e += kThreads) a.before[part.Before(a, e)] = counts[0][e];
}

// The sum of the values of lower lanes, and of all lanes.
__device__ int ScanWarp(int value, int* total) {
  int sum = value;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const int lower = __shfl_up_sync(~0u, sum, step);
    if (static_cast<int>(threadIdx.x % 32) >= step) sum += lower;
  }
  *total = __shfl_sync(~0u, sum, 31);
  return sum - value;
}

// Each expert's rows and first row, by the last block to come here.
__device__ void PlaceSegments(const Arguments& a) {
  __shared__ int warp_rows[kWarps];
  int first_row = 0;
  if (threadIdx.x == 0) a.out.row_offset[0] = 0;
  for (int64_t begin = 0; begin < a.dims.local_experts; begin += kThreads) {
    const int64_t expert = begin + threadIdx.x;
    int count = 0;
    if (expert < a.dims.local_experts) {
      for (int64_t r = 0; r < a.dims.ranks; ++r) count += __ldcg(&a.counts[expert * a.dims.ranks + r]);
      a.out.row_count[expert] = count;
    }
    const int rows = static_cast<int>(RoundUp(count, a.dims.row_tile));
    int total;
    const int lower = ScanWarp(rows, &total);
    if (threadIdx.x % 32 == 0) warp_rows[threadIdx.x / 32] = total;
    __syncthreads();
    int before = first_row;
    for (int w = 0; w < kWarps; ++w) {
      if (w < static_cast<int>(threadIdx.x) / 32) before += warp_rows[w];
      first_row += warp_rows[w];
    }
    if (expert < a.dims.local_experts) a.out.row_offset[expert + 1] = before + lower + rows;
    __syncthreads();  // warp_rows is read; the next round writes it
  }
}

// A warp for each expert and source rank.
__global__ void __launch_bounds__(kThreads) AddUp(const __grid_constant__ Arguments a) {
  __shared__ bool last;
  const int64_t pair = int64_t{blockIdx.x} * kWarps + threadIdx.x / 32, lane = threadIdx.x % 32;
  if (pair < a.dims.local_experts * a.dims.ranks) {
    int32_t* chunks = a.before + pair * a.chunks;
    int sum = 0;
    for (int64_t begin = 0; begin < a.chunks; begin += 32) {
      const int count = begin + lane < a.chunks ? chunks[begin + lane] : 0;
      int total;
      const int lower = ScanWarp(count, &total);
      if (begin + lane < a.chunks) chunks[begin + lane] = sum + lower;
      sum += total;
    }
    const int64_t expert = pair / a.dims.ranks, source = pair % a.dims.ranks;
    if (lane == 0) a.counts[expert * a.dims.ranks + a.Turn(source)] = sum;
  }
  // Before: the counts that the last block reads in PlaceSegments.
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) last = atomicAdd(a.done, 1) == static_cast<int>(gridDim.x) - 1;
  __syncthreads();
  if (!last) return;
  // After: no read of a count may move before the ticket.
  __threadfence();
  PlaceSegments(a);
}

__global__ void __launch_bounds__(kThreads) Place(const __grid_constant__ Arguments a) {
  __shared__ int next[kWarps][kExperts];  // of each warp and expert: routes before the warp's, from its source rank
  const Part part(a);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  int expert[kPerLane];
  LoadAndCount(a, part, expert, next);
  const int64_t routes = a.dims.Routes(), ranks = a.dims.ranks, turn = a.Turn(part.source);
  for (int e = threadIdx.x; e < part.experts; e += kThreads) {
    int before = a.before[part.Before(a, e)];
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      const int count = next[w][e];
      next[w][e] = before;
      before += count;
    }
  }
  __syncthreads();
  int round[kPerLane];  // of a lane's route: how many of its expert's routes from the same rank stand before it
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    const unsigned alike = __match_any_sync(~0u, expert[i]);
    const bool mine = expert[i] >= 0;
    round[i] = mine ? next[warp][expert[i]] + __popc(alike & ((1u << lane) - 1)) : 0;
    // Every lane has read `next` before the lowest of those alike moves it on, and the reverse for the next step.
    __syncwarp();
    if (mine && lane == __ffs(alike) - 1) next[warp][expert[i]] = round[i] + __popc(alike);
    __syncwarp();
  }
  // Loops of their own, so that the loads of all routes are under way at once.
  int row[kPerLane];
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) row[i] = a.out.row_offset[part.first_expert + Max(expert[i], 0)];
  for (int64_t r = 0; r < ranks; ++r) {
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      const int count = a.counts[(part.first_expert + Max(expert[i], 0)) * ranks + r];
      row[i] += Min(count, round[i]) + (r < turn && count > round[i] ? 1 : 0);
    }
  }
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    const int64_t route = part.chunk * kRoutesPerChunk + Lane(i);
    if (expert[i] >= 0) a.out.row_source[row[i]] = static_cast<int32_t>(part.source * routes + route);
  }
}

}  // namespace

const char* LoadSchedule() { return Load(Count, AddUp, Place); }

const char* LaunchSchedule(const Dims& dims, int64_t rank, const IdTable& ids, const Schedule& out, int32_t* scratch,
                           cudaStream_t stream) {
  const int64_t pairs = dims.local_experts * dims.ranks;
  const Arguments a{dims, rank, ScheduleChunks(dims), ids, out, scratch, scratch + 16, scratch + 16 + pairs};
  const unsigned chunks = static_cast<unsigned>(dims.ranks * a.chunks);
  const unsigned parts = static_cast<unsigned>(CeilDiv(dims.local_experts, kExperts));
  constexpr unsigned kFilling = 128;  // blocks, so that few routes fill a large capacity quickly
  Count<<<dim3(chunks > kFilling ? chunks : kFilling, parts), kThreads, 0, stream>>>(a);
  if (const char* error = Launched()) return error;
  AddUp<<<static_cast<unsigned>(CeilDiv(pairs, kWarps)), kThreads, 0, stream>>>(a);
  if (const char* error = Launched()) return error;
  Place<<<dim3(chunks, parts), kThreads, 0, stream>>>(a);
  return Launched();
}

}  // namespace mok::cuda

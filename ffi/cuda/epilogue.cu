// After the megakernel of every rank: y[t] = shared part + sum over slots of w[t,k] * o[t,k], in f32 and in
// the slots' order, rounded once; likewise dx with weights 1. And before it, in the forward pass: context
// rows that no route fills. All of it moves memory and nothing else, 16 bytes a thread where the sizes allow.
#include "../tasks.h"
#include "fragment.cuh"
#include "kernels.h"
#include "publish.cuh"

namespace mok::cuda {
namespace {

constexpr int kThreads = 256;
// Slots whose loads are in flight together; what a thread sums does not depend on it.
constexpr int kSlots = 4;

// Whether a wait timed out on a rank of this call: then its rows are missing, here or on another rank.
__device__ bool Aborted(const Outcome& outcome) {
  bool aborted = false;
  for (int64_t r = threadIdx.x; r < outcome.ranks; r += blockDim.x) aborted |= outcome.control[r][kAbortFlag] != 0;
  return __syncthreads_or(aborted);
}

// By one thread of an aborted call. What failed between ranks has been told already.
__device__ void Tell(const Outcome& outcome) {
  for (int64_t r = 0; r < outcome.ranks; ++r) {
    const Status& status = *reinterpret_cast<const Status*>(outcome.control[r] + kStatus);
    if (status.code != 0) return Publish(outcome.reports, {0, outcome.timeout_ns, status, {}});
  }
}

// All bits set: NaN in every dtype.
__device__ void FillWithNaN(void* to, int64_t elements, int64_t element_bytes) {
  if (to == nullptr || blockIdx.y > 0) return;
  const int64_t stride = int64_t{gridDim.x} * blockDim.x, halves = elements * element_bytes / 2;
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < halves; i += stride) {
    static_cast<uint16_t*>(to)[i] = 0xffff;
  }
}

template <typename S>
__device__ void FillResults(const Params& p) {
  const Dims& d = p.dims;
  FillWithNaN(p.y, d.tokens * d.hidden, sizeof(S));
  FillWithNaN(p.d_x, d.tokens * d.hidden, sizeof(S));
  FillWithNaN(p.d_router_weights, d.Routes(), sizeof(float));
  const auto fill = [](const Gradients& gradients, int64_t elements) {
    for (const Gradient& g : {gradients.gate, gradients.up, gradients.down}) {
      FillWithNaN(g.values, elements, g.type == ScalarType::kBFloat16 ? 2 : 4);
    }
  };
  fill(p.d_routed, d.local_experts * d.hidden * d.intermediate);
  fill(p.d_shared, d.hidden * d.shared_intermediate);
  if (p.pass.direction == Direction::kBackward) return;
  // The context is a result of the forward pass too: the backward pass, which may be on the stream already, must
  // not take what was left unwritten for activations.
  FillWithNaN(p.context.x, d.macrobatch * d.hidden, sizeof(S));
  FillWithNaN(p.context.gate, d.macrobatch * d.intermediate, sizeof(S));
  FillWithNaN(p.context.up, d.macrobatch * d.intermediate, sizeof(S));
  FillWithNaN(p.context.shared_gate, d.tokens * d.shared_intermediate, sizeof(S));
  FillWithNaN(p.context.shared_up, d.tokens * d.shared_intermediate, sizeof(S));
}

__device__ bool Taken(int32_t id, int experts) { return (id >= 0) & (id < experts); }

// A block has a token, blockIdx.y a part of its columns, so that no thread divides.
template <typename S, bool whole, bool kBackward>
__global__ void __launch_bounds__(kThreads)
    Epilogue(const __grid_constant__ Params p, const __grid_constant__ Outcome outcome) {
  if (Aborted(outcome)) {
    const bool tells = p.rank == 0 || outcome.ranks == 1;
    if (tells && blockIdx.x == 0 && blockIdx.y == 0 && threadIdx.x == 0) Tell(outcome);
    return FillResults<S>(p);
  }
  const Dims& d = p.dims;
  const int64_t token = blockIdx.x;
  if (token >= d.tokens) return;
  const int hidden = static_cast<int>(d.hidden), top_k = static_cast<int>(d.top_k);
  const int experts = static_cast<int>(d.ranks * d.local_experts);
  const int column = 8 * static_cast<int>(blockIdx.y * blockDim.x + threadIdx.x), columns = hidden - column;
  S* const out = static_cast<S*>(kBackward ? p.d_x : p.y) + token * hidden + column;
  const S* const returned = static_cast<const S*>(p.ring.returned) + token * top_k * hidden + column;
  const int32_t* const ids = p.ids + token * top_k;
  const float* const weights = static_cast<const float*>(p.router_weights) + token * top_k;
  if (kBackward && blockIdx.y == 0) {
    for (int slot = threadIdx.x; slot < top_k; slot += blockDim.x) {
      const int64_t route = token * top_k + slot;
      static_cast<float*>(p.d_router_weights)[route] =
          Taken(ids[slot], experts) ? static_cast<const float*>(p.ring.returned_d_weights)[route] : 0.0f;
    }
  }
  if (columns <= 0) return;
  float sum[8] = {};
  if (d.shared_intermediate > 0) {
    Vector<S> shared;
    shared.template Load<whole>(out, columns);
    shared.Widen(sum);
  }
  for (int first = 0; first < top_k; first += kSlots) {
    bool taken[kSlots];
    float weight[kSlots];
    Vector<S> value[kSlots];
    // Careful: no load depends on a condition, or each would wait for the one before. A slot that is not taken has
    // neither a weight nor a row: it reads another slot's and leaves it.
#pragma unroll
    for (int k = 0; k < kSlots; ++k) {
      const int slot = Min(first + k, top_k - 1);
      weight[k] = kBackward ? 1.0f : weights[slot];
      taken[k] = (first + k < top_k) & Taken(ids[slot], experts);
    }
#pragma unroll
    for (int k = 0; k < kSlots; ++k) {
      value[k].template Load<whole>(returned + int64_t{taken[k] ? first + k : 0} * hidden, columns);
    }
#pragma unroll
    for (int k = 0; k < kSlots; ++k) {
      if (!taken[k]) continue;
      float wide[8];
      value[k].Widen(wide);
      // fmaf, so that every instantiation rounds alike.
#pragma unroll
      for (int c = 0; c < 8; ++c) sum[c] = fmaf(weight[k], wide[c], sum[c]);
    }
  }
  Vector<S> result;
  result.Round(sum);
  result.template Store<whole>(out, columns);
}

// Elements from `rows` on of a [macrobatch, width] buffer.
template <typename Word>
__device__ void Clear(void* buffer, int64_t rows, int64_t macrobatch, int64_t row_bytes) {
  if (buffer == nullptr) return;
  const int64_t words = row_bytes / static_cast<int64_t>(sizeof(Word)), stride = int64_t{gridDim.x} * kThreads;
  Word* to = static_cast<Word*>(buffer);
  for (int64_t i = rows * words + int64_t{blockIdx.x} * kThreads + threadIdx.x; i < macrobatch * words; i += stride) {
    to[i] = Word{};
  }
}

template <typename Word>
__global__ void __launch_bounds__(kThreads) ClearContext(const __grid_constant__ Params p, int64_t element_bytes) {
  const Dims& d = p.dims;
  const int64_t rows = Min(p.schedule.row_offset[d.local_experts], d.macrobatch);
  Clear<Word>(p.context.x, rows, d.macrobatch, d.hidden * element_bytes);
  Clear<Word>(p.context.gate, rows, d.macrobatch, d.intermediate * element_bytes);
  Clear<Word>(p.context.up, rows, d.macrobatch, d.intermediate * element_bytes);
}

template <typename S, bool whole>
const char* LaunchAs(const Params& p, const Outcome& outcome, cudaStream_t stream) {
  const int64_t vectors = CeilDiv(p.dims.hidden, 8), parts = CeilDiv(vectors, kThreads);
  // At least one block, which fills the weights' gradients after an abort.
  const dim3 blocks(static_cast<unsigned>(Max(1, p.dims.tokens)), static_cast<unsigned>(parts));
  const unsigned threads = static_cast<unsigned>(CeilDiv(CeilDiv(vectors, parts), 32) * 32);
  if (p.pass.direction == Direction::kBackward) {
    Epilogue<S, whole, true><<<blocks, threads, 0, stream>>>(p, outcome);
  } else {
    Epilogue<S, whole, false><<<blocks, threads, 0, stream>>>(p, outcome);
  }
  return Launched();
}

template <typename S>
const char* LaunchFor(const Params& p, const Outcome& outcome, cudaStream_t stream) {
  return p.dims.hidden % 8 == 0 ? LaunchAs<S, true>(p, outcome, stream) : LaunchAs<S, false>(p, outcome, stream);
}

template <typename S>
const char* LoadFor() {
  return Load(Epilogue<S, true, true>, Epilogue<S, true, false>, Epilogue<S, false, true>, Epilogue<S, false, false>);
}

}  // namespace

const char* LoadEpilogue() {
  if (const char* error = LoadFor<float>()) return error;
  if (const char* error = LoadFor<BFloat16>()) return error;
  return Load(ClearContext<int4>, ClearContext<uint16_t>);
}

const char* LaunchEpilogue(const Params& params, const Outcome& outcome, cudaStream_t stream) {
  return params.type == ScalarType::kBFloat16 ? LaunchFor<BFloat16>(params, outcome, stream)
                                              : LaunchFor<float>(params, outcome, stream);
}

const char* LaunchClearContext(const Params& params, cudaStream_t stream) {
  if (!params.pass.context) return nullptr;
  const Dims& d = params.dims;
  const int64_t bytes = params.type == ScalarType::kBFloat16 ? 2 : 4;
  constexpr unsigned kBlocks = 512;  // the rows are known on the device alone
  if (d.hidden * bytes % 16 == 0 && d.intermediate * bytes % 16 == 0) {
    ClearContext<int4><<<kBlocks, kThreads, 0, stream>>>(params, bytes);
  } else {
    ClearContext<uint16_t><<<kBlocks, kThreads, 0, stream>>>(params, bytes);
  }
  return Launched();
}

}  // namespace mok::cuda

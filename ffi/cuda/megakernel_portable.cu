// The megakernel for any GPU from compute capability 8.0: bfloat16 by mma.sync, float32 by plain FMA, any
// sizes. The same tasks, tiles and stages as on Hopper; a CTA's 8 warps do everything together. Launched by
// megakernel.cu.
//
// Shared memory holds boxes as the copy engine would leave them: rows of 128 bytes whose 16-byte chunks are
// permuted by the row, so that eight rows at one column lie in different banks.
#include <type_traits>

#include "gemm.cuh"
#include "megakernel_portable.h"
#include "mxfp8.cuh"
#include "ptx.cuh"
#include "queue.cuh"
#include "stages.cuh"

namespace mok::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kBuffers = 2;  // of the pipeline
constexpr int kRowBytes = 128;
constexpr int kBufferBytes = (kTileM + kTileN) * kRowBytes;
constexpr int kSharedBytes = kBuffers * kBufferBytes;

template <typename S>
constexpr int kStep = kRowBytes / static_cast<int>(sizeof(S));  // elements of the contraction

struct Shared {
  Work work;
  bool fine;  // there is a task, and what it waits for has come
};

// The byte of element (mn, k) of an operand in shared memory. kMn: boxes of kStep rows and kStep columns.
template <typename S, ptx::Major major>
__device__ __forceinline__ int ByteOf(int mn, int k) {
  constexpr int kStepS = kStep<S>;
  const int row = major == ptx::Major::kK ? mn : mn / kStepS * kStepS + k;
  const int column = major == ptx::Major::kK ? k : mn % kStepS;
  return row * kRowBytes + ((column * static_cast<int>(sizeof(S))) ^ ((row & 7) << 4));
}

// Brings one step of an operand of `extent` rows along M or N to shared memory.
template <typename S, ptx::Major major>
__device__ void Load(const Params& p, const Matrices& matrices, const Gemm& g, const Operand& operand, bool halves,
                     int extent, int at, uint8_t* to) {
  constexpr int kChunk = 16 / static_cast<int>(sizeof(S)), kStepS = kStep<S>, kChunks = kStepS / kChunk;
  const uint32_t shared = ptx::Shared(to);
  for (int i = threadIdx.x; i < extent * kChunks; i += kThreads) {
    // Chunk i: kK: row i / kChunks along mn; kMn: row of the contraction within a box.
    const int line = i / kChunks, chunk = i % kChunks * kChunk;
    const int mn = major == ptx::Major::kK ? line : line / kStepS * kStepS + chunk;
    const int k = major == ptx::Major::kK ? chunk : line % kStepS;
    const Box box = BoxOf(g, operand, halves, mn / 64, at, kStepS);
    const Matrix& m = matrices.at[box.matrix];
    const int64_t from_mn = box.mn + mn % 64, from_k = box.k + k;
    const int64_t column = major == ptx::Major::kK ? from_k : from_mn;
    int64_t row = major == ptx::Major::kK ? from_mn : from_k;
    bool exists = row < m.rows;
    if (operand.gathered) {
      exists = row < p.dims.capacity;
      const int64_t route = exists ? p.schedule.row_source[row] : -1;
      exists = route >= 0;
      row = exists ? route / p.dims.top_k : 0;
    }
    const S* from = static_cast<const S*>(m.base) + (box.z * m.rows + row) * m.columns + column;
    const int byte = ByteOf<S, major>(mn, k);
    if (m.columns % kChunk == 0) {
      const bool valid = exists && column < m.columns;
      ptx::CopyAsync16(shared + byte, valid ? from : m.base, valid);
    } else {
      S values[kChunk];
#pragma unroll
      for (int c = 0; c < kChunk; ++c) {
        using Bits = std::conditional_t<sizeof(S) == 2, unsigned short, unsigned>;
        Bits bits = 0;  // past the first level cache: the ring is written while the kernel runs
        if (exists && column + c < m.columns) bits = __ldcg(reinterpret_cast<const Bits*>(from + c));
        memcpy(&values[c], &bits, sizeof(S));
      }
      memcpy(to + byte, values, 16);
    }
  }
}

// One step's products of warp `warp` (rows 16 warp ..) with all columns.
template <typename S, ptx::Major a_major, ptx::Major b_major>
__device__ __forceinline__ void MultiplyStep(const uint8_t* a, const uint8_t* b, int warp, int lane,
                                             float (&sum)[kSums]) {
  if constexpr (std::is_same_v<S, float>) {
    const auto read = [](const uint8_t* base, int byte) { return *reinterpret_cast<const float*>(base + byte); };
    const int row = 16 * warp + lane / 4;
    for (int k = 0; k < kStep<S>; ++k) {
      const float upper = read(a, ByteOf<S, a_major>(row, k)), lower = read(a, ByteOf<S, a_major>(row + 8, k));
#pragma unroll
      for (int j = 0; j < 32; ++j) {
        const int column = 8 * j + lane % 4 * 2;
        const float left = read(b, ByteOf<S, b_major>(column, k)), right = read(b, ByteOf<S, b_major>(column + 1, k));
        sum[4 * j] = fmaf(upper, left, sum[4 * j]);
        sum[4 * j + 1] = fmaf(upper, right, sum[4 * j + 1]);
        sum[4 * j + 2] = fmaf(lower, left, sum[4 * j + 2]);
        sum[4 * j + 3] = fmaf(lower, right, sum[4 * j + 3]);
      }
    }
  } else {
    const uint32_t a_at = ptx::Shared(a), b_at = ptx::Shared(b);
    const int r = lane % 8, q = lane / 8;  // of the matrix this lane names a row of
#pragma unroll
    for (int k = 0; k < kStep<S>; k += 16) {
      // Matrices of A: rows 0-7 and 8-15 at k, then both at k + 8.
      uint32_t fragment[4];
      const int m = 16 * warp + q % 2 * 8, ka = k + q / 2 * 8;
      constexpr bool kTransposeA = a_major == ptx::Major::kMn, kTransposeB = b_major == ptx::Major::kMn;
      const int a_byte = kTransposeA ? ByteOf<S, a_major>(m, ka + r) : ByteOf<S, a_major>(m + r, ka);
      ptx::LoadMatrix4<kTransposeA>(fragment, a_at + a_byte);
#pragma unroll
      for (int j = 0; j < 16; ++j) {
        // Of B: columns 16 j to 16 j + 7 at k and k + 8, then the next eight.
        uint32_t columns[4];
        const int n = 16 * j + q / 2 * 8, kb = k + q % 2 * 8;
        const int b_byte = kTransposeB ? ByteOf<S, b_major>(n, kb + r) : ByteOf<S, b_major>(n + r, kb);
        ptx::LoadMatrix4<kTransposeB>(columns, b_at + b_byte);
        float (&left)[4] = *reinterpret_cast<float (*)[4]>(&sum[8 * j]);
        float (&right)[4] = *reinterpret_cast<float (*)[4]>(&sum[8 * j + 4]);
        ptx::Mma(left, fragment, columns[0], columns[1]);
        ptx::Mma(right, fragment, columns[2], columns[3]);
      }
    }
  }
}

template <typename S, ptx::Major a_major, ptx::Major b_major>
__device__ __forceinline__ void Multiply(const Params& p, const Matrices& matrices, const Gemm& g, uint8_t* buffers,
                                         int warp, int lane, float (&sum)[kSums]) {
  const auto load = [&](int at) {
    uint8_t* to = buffers + at % kBuffers * kBufferBytes;
    Load<S, a_major>(p, matrices, g, g.a, false, kTileM, at, to);
    Load<S, b_major>(p, matrices, g, g.b, g.halves, kTileN, at, to + kTileM * kRowBytes);
    ptx::CopyAsyncCommit();
  };
  if (g.steps > 0) load(0);
  for (int at = 0; at < g.steps; ++at) {
    if (at + 1 < g.steps) {
      load(at + 1);
      ptx::CopyAsyncWait<1>();
    } else {
      ptx::CopyAsyncWait<0>();
    }
    __syncthreads();
    const uint8_t* a = buffers + at % kBuffers * kBufferBytes;
    MultiplyStep<S, a_major, b_major>(a, a + kTileM * kRowBytes, warp, lane, sum);
    __syncthreads();  // the buffer is read
  }
}

// Rows of a communication task, by all threads.
template <typename S, bool whole, bool mxfp8>
__device__ void MoveRows(const Params& p, const PeerTable& peers, const TaskList& list, const Task& task) {
  const Dims& d = p.dims;
  const Moved moved = MovedBy(p, list, p.schedule.row_count, task);
  const int64_t routes = d.Routes(), row_bytes = d.hidden * static_cast<int64_t>(sizeof(S));
  const bool pulls = IsPull(task.op);
  const auto row = [row_bytes](const void* base, int64_t index) {
    return const_cast<char*>(static_cast<const char*>(base)) + index * row_bytes;
  };
  const auto copy = [row_bytes](const char* from, char* to) {  // from: null for zeros
    if (row_bytes % 16 == 0) {
      for (int64_t i = threadIdx.x * 16; i < row_bytes; i += kThreads * 16) {
        *reinterpret_cast<uint4*>(to + i) =
            from == nullptr ? uint4{} : __ldcg(reinterpret_cast<const uint4*>(from + i));
      }
    } else {
      for (int64_t i = threadIdx.x * 2; i < row_bytes; i += kThreads * 2) {
        *reinterpret_cast<uint16_t*>(to + i) =
            from == nullptr ? uint16_t{0} : __ldcg(reinterpret_cast<const unsigned short*>(from + i));
      }
    }
  };
  // The token's row of x or dy to the ring, or zeros.
  const int64_t pulled_bytes = mxfp8 ? MxRowBytes(d.hidden) : row_bytes;
  const auto pull = [&](bool exists, const void* base, int64_t token, char* to) {
    const char* from = exists ? static_cast<const char*>(base) + token * pulled_bytes : nullptr;
    if constexpr (mxfp8) {
      if (exists) {
        for (int64_t at = 8 * threadIdx.x; at < d.hidden; at += 8 * kThreads) {
          Vector<BFloat16> v;
          const unsigned char scale = __ldcg(reinterpret_cast<const unsigned char*>(from + MxScaleAt(at)));
          Decode(__ldcg(reinterpret_cast<const uint2*>(from + MxValueAt(at))), MxScaleToFloat(scale), &v);
          v.Store<whole>(reinterpret_cast<BFloat16*>(to) + at, static_cast<int>(d.hidden - at));
        }
        return;
      }
    }
    copy(from, to);
  };
  void* x = pulls ? PulledX(p, list, task) : nullptr;
  const int arrays = pulls ? (x != nullptr) + (task.op == Op::kReverseCombine) : 0;
  if (threadIdx.x == 0) {  // from the sizes; the Hopper kernel counts what came in
    atomicAdd(reinterpret_cast<unsigned long long*>(p.ring.control + kPulledBytes),
              static_cast<unsigned long long>(arrays * moved.count * pulled_bytes));
  }
  for (int i = 0; i < moved.rows; ++i) {
    const bool exists = i < moved.count;
    if (!pulls && !exists) break;
    const int64_t source = exists ? p.schedule.row_source[moved.first + i] : 0;
    const Peer& peer = peers.at[source / routes];
    const int64_t ring_row = moved.ring_row + i, token = source % routes / d.top_k;
    if (x != nullptr) pull(exists, peer.x, token, row(x, ring_row));
    if (task.op == Op::kReverseCombine) {
      pull(exists, peer.d_y, token, row(p.ring.d_y, ring_row));
      if (d.Exchanges() && exists && threadIdx.x == 0) {
        static_cast<float*>(p.ring.weights)[ring_row] = static_cast<const float*>(peer.router_weights)[source % routes];
      }
    }
    if (!pulls && OwnRoute(p, source) < 0) copy(row(p.ring.out, ring_row), row(peer.returned, source % routes));
    if (task.op == Op::kReverseDispatch && threadIdx.x == 0) {
      static_cast<float*>(peer.returned_d_weights)[source % routes] =
          Stages<S, true>::SumPartials(p, ring_row, static_cast<int>(list.DHiddenTiles()));
    }
  }
}

// whole, mxfp8: see Stages.
template <typename S, bool whole, bool mxfp8>
__global__ void __launch_bounds__(kThreads, 1)
    PortableKernel(const __grid_constant__ Params p, const __grid_constant__ PeerTable peers,
                   const __grid_constant__ Matrices matrices, const __grid_constant__ Launch launch) {
  using ptx::Major;
  if (p.ring.control[kGivenUp] != 0) return;
  extern __shared__ __align__(128) uint8_t buffers[];
  __shared__ Shared s;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const Tiles tiles = TilesOf(Path::kPortable);
  const TaskList list(p.dims, tiles, p.pass, p.schedule.row_offset);
  // The lowest CTAs, which start first, move rows, if any rows move.
  const bool moves = list.NumCommunication() > 0 && blockIdx.x < launch.num_comm_sms;
  const int64_t tasks = moves ? list.NumCommunication() : list.NumCompute();
  using Stages = Stages<S, whole, mxfp8>;
  const Stages stages(p, warp, lane);
  for (;;) {
    if (warp == 0) {
      const int ticket = __shfl_sync(~0u, TakeTicket(p, moves ? kCommunicationTicket : kComputeTicket, lane), 0);
      bool fine = ticket < tasks;
      if (fine) {
        const Task task = moves ? list.Communication(ticket) : list.Compute(ticket);
        fine = WaitForCounters(p, launch, task, lane);
        if (fine && lane == 0) {
          if (moves) s.work.task = task;
          else Describe(p, list, p.schedule.row_count, tiles, task, kStep<S>, &s.work);
        }
      }
      if (lane == 0) s.fine = fine;
    }
    __syncthreads();
    if (!s.fine) return;
    const Work& w = s.work;
    const Op op = RoutedOp(w.task.op);
    if (moves) {
      MoveRows<S, whole, mxfp8>(p, peers, list, w.task);
    } else if (op != Op::kNone) {
      float sum[kSums];
      if (op == Op::kGradGateUp || op == Op::kGradDown) {
        stages.Begin(w, sum);
        Multiply<S, Major::kMn, Major::kMn>(p, matrices, w.gemm, buffers, warp, lane, sum);
      } else {
#pragma unroll
        for (float& value : sum) value = 0;
        if (op == Op::kGateUp || op == Op::kDown) {
          Multiply<S, Major::kK, Major::kMn>(p, matrices, w.gemm, buffers, warp, lane, sum);
        } else {
          Multiply<S, Major::kK, Major::kK>(p, matrices, w.gemm, buffers, warp, lane, sum);
        }
      }
      stages.End(w, sum, typename Stages::FromMemory{stages, w}, typename Stages::ToMemory{stages, w});
    }
    __threadfence();  // what this thread stored, before thread 0 signals for all
    __syncthreads();
    if (threadIdx.x == 0) Signal(p, w.task.signal);
    __syncthreads();  // the slot is read
  }
}

using Kernel = void (*)(Params, PeerTable, Matrices, Launch);

template <bool whole>
Kernel KernelFor(ScalarType type, bool mxfp8) {
  if (type == ScalarType::kFloat32) return PortableKernel<float, whole, false>;
  return mxfp8 ? PortableKernel<BFloat16, whole, true> : PortableKernel<BFloat16, whole, false>;
}

}  // namespace

const char* LoadPortableKernels() {
  constexpr ScalarType kFloat = ScalarType::kFloat32, kBFloat = ScalarType::kBFloat16;
  for (const Kernel kernel :
       {KernelFor<false>(kFloat, false), KernelFor<true>(kFloat, false), KernelFor<false>(kBFloat, false),
        KernelFor<true>(kBFloat, false), KernelFor<false>(kBFloat, true), KernelFor<true>(kBFloat, true)}) {
    const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes);
    if (error != cudaSuccess) return cudaGetErrorString(error);
  }
  return nullptr;
}

const char* LaunchPortableKernel(const Params& params, const PeerTable& peers, const Matrices& matrices,
                                 const Launch& launch, cudaStream_t stream) {
  Launch filled = launch;
  if (filled.num_comm_sms == 0) filled.num_comm_sms = (launch.sms + 7) / 8;
  // Careful: a CTA that moves rows waits for those that multiply, so one at least must multiply.
  if (Pulls(params.dims, TilesOf(Path::kPortable), params.pass) && launch.sms < 2) {
    return "ranks > 1 and MXFP8 need two multiprocessors, one to move rows";
  }
  filled.num_comm_sms = Min(filled.num_comm_sms, launch.sms - 1);
  const Dims& d = params.dims;
  const bool whole = d.hidden % 8 == 0 && d.intermediate % 8 == 0 && d.shared_intermediate % 8 == 0;
  const Kernel kernel =
      whole ? KernelFor<true>(params.type, params.pass.mxfp8) : KernelFor<false>(params.type, params.pass.mxfp8);
  kernel<<<launch.sms, kThreads, kSharedBytes, stream>>>(params, peers, matrices, filled);
  const cudaError_t error = cudaGetLastError();
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

}  // namespace mok::cuda

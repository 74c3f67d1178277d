// The Hopper kernel's warp that moves rows: dispatch, combine and their reverses, through buffers of its own in shared
// memory. Called by megakernel_sm90a.cu.
#ifndef MOK_CUDA_HOPPER_MOVER_CUH_
#define MOK_CUDA_HOPPER_MOVER_CUH_

#include <cstdint>

#include "hopper.cuh"
#include "mxfp8.cuh"
#include "ptx.cuh"
#include "queue.cuh"
#include "stages.cuh"

namespace mok::cuda {

inline constexpr int kLag = 4;  // pieces on their way in; the others are on their way out
static_assert(kLag < kMoveBuffers, "a piece's buffer must be free when it comes in");
inline constexpr int kMxPiece = static_cast<int>(kMoveBytes / kMxChunkBytes * kMxChunk);  // values of MXFP8 in a buffer
static_assert(kMxChunk == 4 * 32 * 8 && kMxChunk / kMxBlock == 32,
              "each lane has a scale of a chunk and 4 times 8 values");

// Copies rows through shared memory, in pieces, by one thread. Only the copy engine touches the data.
//
// Careful: this thread's own instructions bound it, hardly ever a wait: 1,400 cycles a piece in a first version
// (H200, 2026-11-29). What can be worked out by 32 lanes at once comes in Shared::rows.
class Mover {
 public:
  __device__ explicit Mover(Shared& s, int64_t row_bytes)
      : rows_(s.rows),
        buffers_(ptx::Shared(s.moves)),
        barriers_(ptx::Shared(s.moved)),
        zeros_(ptx::Shared(s.zeros)),
        row_bytes_(static_cast<int>(row_bytes)),
        pieces_(static_cast<int>(CeilDiv(row_bytes, kMoveBytes))) {}

  // The first `rows` rows, as far as sending them out. Returns the bytes that came in.
  __device__ int64_t Move(int rows) {
    int64_t loaded = 0;
    const int all = rows * pieces_;
    Place in{0, 0}, out{0, 0};
#pragma unroll 1
    for (int step = 0; step < all + kLag; ++step) {
      if (step < all) {
        // The buffer's piece before this one went out kMoveBuffers - kLag steps ago.
        ptx::StoreBulkWaitRead<kMoveBuffers - kLag - 1>();
        const uint32_t barrier = barriers_ + in_.at * sizeof(uint64_t);
        const int bytes = Min(kMoveBytes, row_bytes_ - in.offset);
        ptx::BarrierArriveExpect(barrier, bytes);
        ptx::LoadBulk(buffers_ + in_.at * kMoveBytes, rows_[in.row].from + in.offset, bytes, barrier);
        loaded += bytes;
        in_.Next();
        Next(&in);
      }
      if (step >= kLag) {
        ptx::BarrierWait(barriers_ + out_.at * sizeof(uint64_t), out_.parity);
        const int bytes = Min(kMoveBytes, row_bytes_ - out.offset);
        ptx::StoreBulk(rows_[out.row].to + out.offset, buffers_ + out_.at * kMoveBytes, bytes);
        ptx::StoreBulkCommit();
        out_.Next();
        Next(&out);
      }
    }
    return loaded;
  }

  // Likewise rows of MXFP8, by the whole warp, which turns them into bfloat16 on the way. Adds to lane 0's `pulled`.
  __device__ void Unpack(const Shared& s, int rows, int hidden, int lane, uint64_t* pulled) {
    in_ = {__shfl_sync(~0u, in_.at, 0), __shfl_sync(~0u, in_.parity, 0)};  // where lane 0's last Move ended
    out_ = in_;
    const int all = rows * CeilDiv(hidden, kMxPiece);
    constexpr int kAhead = kMoveBuffers - 1;
    const auto next = [hidden](Place* place) {
      if ((place->offset += kMxPiece) >= hidden) *place = {place->row + 1, 0};
    };
    Place in{0, 0}, out{0, 0};
#pragma unroll 1
    for (int step = 0; step < all + kAhead; ++step) {
      if (step < all) {
        if (lane == 0) {
          const uint32_t barrier = barriers_ + in_.at * sizeof(uint64_t);
          const int bytes = static_cast<int>(MxRowBytes(Min(kMxPiece, hidden - in.offset)));
          const char* from = rows_[in.row].from + in.offset / kMxPiece * (kMxPiece / kMxChunk * kMxChunkBytes);
          ptx::BarrierArriveExpect(barrier, bytes);
          ptx::LoadBulk(buffers_ + in_.at * kMoveBytes, from, bytes, barrier);
          *pulled += bytes;
        }
        in_.Next();
        next(&in);
      }
      if (step >= kAhead) {
        ptx::BarrierWait(barriers_ + out_.at * sizeof(uint64_t), out_.parity);
        BFloat16* to = reinterpret_cast<BFloat16*>(rows_[out.row].to) + out.offset;
        UnpackPiece(s.moves[out_.at], Min(kMxPiece, hidden - out.offset), to, lane);
        __syncwarp();  // the buffer is read
        out_.Next();
        next(&out);
      }
    }
  }

  // Sends zeros to the rows [begin, end).
  __device__ void Clear(int begin, int end) const {
    for (Place to{begin, 0}; to.row < end;) {
      ptx::StoreBulk(rows_[to.row].to + to.offset, zeros_, Min(kZeroBytes, row_bytes_ - to.offset));
      if ((to.offset += kZeroBytes) >= row_bytes_) to = {to.row + 1, 0};
    }
    ptx::StoreBulkCommit();
  }

  // Until all that was sent out is written.
  __device__ static void Finish() {
    ptx::StoreBulkWait<0>();
    ptx::FenceProxyAsync();  // orders the copies before the signal that lets others read them
  }

 private:
  struct Place {
    int row, offset;
  };
  __device__ static void UnpackPiece(const uint8_t* chunk, int values, BFloat16* to, int lane) {
#pragma unroll 1
    for (int first = 0; first < values; first += kMxChunk, chunk += kMxChunkBytes) {
      const float scale = MxScaleToFloat(chunk[lane]);  // anything where there is no block
      const uint8_t* codes = chunk + kMxChunk / kMxBlock + 8 * lane;
      Vector<BFloat16> v[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {  // all at once, there or not: the buffer is larger than what is in it
        const float of_block = __shfl_sync(~0u, scale, 8 * i + lane / 4);
        Decode(*reinterpret_cast<const uint2*>(codes + 256 * i), of_block, &v[i]);
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int at = first + 256 * i + 8 * lane;
        v[i].Store<true>(to + at, values - at);
      }
    }
  }
  __device__ void Next(Place* place) const {
    if ((place->offset += kMoveBytes) >= row_bytes_) *place = {place->row + 1, 0};
  }

  const MovedRow* const rows_;
  const uint32_t buffers_, barriers_, zeros_;
  const int row_bytes_, pieces_;
  Cursor<kMoveBuffers> in_, out_;
};

// Until a minibatch waits to be pushed, or a pull stands that near behind the pushes, or the list ends soon. False
// after an abort.
//
// Careful: looks seldom, since decoding tasks takes the math warps' issue slots: once a microsecond made gate-up 2 %
// slower (two H200s, S1, 2026-11-30).
__device__ inline bool HoldBack(const Params& p, const TaskList& list, int tasks, int lane) {
  constexpr unsigned kPauseNs = 8000;
  int known = -1;  // the ticket that `later` is for
  Wait later{};    // of the task a minibatch later
  for (;; __nanosleep(kPauseNs)) {
    int next = lane == 0 ? ptx::LoadRelaxed(p.ring.control + kCommunicationTicket) : 0;
    next = __shfl_sync(~0u, next, 0);
    if (next + static_cast<int>(gridDim.x) >= tasks) return true;
    if (next != known) {
      const Task task = list.Communication(Min(next + list.MinibatchTasks(), tasks - 1));
      if (IsPull(task.op)) return true;
      later = task.waits[0];
      known = next;
    }
    const bool behind = lane == 0 && ptx::LoadRelaxed(p.ring.counters + later.counter) == later.target;
    const bool aborted = lane == 0 && ptx::LoadRelaxed(p.ring.control + kAbortFlag) != 0;
    if (__any_sync(~0u, aborted)) return false;
    if (__any_sync(~0u, behind)) return true;
  }
}

// cta: in the cluster. While nothing but pushes is near, its second one pushes only what the first ones of all clusters
// are behind with. Pushing from everywhere at once fills the links, and products take longer, presumably since their
// operands wait in line with the rows (two H200s, S1: 4 % more cycles instead of 1 %, 2026-11-30).
template <bool mxfp8>
__device__ void MoveRows(const Params& p, const PeerTable& peers, const Launch& launch, Shared& s, int cta, int lane) {
  const TaskList& list = s.list;
  const Dims& d = p.dims;
  // Careful: below, one lane describes one row, and moves its weight.
  static_assert(kMostMovedRows <= 32, "a communication task has a row for each lane");
  const int tasks = list.NumCommunication(), routes = static_cast<int>(d.Routes()), top_k = static_cast<int>(d.top_k);
  const int64_t row_bytes = d.hidden * 2, pulled_bytes = mxfp8 ? MxRowBytes(d.hidden) : row_bytes;
  Mover mover(s, row_bytes);
  const auto row = [row_bytes](const void* base, int64_t index) {
    return const_cast<char*>(static_cast<const char*>(base)) + index * row_bytes;
  };
  uint64_t pulled = 0;  // of lane 0: the bytes that its barriers awaited
  int ahead = TakeTicket(p, kCommunicationTicket, lane);
  bool holds_back = false;
  Index written = -1;  // the counter of the task before, whose rows are on their way
  const auto finish = [&] {
    if (written < 0) return;
    __threadfence();  // every lane's weights, before lane 0 signals for all
    __syncwarp();
    if (lane == 0) {
      mover.Finish();
      Signal(p, written);
    }
    written = -1;
  };
  for (;;) {
    if (holds_back) {
      finish();
      if (!HoldBack(p, list, tasks, lane)) return;
      ahead = TakeTicket(p, kCommunicationTicket, lane);
    }
    const int ticket = __shfl_sync(~0u, ahead, 0);
    const Task task = ticket < tasks ? list.Communication(ticket) : Task{};
    finish();
    if (ticket >= tasks) {
      if (lane == 0) atomicAdd(reinterpret_cast<unsigned long long*>(p.ring.control + kPulledBytes), pulled);
      return;
    }
    const bool pulls = IsPull(task.op);
    holds_back = cta == 1 && !pulls;
    if (!holds_back) ahead = TakeTicket(p, kCommunicationTicket, lane);
    if (!WaitForCounters(p, launch, task, lane)) return;
    const Moved moved = MovedBy(p, list, s.row_counts, task);
    const bool exists = lane < moved.count;
    const int source = exists ? p.schedule.row_source[moved.first + lane] : 0;
    const Peer& peer = peers.at[source / routes];
    const int route = source % routes, token = route / top_k;
    const int64_t ring_row = moved.ring_row + lane;
    // x, then dy: first all rows that exist, then those to be cleared. Or the results of other ranks' rows.
    char* const x = pulls ? static_cast<char*>(PulledX(p, list, task)) : nullptr;
    const bool first = x != nullptr, second = task.op == Op::kReverseCombine;
    const int arrays = first + second, count = moved.count, missing = pulls ? moved.rows - count : 0;
    const bool pushed = !pulls && exists && OwnRoute(p, source) < 0;
    const unsigned all_pushed = __ballot_sync(~0u, pushed);
    if (pushed) {
      s.rows[__popc(all_pushed & ((1u << lane) - 1))] = {row(p.ring.out, ring_row), row(peer.returned, route)};
    } else if (pulls && lane < moved.rows) {
      const int at = exists ? lane : arrays * count + lane - count, next = exists ? count : missing;
      const int64_t skipped = token * pulled_bytes;
      if (first) s.rows[at] = {static_cast<const char*>(peer.x) + skipped, row(x, ring_row)};
      if (second) {
        s.rows[at + first * next] = {static_cast<const char*>(peer.d_y) + skipped, row(p.ring.d_y, ring_row)};
      }
    }
    __syncwarp();
    const bool unpacks = mxfp8 && pulls;
    if constexpr (mxfp8) {
      if (unpacks) mover.Unpack(s, arrays * count, static_cast<int>(d.hidden), lane, &pulled);
    }
    if (lane == 0 && (!unpacks || missing > 0)) {
      // Orders the copies after the ordinary stores just waited for. Not for Unpack: it would wait for its stores.
      ptx::FenceProxyAsync();
      if (!unpacks) {
        const int64_t loaded = mover.Move(pulls ? arrays * count : __popc(all_pushed));
        if (pulls) pulled += loaded;
      }
      if (missing > 0) mover.Clear(arrays * count, arrays * (count + missing));
    }
    if (d.Exchanges() && exists) {
      if (task.op == Op::kReverseCombine) {
        static_cast<float*>(p.ring.weights)[ring_row] = static_cast<const float*>(peer.router_weights)[route];
      } else if (task.op == Op::kReverseDispatch) {
        static_cast<float*>(peer.returned_d_weights)[route] =
            Stages<BFloat16, true>::SumPartials(p, ring_row, static_cast<int>(list.DHiddenTiles()));
      }
    }
    written = task.signal;
  }
}

}  // namespace mok::cuda

#endif  // MOK_CUDA_HOPPER_MOVER_CUH_

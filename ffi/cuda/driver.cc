#include "driver.h"

#include "../decode.h"
#include "../tasks.h"
#include "exchange.h"
#include "kernels.h"

namespace mok::cuda {
namespace {

std::string Text(const char* error) { return error == nullptr ? "" : error; }
std::string Text(const std::string& error) { return error; }

const char* Fill(void* buffer, int value, int64_t bytes, cudaStream_t stream) {
  if (buffer == nullptr || bytes == 0) return nullptr;
  const cudaError_t error = cudaMemsetAsync(buffer, value, static_cast<size_t>(bytes), stream);
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

// The counters and the control words behind them.
const char* Zero(const Params& p, const Options& options, cudaStream_t stream) {
  const char* begin = reinterpret_cast<const char*>(p.ring.counters);
  const char* end = reinterpret_cast<const char*>(p.ring.control + kControlWords);
  if (const char* error = Fill(p.ring.counters, 0, end - begin, stream)) return error;
  if (options.stuck_counter < 0 || options.stuck_counter >= CounterLayout(p.dims).total) return nullptr;
  // Far below zero: no number of arrivals makes it the target.
  return Fill(p.ring.counters + options.stuck_counter, 0x80, sizeof(int32_t), stream);
}

const char* FillContextWithNaN(const Params& p, cudaStream_t stream) {
  const int64_t bytes = p.dims.macrobatch * Bytes(p.type);
  if (const char* error = Fill(p.context.x, 0xff, p.dims.hidden * bytes, stream)) return error;
  if (const char* error = Fill(p.context.gate, 0xff, p.dims.intermediate * bytes, stream)) return error;
  return Fill(p.context.up, 0xff, p.dims.intermediate * bytes, stream);
}

// To where the peers pull from: in the forward pass x and ids, in the backward pass x, dy and the router weights;
// with MXFP8 Quantize has x and dy.
const char* Stage(const Params& p, const Meeting& meeting, const ArenaLayout& at, int sms, cudaStream_t stream) {
  const Dims& d = p.dims;
  const bool forward = p.pass.direction == Direction::kForward;
  const int64_t rows = p.pass.mxfp8 ? 0 : d.tokens * d.hidden * Bytes(p.type), routes = d.Routes() * 4;
  StagedArrays arrays{{{at.x, p.x, rows}, {at.ids, p.ids, routes}}};
  if (!forward) arrays = {{{at.x, p.x, rows}, {at.d_y, p.d_y, rows}, {at.router_weights, p.router_weights, routes}}};
  return LaunchStage(meeting, arrays, sms, stream);
}

// MXFP8: x and dy as they are pulled.
const char* Quantize(const Params& p, cudaStream_t stream) {
  const Dims& d = p.dims;
  const int32_t* aborted = p.ring.control + kAbortFlag;
  if (const char* error = LaunchQuantize(p.x, d.tokens, d.hidden, p.ring.staged_x, nullptr, aborted, stream)) {
    return error;
  }
  return LaunchQuantize(p.d_y, d.tokens, d.hidden, p.ring.staged_d_y, nullptr, aborted, stream);
}

// What is left of a call that could not be put on the stream, so that its peers learn of it and the arena is free for
// the next one. `passed`: of Enqueue. What fails here too has no remedy: the peers' time limit ends their wait.
void GiveUp(const Meeting& meeting, int passed, cudaStream_t stream) {
  if (passed == 0) {  // the control words may not be zero yet
    Fill(meeting.call_control, 0, kControlWords * sizeof(int32_t), stream);
    LaunchEnter(meeting, stream);
  }
  Fill(meeting.call_control + kAbortFlag, 1, sizeof(int32_t), stream);
  if (passed < 2) LaunchBarrier(meeting, 0, stream);
  if (passed < 3) LaunchBarrier(meeting, 1, stream);
  LaunchLeave(meeting, stream);
}

}  // namespace

std::string LoadKernels(int capability) {
  for (const char* error :
       {LoadSchedule(), LoadQuantize(), LoadEpilogue(), LoadExchange(), LoadMegakernels(capability)}) {
    if (error != nullptr) return error;
  }
  return "";
}

std::string Enqueue(const std::vector<Params>& decoded, void* workspace, int64_t workspace_bytes,
                    const Options& options, cudaStream_t stream) {
  std::vector<Params> ranks = decoded;
  const bool forward = ranks[0].pass.direction == Direction::kForward;
  Meeting meeting{};
  ArenaLayout arena{};
  if (options.group != nullptr) {
    Params& p = ranks[0];
    const Group& group = *options.group;
    p.rank = group.rank;
    arena = LayOutArena(p.dims, Bytes(p.type));
    if (p.pass.mxfp8) {
      p.ring.staged_x = group.arenas[p.rank] + arena.x;
      p.ring.staged_d_y = forward ? nullptr : group.arenas[p.rank] + arena.d_y;
    }
    p.ring.returned = group.arenas[p.rank] + arena.returned;
    p.ring.returned_d_weights = group.arenas[p.rank] + arena.returned_d_weights;
    meeting = {group,           SignatureOf(p, options.refused), options.place, p.ring.control,
               options.reports, options.barrier_timeout_ns};
  }
  PeerTable peers{};
  IdTable ids{};
  Outcome outcome{};
  outcome.timeout_ns = options.launch.timeout_ns;
  outcome.reports = options.reports;
  for (const Params& p : ranks) {
    peers.at[p.rank] = PeerOf(p);
    ids.at[p.rank] = p.ids;
    outcome.control[outcome.ranks++] = p.ring.control;
  }
  for (int64_t r = 0; options.group != nullptr && r < options.group->ranks; ++r) {
    char* base = options.group->arenas[r];
    peers.at[r] = {base + arena.x, base + arena.d_y, base + arena.router_weights, base + arena.returned,
                   base + arena.returned_d_weights};
    ids.at[r] = reinterpret_cast<const int32_t*>(base + arena.ids);
  }
  std::string error;
  const char* doing = "";
  // One phase of all ranks before the next: a rank reads what its peers wrote in the phase before.
  const auto phase = [&](const char* name, auto step) {
    for (const Params& p : ranks) {
      if (!error.empty()) return;
      doing = name;
      error = Text(step(p));
    }
  };
  if (options.test_mode) {
    phase("filling memory with NaN", [&](const Params& p) {
      const char* failed = p.rank == ranks[0].rank ? Fill(workspace, 0xff, workspace_bytes, stream) : nullptr;
      return failed != nullptr || !forward ? failed : FillContextWithNaN(p, stream);
    });
    // The return window, which no peer writes before the first barrier.
    phase("filling the return window with NaN", [&](const Params& p) {
      return Fill(p.ring.returned, 0xff, options.group == nullptr ? 0 : arena.total - arena.returned, stream);
    });
  }
  phase("zeroing the counters", [&](const Params& p) { return Zero(p, options, stream); });
  // Real ranks: what stands between two phases of virtual ones is a barrier.
  const auto meet = [&](const char* name, auto step) {
    if (options.group != nullptr) phase(name, step);
  };
  int pauses = 0;
  const auto pause = [&] {
    const int number = pauses++;
    if (options.test_mode) meet("pausing", [&](const Params&) { return LaunchPause(meeting, number, stream); });
  };
  int passed = 0;  // of the steps below that peers wait for, and the last one
  const auto pass = [&](const char* name, auto step) {
    meet(name, [&](const Params&) { return step(); });
    passed += error.empty();
  };
  pass("entering the arena", [&] { return LaunchEnter(meeting, stream); });
  pause();
  meet("staging", [&](const Params& p) { return Stage(p, meeting, arena, options.launch.sms, stream); });
  phase("rounding to MXFP8", [&](const Params& p) { return Quantize(p, stream); });
  pause();
  pass("the first barrier", [&] { return LaunchBarrier(meeting, 0, stream); });
  if (forward) {
    phase("the schedule", [&](const Params& p) {
      return LaunchSchedule(p.dims, p.rank, ids, p.schedule, p.ring.schedule_scratch, stream);
    });
    phase("clearing the context", [&](const Params& p) { return LaunchClearContext(p, stream); });
  }
  pause();
  phase("the megakernel", [&](const Params& p) {
    Launch launch = options.launch;
    launch.status = reinterpret_cast<Status*>(p.ring.control + kStatus);
    return LaunchMegakernel(options.path, p, peers, launch, stream);
  });
  pause();
  pass("the second barrier", [&] { return LaunchBarrier(meeting, 1, stream); });
  pause();
  phase("the epilogue", [&](const Params& p) { return LaunchEpilogue(p, outcome, stream); });
  pause();
  pass("leaving the arena", [&] { return LaunchLeave(meeting, stream); });
  if (!error.empty() && options.group != nullptr) GiveUp(meeting, passed, stream);
  return error.empty() ? "" : std::string("mok_jax cuda: ") + doing + ": " + error;
}

}  // namespace mok::cuda

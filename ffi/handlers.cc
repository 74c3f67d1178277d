// The XLA FFI targets of the host implementation and its module's Python face. A handler decodes and checks
// its buffers (decode.h) and hands one Params a rank to host/.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <array>
#include <cstdint>
#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "decode.h"
#include "host/job.h"
#include "host/rendezvous.h"
#include "op_names.h"
#include "planning.h"

namespace mok {
namespace {

ffi::Future Failed(const std::string& message, ffi::ErrorCode code = ffi::ErrorCode::kInvalidArgument) {
  ffi::Promise promise;
  ffi::Future future(promise);
  promise.SetError(ffi::Error(code, message));
  return future;
}

// The test mode: whatever is read before it is written is NaN.
void FillWithNaN(const Decoded& decoded) {
  std::memset(decoded.workspace, 0xff, decoded.workspace_bytes);
  for (const Params& p : decoded.ranks) {
    if (p.pass.direction == Direction::kBackward) continue;  // its context is read
    for (auto [buffer, width] : {std::pair{p.context.x, p.dims.hidden},
                                 {p.context.gate, p.dims.intermediate},
                                 {p.context.up, p.dims.intermediate}}) {
      if (buffer != nullptr) std::memset(buffer, 0xff, p.dims.macrobatch * width * Bytes(p.type));
    }
  }
}

// Works a full group off on this thread, with the pool's threads helping as they come free.
template <typename S>
std::string RunJob(std::vector<Params> ranks, const CallAttributes& call, ffi::ThreadPool& pool) {
  const auto random_order =
      call.random_order < 0 ? std::nullopt : std::optional<uint32_t>(static_cast<uint32_t>(call.random_order));
  const auto job = std::make_shared<host::Job<S>>(std::move(ranks), random_order);
  int64_t threads = Min(pool.num_threads(), static_cast<int64_t>(std::thread::hardware_concurrency()));
  if (call.num_threads > 0) threads = Min(threads, call.num_threads);
  for (int64_t i = 1; i < threads; ++i) pool.Schedule([job] { job->Work(); });
  return job->Run();
}

std::string RunRanks(std::vector<Params> ranks, const CallAttributes& call, ffi::ThreadPool& pool) {
  try {
    switch (ranks[0].type) {
      case ScalarType::kFloat32: return RunJob<float>(std::move(ranks), call, pool);
      case ScalarType::kFloat64: return RunJob<double>(std::move(ranks), call, pool);
      case ScalarType::kBFloat16: return RunJob<BFloat16>(std::move(ranks), call, pool);
    }
  } catch (const std::exception& error) {
    return std::string("mok_jax host: ") + error.what();
  }
  return "";
}

template <Direction direction>
ffi::Future Handle(ffi::RunId run, ffi::ThreadPool pool, CallAttributes call, ffi::RemainingArgs arguments,
                   ffi::RemainingRets results) {
  constexpr bool kBackward = direction == Direction::kBackward;
  Decoded decoded = Decode(direction, call, arguments, results, host::kTiles);
  if (!decoded.complaint.empty()) return Failed(decoded.complaint);
  const int64_t rank = decoded.place[0], group = decoded.place[1];
  if (rank < 0 || rank >= call.ranks) return Failed("mok_jax: rank out of range");
  for (Params& p : decoded.ranks) p.rank += rank * call.virtual_ranks;
  if (call.random_order >= 0) FillWithNaN(decoded);
  if (call.ranks == 1) {
    const std::string error = RunRanks(std::move(decoded.ranks), call, pool);
    if (!error.empty()) return Failed(error, ffi::ErrorCode::kInternal);
    ffi::Promise promise;
    ffi::Future future(promise);
    promise.SetAvailable();
    return future;
  }
  ffi::Promise promise;
  ffi::Future future(promise);
  const auto complete = [promise](const std::string& error) mutable {
    if (error.empty()) {
      promise.SetAvailable();
    } else {
      promise.SetError(ffi::Error(ffi::ErrorCode::kInternal, error));
    }
  };
  auto full = host::Rendezvous<Params>::Get().Arrive({run.run_id, group, call.site}, rank, call.ranks,
                                                     kBackward ? "the backward pass" : "the forward pass", call.timeout,
                                                     decoded.ranks[0], complete);
  if (full) {
    const std::string error = RunRanks(std::move(full->arrivals), call, pool);
    host::CompleteAll(std::move(full->completions), error);
  }
  return future;
}

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    MokForward, Handle<Direction::kForward>,
    ffi::Ffi::Bind().Ctx<ffi::RunId>().Ctx<ffi::ThreadPool>().Attrs<CallAttributes>().RemainingArgs().RemainingRets());
XLA_FFI_DEFINE_HANDLER_SYMBOL(
    MokBackward, Handle<Direction::kBackward>,
    ffi::Ffi::Bind().Ctx<ffi::RunId>().Ctx<ffi::ThreadPool>().Attrs<CallAttributes>().RemainingArgs().RemainingRets());

// ---- the Python face: what only tests need, and the CPU ----

py::tuple BuildSchedule(const Plan& d, int64_t rank, py::array_t<int32_t, py::array::c_style> ids) {
  py::array_t<int32_t> source(d.capacity), offset(d.local_experts + 1), count(d.local_experts);
  std::vector<const int32_t*> of_ranks;
  for (int64_t r = 0; r < d.ranks; ++r) of_ranks.push_back(ids.data() + r * d.Routes());
  host::BuildSchedule(d, rank, of_ranks, {source.mutable_data(), offset.mutable_data(), count.mutable_data()});
  return py::make_tuple(source, offset, count);
}

// Both task sequences as dictionaries and the expected total of each counter: for tests.
// tiles: gate-up, dgrad-down and hidden columns, rows and columns of both weight gradients, group, values moved.
py::tuple ListTasks(const Plan& d, const Pass& pass, py::array_t<int32_t, py::array::c_style> row_offset,
                    const std::array<int64_t, 9>& tiles, bool gathers) {
  const TaskList list(
      d, {tiles[0], tiles[1], tiles[2], {tiles[3], tiles[4]}, {tiles[5], tiles[6]}, tiles[7], tiles[8], gathers}, pass,
      row_offset.data());
  const auto show = [](const Task& task) {
    py::list waits;
    for (int i = 0; i < Task::kWaits; ++i) {
      if (task.waits[i].count > 0)
        waits.append(py::make_tuple(task.waits[i].counter, task.waits[i].count, task.waits[i].target));
    }
    using namespace py::literals;
    return py::dict("op"_a = Name(task.op), "macrobatch"_a = task.macrobatch, "block"_a = task.block,
                    "blocks"_a = task.blocks, "tile"_a = task.tile, "expert"_a = task.expert,
                    "carry_in"_a = task.carry_in, "carry_out"_a = task.carry_out, "signal"_a = task.signal,
                    "waits"_a = waits);
  };
  py::list communication, compute, expected;
  for (int64_t i = 0; i < list.NumCommunication(); ++i) communication.append(show(list.Communication(i)));
  for (int64_t i = 0; i < list.NumCompute(); ++i) compute.append(show(list.Compute(i)));
  for (int64_t i = 0; i < list.NumCounters(); ++i) expected.append(list.Expected(i));
  return py::make_tuple(communication, compute, expected);
}

// The codec of numerics.h over the rows of a matrix of bfloat16 bits: the rows as they travel, MxRowBytes each, and
// rounded to MXFP8 as bfloat16 bits.
py::tuple QuantizeMxfp8(py::array_t<uint16_t, py::array::c_style> rows) {
  const py::ssize_t count = rows.shape(0), n = rows.shape(1);
  py::array_t<uint8_t> travelling({count, static_cast<py::ssize_t>(MxRowBytes(n))});
  py::array_t<uint16_t> rounded({count, n});
  const auto* from = reinterpret_cast<const BFloat16*>(rows.data());
  auto* to = reinterpret_cast<BFloat16*>(rounded.mutable_data());
  std::memcpy(to, from, count * n * sizeof(BFloat16));
  std::memset(travelling.mutable_data(), 0, travelling.size());
  for (py::ssize_t r = 0; r < count; ++r) {
    host::ToMx(from + r * n, n, travelling.mutable_data(r, 0));
    host::RoundToMx(to + r * n, n);
  }
  return py::make_tuple(travelling, rounded);
}

// e4m3 of each float, and the float of each e4m3.
py::array_t<uint8_t> ToE4M3s(py::array_t<float, py::array::c_style> values) {
  py::array_t<uint8_t> codes(values.size());
  for (py::ssize_t i = 0; i < values.size(); ++i) codes.mutable_data()[i] = ToE4M3(values.data()[i]);
  return codes;
}
py::array_t<float> FromE4M3s(py::array_t<uint8_t, py::array::c_style> codes) {
  py::array_t<float> values(codes.size());
  for (py::ssize_t i = 0; i < codes.size(); ++i) values.mutable_data()[i] = E4M3ToFloat(codes.data()[i]);
  return values;
}

bool CpuHas(const std::string& level) {
  if (level == "x86-64-v4") {
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512dq") &&
           __builtin_cpu_supports("avx512vl");
  }
  if (level == "x86-64-v3") {
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi") &&
           __builtin_cpu_supports("bmi2");
  }
  return true;
}

}  // namespace

PYBIND11_MODULE(MOK_MODULE, module) {
  module.doc() = "The host implementation of mok_jax; see mok_jax/ops.py.";
  module.attr("JAXLIB_VERSION") = MOK_JAXLIB_VERSION;  // whose headers this was built with
  module.attr("CPU_LEVEL") = MOK_CPU_LEVEL;
  module.def("cpu_has", &CpuHas, py::arg("level"));
  module.def("targets", [] {
    py::dict targets;
    targets["mok_forward"] = Capsule(reinterpret_cast<void*>(MokForward));
    targets["mok_backward"] = Capsule(reinterpret_cast<void*>(MokBackward));
    return targets;
  });
  DefinePlanning(module, {[](bool) { return host::kTiles; }, host::kRowTile, host::kComputeUnits});
  module.def("minibatch_estimate", &MinibatchEstimate, py::arg("units"), py::arg("row_tile"), py::arg("columns"),
             py::arg("intermediate"));
  module.def("build_schedule", &BuildSchedule, py::arg("dims"), py::arg("rank"), py::arg("ids"));
  module.def("quantize_mxfp8", &QuantizeMxfp8, py::arg("rows"));
  module.def("to_e4m3", &ToE4M3s, py::arg("values"));
  module.def("from_e4m3", &FromE4M3s, py::arg("codes"));
  module.def("list_tasks", &ListTasks, py::arg("dims"), py::arg("pass_"), py::arg("row_offset"), py::arg("tiles"),
             py::arg("gathers"));
}

}  // namespace mok

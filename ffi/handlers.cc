// The XLA FFI targets and the module's Python face: the only file that includes XLA. A handler decodes
// and checks its buffers, fills one Params a rank, and hands them to host/.
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

#include "host/job.h"
#include "host/rendezvous.h"
#include "params.h"
#include "workspace.h"
#include "xla/ffi/api/ffi.h"

namespace mok {
namespace {

namespace ffi = xla::ffi;
namespace py = pybind11;

// Attributes of a call, the same on every rank.
struct CallAttributes {
  int64_t ranks, virtual_ranks, row_tile, minibatch, macrobatch, context, gradients, num_threads, random_order;
  double swiglu_limit, timeout;
  const void* site;  // unique to this call site of the compiled program
};

// Bits of CallAttributes::gradients.
enum GradientBit { kGateUpBit = 1, kDownBit = 2, kSharedGateUpBit = 4, kSharedDownBit = 8 };

}  // namespace
}  // namespace mok

template <>
struct xla::ffi::AttrDecoding<mok::CallAttributes> {
  using Type = mok::CallAttributes;
  static std::optional<Type> Decode(XLA_FFI_AttrType, void* attribute, DiagnosticEngine& diagnostic) {
    const auto* attrs = static_cast<const XLA_FFI_Attrs*>(attribute);
    const Dictionary dictionary(attrs);
    bool complete = true;
    const auto read = [&](const char* name, auto* value) {
      const auto found = dictionary.get<std::remove_reference_t<decltype(*value)>>(name);
      complete = complete && found.has_value();
      if (found.has_value()) *value = *found;
    };
    Type call{};
    read("ranks", &call.ranks);
    read("virtual_ranks", &call.virtual_ranks);
    read("row_tile", &call.row_tile);
    read("minibatch", &call.minibatch);
    read("macrobatch", &call.macrobatch);
    read("context", &call.context);
    read("gradients", &call.gradients);
    read("num_threads", &call.num_threads);
    read("random_order", &call.random_order);
    read("swiglu_limit", &call.swiglu_limit);
    read("timeout", &call.timeout);
    call.site = attrs->attrs;
    if (!complete) return diagnostic.Emit("mok_jax: an attribute is missing or of another type");
    return call;
  }
};

namespace mok {
namespace {

ffi::Future Failed(const std::string& message, ffi::ErrorCode code = ffi::ErrorCode::kInvalidArgument) {
  ffi::Promise promise;
  ffi::Future future(promise);
  promise.SetError(ffi::Error(code, message));
  return future;
}

// Buffers in the order of ops.py, with the first complaint about any of them.
class Buffers {
 public:
  Buffers(ffi::RemainingArgs arguments, ffi::RemainingRets results) : arguments_(arguments), results_(results) {}

  ffi::AnyBuffer Argument() { return *arguments_.get<ffi::AnyBuffer>(argument_++); }
  ffi::AnyBuffer Result() { return **results_.get<ffi::AnyBuffer>(result_++); }

  // The data of the next buffer, which must have this many elements.
  void* Argument(const char* name, int64_t elements) { return Check(name, Argument(), elements); }
  void* Result(const char* name, int64_t elements) { return Check(name, Result(), elements); }

  const std::string& complaint() const { return complaint_; }

 private:
  void* Check(const char* name, const ffi::AnyBuffer& buffer, int64_t elements) {
    if (static_cast<int64_t>(buffer.element_count()) != elements && complaint_.empty()) {
      complaint_ = std::string("mok_jax: ") + name + " must have " + std::to_string(elements) + " elements, got " +
                   std::to_string(buffer.element_count());
    }
    return elements == 0 ? nullptr : buffer.untyped_data();
  }

  ffi::RemainingArgs arguments_;
  ffi::RemainingRets results_;
  size_t argument_ = 0, result_ = 0;
  std::string complaint_;
};

std::optional<ScalarType> TypeOf(const ffi::AnyBuffer& buffer) {
  switch (buffer.element_type()) {
    case ffi::DataType::F32: return ScalarType::kFloat32;
    case ffi::DataType::F64: return ScalarType::kFloat64;
    case ffi::DataType::BF16: return ScalarType::kBFloat16;
    default: return std::nullopt;
  }
}

int64_t Bytes(ScalarType type) { return type == ScalarType::kFloat64 ? 8 : type == ScalarType::kFloat32 ? 4 : 2; }

// Element `index` of a buffer, or null where the buffer is.
void* At(const void* buffer, int64_t index, int64_t bytes) {
  return buffer == nullptr ? nullptr : const_cast<char*>(static_cast<const char*>(buffer)) + index * bytes;
}

// The ranks that one device holds (one, or all virtual ones).
struct Local {
  std::vector<Params> ranks;
  int64_t rank, group;
  std::string complaint;
};

Local Decode(Direction direction, const CallAttributes& call, Buffers buffers) {
  Local local{};
  const bool backward = direction == Direction::kBackward;
  const ffi::AnyBuffer place = buffers.Argument();
  local.rank = place.typed_data<int32_t>()[0];
  local.group = place.typed_data<int32_t>()[1];

  const void* d_y = backward ? buffers.Argument().untyped_data() : nullptr;
  const ffi::AnyBuffer x = buffers.Argument(), ids = buffers.Argument(), router_weights = buffers.Argument();
  ffi::AnyBuffer weights[6] = {buffers.Argument(), buffers.Argument(), buffers.Argument(),
                               buffers.Argument(), buffers.Argument(), buffers.Argument()};
  const std::optional<ScalarType> type = TypeOf(x);
  if (!type) return local.complaint = "mok_jax: x must be float32, float64 or bfloat16", local;
  const int64_t s = Bytes(*type), w = *type == ScalarType::kFloat64 ? 8 : 4, copies = call.virtual_ranks;

  Dims d{};
  d.tokens = x.dimensions()[0] / copies;
  d.hidden = x.dimensions()[1];
  d.top_k = ids.dimensions()[1];
  d.local_experts = weights[0].dimensions()[0] / copies;
  d.intermediate = weights[0].dimensions()[2];
  d.shared_intermediate = weights[3].dimensions()[1];
  d.ranks = call.ranks * copies;
  d.row_tile = call.row_tile;
  d.minibatch = call.minibatch;
  d.macrobatch = call.macrobatch;
  d.capacity = Capacity(d.ranks, d.Routes(), d.local_experts, d.row_tile);

  Pass pass{};
  pass.direction = direction;
  pass.context = call.context != 0;
  pass.gate_up_gradient = backward && (call.gradients & kGateUpBit);
  pass.down_gradient = backward && (call.gradients & kDownBit);
  pass.shared_gate_up_gradient = backward && (call.gradients & kSharedGateUpBit);
  pass.shared_down_gradient = backward && (call.gradients & kSharedDownBit);

  const int64_t expert_elements = d.local_experts * d.hidden * d.intermediate;
  const int64_t shared_elements = d.hidden * d.shared_intermediate;
  const int64_t kept = pass.context ? copies * d.macrobatch : 0, kept_tokens = pass.context ? copies * d.tokens : 0;
  const int64_t kept_x = d.Exchanges() ? kept * d.hidden : 0;

  Schedule schedule{};
  Context context{};
  void *y = nullptr, *d_x = nullptr, *d_router_weights = nullptr;
  Gradient gradients[6] = {};
  const auto take = [&](const char* name, int64_t elements) {
    return backward ? buffers.Argument(name, elements) : buffers.Result(name, elements);
  };
  if (!backward) y = buffers.Result("y", copies * d.tokens * d.hidden);
  schedule.row_source = static_cast<int32_t*>(take("row_source", copies * d.capacity));
  schedule.row_offset = static_cast<int32_t*>(take("row_offset", copies * (d.local_experts + 1)));
  schedule.row_count = static_cast<int32_t*>(take("row_count", copies * d.local_experts));
  context.x = take("context x", kept_x);
  context.gate = take("context gate", kept * d.intermediate);
  context.up = take("context up", kept * d.intermediate);
  context.shared_gate = take("context shared gate", kept_tokens * d.shared_intermediate);
  context.shared_up = take("context shared up", kept_tokens * d.shared_intermediate);
  if (backward) {
    d_x = buffers.Result("d_x", copies * d.tokens * d.hidden);
    d_router_weights = buffers.Result("d_router_weights", copies * d.Routes());
    const bool wanted[6] = {pass.gate_up_gradient,        pass.gate_up_gradient,        pass.down_gradient,
                            pass.shared_gate_up_gradient, pass.shared_gate_up_gradient, pass.shared_down_gradient};
    for (int i = 0; i < 6; ++i) {
      const ffi::AnyBuffer result = buffers.Result();
      gradients[i] = {wanted[i] ? result.untyped_data() : nullptr, TypeOf(result).value_or(ScalarType::kFloat32)};
    }
  }
  Ring measured;
  const int64_t ring_bytes = LayOutRing(d, pass, host::kTiles, s, w, nullptr, &measured);
  char* workspace = static_cast<char*>(buffers.Result("workspace", copies * ring_bytes));
  local.complaint = buffers.complaint();
  if (!local.complaint.empty()) return local;

  if (call.random_order >= 0) {
    // The test mode: whatever is read before it is written is NaN.
    std::memset(workspace, 0xff, copies * ring_bytes);
    if (!backward) {
      for (auto [buffer, elements] :
           {std::pair{context.x, kept_x}, {context.gate, kept * d.intermediate}, {context.up, kept * d.intermediate}}) {
        if (buffer != nullptr) std::memset(buffer, 0xff, elements * s);
      }
    }
  }

  for (int64_t v = 0; v < copies; ++v) {
    Params p{};
    p.dims = d;
    p.pass = pass;
    p.type = *type;
    p.activation = Activation::kSwiGlu;
    p.swiglu_limit = call.swiglu_limit;
    p.rank = local.rank * copies + v;
    p.ids = static_cast<const int32_t*>(At(ids.untyped_data(), v * d.Routes(), 4));
    p.x = At(x.untyped_data(), v * d.tokens * d.hidden, s);
    p.router_weights = At(router_weights.untyped_data(), v * d.Routes(), w);
    p.d_y = At(d_y, v * d.tokens * d.hidden, s);
    const auto operand = [&](int i) {
      const bool routed = i < 3, down = i % 3 == 2;
      const int64_t width = routed ? d.intermediate : d.shared_intermediate;
      return WeightOperand{At(weights[i].untyped_data(), routed ? v * expert_elements : 0, s), nullptr, *type,
                           down ? d.hidden : width};
    };
    p.routed = {operand(0), operand(1), operand(2), operand(0), operand(1), operand(2), nullptr, nullptr, nullptr};
    p.shared = {operand(3), operand(4), operand(5), operand(3), operand(4), operand(5), nullptr, nullptr, nullptr};
    p.schedule = {schedule.row_source + v * d.capacity, schedule.row_offset + v * (d.local_experts + 1),
                  schedule.row_count + v * d.local_experts};
    p.context = {At(context.x, v * d.macrobatch * d.hidden, s), At(context.gate, v * d.macrobatch * d.intermediate, s),
                 At(context.up, v * d.macrobatch * d.intermediate, s),
                 At(context.shared_gate, v * d.tokens * d.shared_intermediate, s),
                 At(context.shared_up, v * d.tokens * d.shared_intermediate, s)};
    LayOutRing(d, pass, host::kTiles, s, w, workspace + v * ring_bytes, &p.ring);
    p.y = At(y, v * d.tokens * d.hidden, s);
    p.d_x = At(d_x, v * d.tokens * d.hidden, s);
    p.d_router_weights = At(d_router_weights, v * d.Routes(), w);
    const auto gradient = [&](int i) {
      const Gradient& g = gradients[i];
      return Gradient{At(g.values, v * (i < 3 ? expert_elements : shared_elements), Bytes(g.type)), g.type};
    };
    p.d_routed = {gradient(0), gradient(1), gradient(2)};
    p.d_shared = {gradient(3), gradient(4), gradient(5)};
    local.ranks.push_back(p);
  }
  return local;
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
  if (arguments.size() != (kBackward ? 19 : 10) || results.size() != (kBackward ? 9 : 10)) {
    return Failed("mok_jax: this module and mok_jax/ops.py are of different versions; reinstall mok_jax");
  }
  Local local = Decode(direction, call, Buffers(arguments, results));
  if (!local.complaint.empty()) return Failed(local.complaint);
  if (call.ranks == 1) {
    const std::string error = RunRanks(std::move(local.ranks), call, pool);
    if (!error.empty()) return Failed(error, ffi::ErrorCode::kInternal);
    ffi::Promise promise;
    ffi::Future future(promise);
    promise.SetAvailable();
    return future;
  }
  if (local.rank < 0 || local.rank >= call.ranks) return Failed("mok_jax: rank out of range");
  ffi::Promise promise;
  ffi::Future future(promise);
  const auto complete = [promise](const std::string& error) mutable {
    if (error.empty()) {
      promise.SetAvailable();
    } else {
      promise.SetError(ffi::Error(ffi::ErrorCode::kInternal, error));
    }
  };
  auto full = host::Rendezvous<Params>::Get().Arrive({run.run_id, local.group, call.site}, local.rank, call.ranks,
                                                     kBackward ? "the backward pass" : "the forward pass", call.timeout,
                                                     local.ranks[0], complete);
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

// ---- the Python face ----

Dims MakeDims(int64_t tokens, int64_t hidden, int64_t intermediate, int64_t shared_intermediate, int64_t local_experts,
              int64_t ranks, int64_t top_k, int64_t row_tile, int64_t minibatch, int64_t macrobatch) {
  Dims d{tokens,
         hidden,
         intermediate,
         shared_intermediate,
         local_experts,
         ranks,
         top_k,
         row_tile > 0 ? row_tile : host::kRowTile,
         minibatch,
         macrobatch,
         0};
  PlanRows(&d, host::kTiles, host::kComputeUnits);
  return d;
}

Pass MakePass(bool backward, bool context, int64_t gradients) {
  return {backward ? Direction::kBackward : Direction::kForward,
          context,
          (gradients & kGateUpBit) != 0,
          (gradients & kDownBit) != 0,
          (gradients & kSharedGateUpBit) != 0,
          (gradients & kSharedDownBit) != 0};
}

py::tuple BuildSchedule(const Dims& d, int64_t rank, py::array_t<int32_t, py::array::c_style> ids) {
  py::array_t<int32_t> source(d.capacity), offset(d.local_experts + 1), count(d.local_experts);
  std::vector<const int32_t*> of_ranks;
  for (int64_t r = 0; r < d.ranks; ++r) of_ranks.push_back(ids.data() + r * d.Routes());
  host::BuildSchedule(d, rank, of_ranks, {source.mutable_data(), offset.mutable_data(), count.mutable_data()});
  return py::make_tuple(source, offset, count);
}

// Both task sequences as dictionaries and the expected total of each counter: for tests.
// tiles: gate-up, dgrad-down and hidden columns, rows and columns of both weight gradients, group, parts.
py::tuple ListTasks(const Dims& d, const Pass& pass, py::array_t<int32_t, py::array::c_style> row_offset,
                    const std::array<int64_t, 9>& tiles, bool gathers) {
  const TaskList list(d,
                      {tiles[0],
                       tiles[1],
                       tiles[2],
                       {tiles[3], tiles[4]},
                       {tiles[5], tiles[6]},
                       tiles[7],
                       d.row_tile / tiles[8],
                       gathers},
                      pass, row_offset.data());
  const auto show = [](const Task& task) {
    py::list waits;
    for (int i = 0; i < task.num_waits; ++i) {
      waits.append(py::make_tuple(task.waits[i].counter, task.waits[i].count, task.waits[i].target));
    }
    using namespace py::literals;
    return py::dict("op"_a = host::Name(task.op), "macrobatch"_a = task.macrobatch, "block"_a = task.block,
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
  module.attr("ROW_TILE") = host::kRowTile;
  module.def("cpu_has", &CpuHas, py::arg("level"));
  module.def("targets", [] {
    constexpr const char* kName = "xla._CUSTOM_CALL_TARGET";
    py::dict targets;
    targets["mok_forward"] = py::capsule(reinterpret_cast<void*>(MokForward), kName);
    targets["mok_backward"] = py::capsule(reinterpret_cast<void*>(MokBackward), kName);
    return targets;
  });
  py::class_<Dims>(module, "Dims", py::module_local())
      .def(py::init(&MakeDims), py::kw_only(), py::arg("tokens"), py::arg("hidden"), py::arg("intermediate"),
           py::arg("shared_intermediate"), py::arg("local_experts"), py::arg("ranks"), py::arg("top_k"),
           py::arg("row_tile"), py::arg("minibatch"), py::arg("macrobatch"))
      .def_readonly("row_tile", &Dims::row_tile)
      .def_readonly("minibatch", &Dims::minibatch)
      .def_readonly("macrobatch", &Dims::macrobatch)
      .def_readonly("capacity", &Dims::capacity);
  py::class_<Pass>(module, "Pass", py::module_local())
      .def(py::init(&MakePass), py::kw_only(), py::arg("backward"), py::arg("context"), py::arg("gradients"));
  module.def(
      "workspace_bytes",
      [](const Dims& d, const Pass& pass, int64_t storage_bytes, int64_t wide_bytes) {
        Ring ring;
        return LayOutRing(d, pass, host::kTiles, storage_bytes, wide_bytes, nullptr, &ring);
      },
      py::arg("dims"), py::arg("pass_"), py::arg("storage_bytes"), py::arg("wide_bytes"));
  module.def("minibatch_estimate", &MinibatchEstimate, py::arg("units"), py::arg("row_tile"), py::arg("columns"),
             py::arg("intermediate"));
  module.def("build_schedule", &BuildSchedule, py::arg("dims"), py::arg("rank"), py::arg("ids"));
  module.def("list_tasks", &ListTasks, py::arg("dims"), py::arg("pass_"), py::arg("row_offset"), py::arg("tiles"),
             py::arg("gathers"));
}

}  // namespace mok

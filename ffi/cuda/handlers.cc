// The XLA FFI targets of the CUDA implementation and its module's Python face. Execute decodes its buffers
// (decode.h), which it does not read, and puts kernels on XLA's stream (driver.h); what must be allocated or
// loaded is there since Initialize. Where a process has several devices of a group, their threads meet here first.
#include <cuda_runtime_api.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <cstdint>
#include <mutex>
#include <sstream>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <vector>

#include "../decode.h"
#include "../op_names.h"
#include "../planning.h"
#include "arena.h"
#include "current.h"
#include "driver.h"
#include "exchange.h"
#include "kernels.h"
#include "megakernel.h"
#include "memory.h"
#include "peers.h"
#include "status.h"
#if __has_include("xla/ffi/api/collectives_api.h")
#include "xla/ffi/api/collectives_api.h"
#define MOK_BORROWS_COMMUNICATORS
#endif

namespace mok::cuda {
namespace {

// Streaming multiprocessors of an H200: what the default minibatch is planned for on every device, so that
// shapes do not depend on the machine.
constexpr int64_t kComputeUnits = 132;

// What a device needs before its first launch; kept for the process's life once it is complete.
struct Device {
  Reports* reports = nullptr;
  uint32_t seen = 0;   // the number of the last report that was passed on
  uint32_t shown = 0;  // likewise, by NewFaults
  int sms = 0;
  int capability = 0;  // 90 for 9.0
};

std::string Text(const char* doing, cudaError_t error) {
  return error == cudaSuccess ? "" : std::string("mok_jax cuda: ") + doing + ": " + cudaGetErrorString(error);
}

// Empty, or an error: then nothing is kept.
std::string Open(int ordinal, Device* device) {
  int major = 0, minor = 0;
  for (const cudaError_t error : {cudaDeviceGetAttribute(&device->sms, cudaDevAttrMultiProcessorCount, ordinal),
                                  cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, ordinal),
                                  cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, ordinal)}) {
    if (error != cudaSuccess) return Text("asking the device for its size", error);
  }
  device->capability = 10 * major + minor;
  const std::string error = LoadKernels(device->capability);
  if (!error.empty()) return "mok_jax cuda: loading the kernels: " + error;
  // One address space: the device sees the same pointer.
  void* memory = nullptr;
  const cudaError_t allocated = cudaHostAlloc(&memory, sizeof(Reports), cudaHostAllocMapped | cudaHostAllocPortable);
  if (allocated == cudaSuccess) device->reports = new (memory) Reports{};
  return Text("allocating pinned memory", allocated);
}

struct Devices {
  std::mutex mutex;
  std::unordered_map<int, Device> at;
};
Devices& AllDevices() {
  static auto* devices = new Devices;  // never destroyed: kernels may outlive `main`
  return *devices;
}

// The device of this ordinal, opened by the first call, which is Initialize's. A device that does not open is
// not remembered, for what it lacked may come free: the next call tries once more.
std::string DeviceAt(int ordinal, Device** device) {
  Devices& all = AllDevices();
  const std::lock_guard<std::mutex> lock(all.mutex);
  *device = &all.at[ordinal];
  if ((*device)->reports != nullptr) return "";
  const std::string error = Open(ordinal, *device);
  if (!error.empty()) cudaGetLastError();  // or the next launch on this thread would find it
  return error;
}

std::string ErrorOf(const Current& current) { return Text("choosing the device", current.error()); }

std::string Seconds(uint64_t nanoseconds) {
  std::ostringstream text;
  text << nanoseconds * 1e-9;
  return text.str();
}

// What earlier calls on this device left behind, each once. Waits for nothing: a call that is still running has
// its turn later.
std::string TakeReport(Device& device) {
  static std::mutex mutex;
  const std::lock_guard<std::mutex> lock(mutex);
  const uint32_t before = device.seen;
  Report report{};
  for (;;) {
    const Report& next = device.reports->at[(device.seen + 1) % kReports];
    const uint32_t number = __atomic_load_n(&next.number, __ATOMIC_ACQUIRE);
    if (number <= device.seen) break;
    // That a group is given up explains less than why.
    if (next.exchange.fault != Fault::kAbandoned || device.seen == before) report = next;
    device.seen = number;
  }
  const uint32_t calls = device.seen - before;
  if (calls == 0) return "";
  if (report.exchange.fault != Fault::kNone) return Describe(report);
  const Status& s = report.status;
  const bool known = s.op >= 0 && s.op <= static_cast<int32_t>(Op::kSharedGradDown);
  return "mok_jax cuda: in an earlier call on this device " +
         std::string(known ? Name(static_cast<Op>(s.op)) : "a task") + " of block " + std::to_string(s.block) +
         " tile " + std::to_string(s.tile) + " on rank " + std::to_string(s.rank) + " waited " +
         Seconds(report.timeout_ns) + " s in vain for counter " + std::to_string(s.counter) + ": found " +
         std::to_string(s.found) + ", expected " + std::to_string(s.expected) + "; that call's results are NaN" +
         (calls > 1 ? ", as are those of " + std::to_string(calls - 1) + " before it for the same reason" : "") +
         ". The time runs from when a task of a running kernel begins to wait, whatever was queued before it; raise "
         "MoKConfig.timeout (or MOK_TIMEOUT) if one tile can take that long, because other processes share the GPU, a "
         "debugger holds it, or one expert has very many rows. Otherwise this is a fault of mok_jax or of the GPU";
}

// Faults between ranks on any device, each once, whether or not a call has raised them.
std::vector<std::string> NewFaults() {
  Devices& all = AllDevices();
  const std::lock_guard<std::mutex> lock(all.mutex);
  std::vector<std::string> faults;
  for (auto& [ordinal, device] : all.at) {
    if (device.reports == nullptr) continue;
    for (;;) {
      const Report& next = device.reports->at[(device.shown + 1) % kReports];
      const uint32_t number = __atomic_load_n(&next.number, __ATOMIC_ACQUIRE);
      if (number <= device.shown) break;
      device.shown = number;
      if (next.exchange.fault != Fault::kNone) faults.push_back(Describe(next));
    }
  }
  return faults;
}

ffi::Error Internal(const std::string& message) { return ffi::Error(ffi::ErrorCode::kInternal, message); }

// Runs before every execution, of a command buffer too, which does not come to Execute again.
ffi::Error Initialize(int32_t ordinal) {
  const Current current(ordinal);
  if (current.error() != cudaSuccess) return Internal(ErrorOf(current));
  Device* device;
  const std::string error = DeviceAt(ordinal, &device);
  if (!error.empty()) return Internal(error);
  const std::string report = TakeReport(*device);
  return report.empty() ? ffi::Error::Success() : Internal(report);
}

// That of a call over peers: one that is refused here never comes to Execute.
ffi::Error InitializePeers(int32_t ordinal, ffi::Dictionary attributes) {
  const auto table = attributes.get<int64_t>("table");
  const ffi::Error error = Initialize(ordinal);
  if (error.failure() && table.has_value()) CountRefusal(*table, ordinal);
  return error;
}

// Counts a call as refused that does not come to its peers.
struct Refusal {
  int64_t table;
  int ordinal;
  bool pending;
  ~Refusal() {
    if (pending) CountRefusal(table, ordinal);
  }
};

template <Direction direction>
ffi::Error Execute(int32_t ordinal, cudaStream_t stream, CallAttributes call, ffi::RemainingArgs arguments,
                   ffi::RemainingRets results) {
  Refusal refusal{call.table, ordinal, call.table != 0};
  const Path path = call.portable != 0 ? Path::kPortable : Path::kHopper;
  Decoded decoded = Decode(direction, call, arguments, results, TilesOf(path));
  if (!decoded.complaint.empty()) return ffi::Error::InvalidArgument(decoded.complaint);
  const Params& first = decoded.ranks[0];
  const Group* group = call.table == 0 ? nullptr : FindGroup(call.table, ordinal);
  if (call.table != 0) {
    const std::string complaint = Complaint(group, call.ranks, first);
    if (!complaint.empty()) return Internal(complaint);
  }
  if ((call.ranks != 1 && group == nullptr) || (call.virtual_ranks != 1 && group != nullptr) ||
      call.virtual_ranks > kMaxRanks || call.row_tile != kRowTile ||
      first.dims.capacity + first.dims.macrobatch > kMostRows || first.type == ScalarType::kFloat64 ||
      (path == Path::kHopper && first.type != ScalarType::kBFloat16)) {
    return ffi::Error::InvalidArgument("mok_jax cuda: sizes that mok_jax/ops.py refuses; reinstall mok_jax");
  }
  const Current current(ordinal);
  if (current.error() != cudaSuccess) return Internal(ErrorOf(current));
  Device* device;
  std::string error = DeviceAt(ordinal, &device);
  if (!error.empty()) return Internal(error);
  if (path == Path::kHopper && device->capability != 90) {
    return Internal("mok_jax cuda: this call was traced for compute capability 9.0, the device has " +
                    std::to_string(device->capability / 10) + "." + std::to_string(device->capability % 10) +
                    "; use MoKConfig(portable=True)");
  }
  const std::string report = TakeReport(*device);
  if (!report.empty()) return Internal(report);
  Options options{};
  options.path = path;
  options.launch.sms = device->sms;
  options.reports = device->reports;
  options.launch.timeout_ns = static_cast<uint64_t>(std::min(call.timeout * 1e9, 9e18));
  options.launch.num_comm_sms = static_cast<int>(call.num_comm_sms);
  options.group = group;
  options.place = decoded.place;
  options.barrier_timeout_ns = static_cast<uint64_t>(std::min(call.barrier_timeout * 1e9, 9e18));
  options.test_mode = call.random_order >= 0;
  options.stuck_counter = call.stuck_counter;
  if (group != nullptr) {
    options.refused = Refused(call.table, ordinal);
    error = Gather(call.table, ordinal, call.barrier_timeout);
    if (!error.empty()) return Internal(error);
  }
  refusal.pending = false;  // from here on the peers learn of a failure
  error = Enqueue(decoded.ranks, decoded.workspace, decoded.workspace_bytes, options, stream);
  return error.empty() ? ffi::Error::Success() : Internal(error);
}

// The schedule alone, for tests and measurements: ids of all ranks -> row_source, row_offset, row_count, scratch.
ffi::Error ExecuteSchedule(int32_t ordinal, cudaStream_t stream, ffi::AnyBuffer ids, ffi::Result<ffi::AnyBuffer> source,
                           ffi::Result<ffi::AnyBuffer> offset, ffi::Result<ffi::AnyBuffer> count,
                           ffi::Result<ffi::AnyBuffer> scratch, int64_t rank) {
  Dims d{};
  if (ids.dimensions().size() != 3) return ffi::Error::InvalidArgument("mok_schedule: ids must have 3 axes");
  d.ranks = ids.dimensions()[0];
  d.tokens = ids.dimensions()[1];
  d.top_k = ids.dimensions()[2];
  d.local_experts = count->element_count();
  d.row_tile = kRowTile;
  d.capacity = Capacity(d.ranks, d.Routes(), d.local_experts, d.row_tile);
  const auto has = [](const ffi::AnyBuffer& buffer, int64_t elements) {
    return buffer.element_type() == ffi::DataType::S32 && static_cast<int64_t>(buffer.element_count()) == elements;
  };
  if (d.ranks < 1 || d.ranks > kMaxRanks || rank < 0 || rank >= d.ranks || d.capacity > kMostRows ||
      !has(ids, d.ranks * d.Routes()) || !has(*source, d.capacity) || !has(*offset, d.local_experts + 1) ||
      !has(*count, d.local_experts) || !has(*scratch, ScheduleScratch(d))) {
    return ffi::Error::InvalidArgument("mok_schedule: sizes that do not fit each other");
  }
  const Current current(ordinal);
  if (current.error() != cudaSuccess) return Internal(ErrorOf(current));
  const auto data = [](const ffi::AnyBuffer& buffer) { return static_cast<int32_t*>(buffer.untyped_data()); };
  IdTable table{};
  for (int64_t r = 0; r < d.ranks; ++r) table.at[r] = data(ids) + r * d.Routes();
  const char* error =
      LaunchSchedule(d, rank, table, {data(*source), data(*offset), data(*count)}, data(*scratch), stream);
  return error == nullptr ? ffi::Error::Success() : Internal(std::string("mok_schedule: ") + error);
}

// The MXFP8 codec alone, likewise: bfloat16 rows -> the rows as they travel, and their values.
ffi::Error ExecuteQuantize(int32_t ordinal, cudaStream_t stream, ffi::BufferR2<ffi::DataType::BF16> rows,
                           ffi::Result<ffi::BufferR2<ffi::DataType::U8>> travelling,
                           ffi::Result<ffi::BufferR2<ffi::DataType::BF16>> rounded) {
  const int64_t count = rows.dimensions()[0], n = rows.dimensions()[1];
  if (static_cast<int64_t>(travelling->element_count()) != count * MxRowBytes(n) ||
      rounded->element_count() != rows.element_count()) {
    return ffi::Error::InvalidArgument("mok_quantize: sizes that do not fit each other");
  }
  const Current current(ordinal);
  if (current.error() != cudaSuccess) return Internal(ErrorOf(current));
  const char* error = LaunchQuantize(rows.untyped_data(), count, n, travelling->untyped_data(), rounded->untyped_data(),
                                     nullptr, stream);
  return error == nullptr ? ffi::Error::Success() : Internal(std::string("mok_quantize: ") + error);
}

// The exchange alone, for measurements: stages x, then `repeats` times the traffic between `barriers` barriers (two at
// least). returned: the return window at the end, or of size 0.
ffi::Error ExecuteTraffic(int32_t ordinal, cudaStream_t stream, ffi::AnyBuffer place, ffi::AnyBuffer x,
                          ffi::AnyBuffer pushed, ffi::Result<ffi::AnyBuffer> pulled,
                          ffi::Result<ffi::AnyBuffer> returned, ffi::Result<ffi::AnyBuffer> control, int64_t table,
                          int64_t traffic, int64_t repeats, int64_t barriers, int64_t sms, double barrier_timeout) {
  const Group* group = FindGroup(table, ordinal);
  if (group == nullptr) return ffi::Error::InvalidArgument("mok_traffic: this device is in no such table of peers");
  if (x.dimensions().size() != 2 || pushed.dimensions().size() != 2 || x.dimensions()[0] < 1) {
    return ffi::Error::InvalidArgument("mok_traffic: x and pushed must have 2 axes");
  }
  Dims d{};
  d.tokens = x.dimensions()[0];
  d.hidden = x.dimensions()[1];
  d.top_k = pushed.dimensions()[0] / d.tokens;
  const int64_t element_bytes = static_cast<int64_t>(ffi::ByteWidth(x.element_type()));
  const ArenaLayout at = LayOutArena(d, element_bytes);
  const TrafficRows rows{d.tokens,
                         d.Routes(),
                         d.hidden * element_bytes,
                         at.x,
                         at.returned,
                         static_cast<char*>(pulled->untyped_data()),
                         static_cast<const char*>(pushed.untyped_data())};
  const int64_t bytes = rows.routes * rows.row_bytes, returned_bytes = static_cast<int64_t>(returned->size_bytes());
  if (static_cast<int64_t>(pushed.size_bytes()) != bytes || static_cast<int64_t>(pulled->size_bytes()) != bytes ||
      (returned_bytes != 0 && returned_bytes != bytes) || rows.routes % group->ranks != 0 || rows.row_bytes % 16 != 0 ||
      at.total > group->bytes || control->size_bytes() < kControlWords * 4 || barriers < 2 || sms < 2 || sms % 2 != 0) {
    return ffi::Error::InvalidArgument("mok_traffic: sizes that do not fit each other");
  }
  const Current current(ordinal);
  if (current.error() != cudaSuccess) return Internal(ErrorOf(current));
  Device* device;
  std::string failed = DeviceAt(ordinal, &device);
  if (failed.empty()) failed = Gather(table, ordinal, barrier_timeout);
  if (!failed.empty()) return Internal(failed);
  auto* words = static_cast<int32_t*>(control->untyped_data());
  Meeting meeting{*group,
                  {},
                  static_cast<const int32_t*>(place.untyped_data()),
                  words,
                  device->reports,
                  static_cast<uint64_t>(barrier_timeout * 1e9)};
  int32_t* word = meeting.signature.words;
  for (const int64_t value : {d.tokens, d.hidden, d.top_k, traffic, repeats, barriers}) {
    *word++ = static_cast<int32_t>(value);
  }
  cudaError_t error = cudaMemsetAsync(words, 0, kControlWords * 4, stream);
  const char* text = error == cudaSuccess ? LaunchEnter(meeting, stream) : cudaGetErrorString(error);
  const StagedArrays staged{{{at.x, x.untyped_data(), static_cast<int64_t>(x.size_bytes())}}};
  if (text == nullptr) text = LaunchStage(meeting, staged, device->sms, stream);
  for (int64_t i = 1; text == nullptr && i < barriers; ++i) text = LaunchBarrier(meeting, 0, stream);
  for (int64_t i = 0; text == nullptr && i < repeats && traffic != 0; ++i) {
    text = LaunchTraffic(meeting, static_cast<Traffic>(traffic), rows, static_cast<int>(sms), stream);
  }
  if (text == nullptr) text = LaunchBarrier(meeting, 1, stream);
  if (text == nullptr && returned_bytes != 0) {
    error = cudaMemcpyAsync(returned->untyped_data(), group->arenas[group->rank] + at.returned, returned_bytes,
                            cudaMemcpyDeviceToDevice, stream);
    if (error != cudaSuccess) text = cudaGetErrorString(error);
  }
  if (text == nullptr) text = LaunchLeave(meeting, stream);
  return text == nullptr ? ffi::Error::Success() : Internal(std::string("mok_traffic: ") + text);
}

#ifdef MOK_BORROWS_COMMUNICATORS
// XLA lends its communicators through an extension whose minor versions only add to it.
struct Collectives
    : ffi::internal::CollectivesExtensionBase<ffi::internal::CommunicatorContextBase<ffi::internal::ErrorPolicy>> {
  static bool Support(int32_t major, int32_t) { return major == kMajorVersion; }
};
using Lender = ffi::internal::CommunicatorContextBase<ffi::internal::ErrorPolicy>;

constexpr int64_t kCommunication = 0x6d6f6b;  // apart from those of XLA's own collectives

std::vector<std::vector<int64_t>> Rows(ffi::Span<const int64_t> ids, int64_t ranks) {
  std::vector<std::vector<int64_t>> groups;
  for (size_t i = 0; i < ids.size(); i += static_cast<size_t>(ranks)) {
    groups.emplace_back(ids.begin() + i, ids.begin() + i + ranks);
  }
  return groups;
}

ffi::Error PrepareWindow(Lender lender, ffi::Span<const int64_t> groups, int64_t ranks, int64_t) {
  return lender.RequestCommunicator(ffi::GroupMode::kFlattenedId, Rows(groups, ranks), kCommunication);
}

// Careful: allocates, registers and waits. No call of the layer comes here, mok_jax/distributed.py runs it once.
ffi::Error ExecuteWindow(int32_t ordinal, Lender lender, ffi::Result<ffi::AnyBuffer>, ffi::Span<const int64_t> groups,
                         int64_t ranks, int64_t bytes) {
  const auto lent = lender.GetCommunicator(ffi::GroupMode::kFlattenedId, Rows(groups, ranks), kCommunication);
  if (lent.has_error()) return lent.error();
  const Current current(ordinal);
  const std::string error =
      current.error() == cudaSuccess ? MakeWindow(lent.value(), ordinal, bytes) : ErrorOf(current);
  return error.empty() ? ffi::Error::Success() : Internal(error);
}

#define MOK_WINDOW_ATTRIBUTES Attr<ffi::Span<const int64_t>>("groups").Attr<int64_t>("ranks").Attr<int64_t>("bytes")
XLA_FFI_DEFINE_HANDLER_SYMBOL(
    MokWindowPrepare, PrepareWindow,
    ffi::Ffi::Bind<ffi::ExecutionStage::kPrepare>().Ctx<ffi::Extension<Collectives>>().MOK_WINDOW_ATTRIBUTES);
XLA_FFI_DEFINE_HANDLER_SYMBOL(MokWindow, ExecuteWindow,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::DeviceOrdinal>()
                                  .Ctx<ffi::Extension<Collectives>>()
                                  .Ret<ffi::AnyBuffer>()
                                  .MOK_WINDOW_ATTRIBUTES);
#undef MOK_WINDOW_ATTRIBUTES
#endif

XLA_FFI_DEFINE_HANDLER_SYMBOL(MokInitialize, Initialize,
                              ffi::Ffi::Bind<ffi::ExecutionStage::kInitialize>().Ctx<ffi::DeviceOrdinal>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(MokInitializePeers, InitializePeers,
                              ffi::Ffi::Bind<ffi::ExecutionStage::kInitialize>().Ctx<ffi::DeviceOrdinal>().Attrs());

// Command buffers may hold these: Execute only launches kernels and fills memory, on one stream; all that
// changes from call to call is in device memory, and the pinned Reports stay where they are. Real ranks have targets
// without the trait: a captured call must not wait for a peer.
#define MOK_BIND                                \
  ffi::Ffi::Bind()                              \
      .Ctx<ffi::DeviceOrdinal>()                \
      .Ctx<ffi::PlatformStream<cudaStream_t>>() \
      .Attrs<CallAttributes>()                  \
      .RemainingArgs()                          \
      .RemainingRets()
XLA_FFI_DEFINE_HANDLER_SYMBOL(MokForward, Execute<Direction::kForward>, MOK_BIND, {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER_SYMBOL(MokBackward, Execute<Direction::kBackward>, MOK_BIND,
                              {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER_SYMBOL(MokForwardPeers, Execute<Direction::kForward>, MOK_BIND);
XLA_FFI_DEFINE_HANDLER_SYMBOL(MokBackwardPeers, Execute<Direction::kBackward>, MOK_BIND);
#undef MOK_BIND
XLA_FFI_DEFINE_HANDLER_SYMBOL(MokSchedule, ExecuteSchedule,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::DeviceOrdinal>()
                                  .Ctx<ffi::PlatformStream<cudaStream_t>>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Attr<int64_t>("rank"));
XLA_FFI_DEFINE_HANDLER_SYMBOL(MokQuantize, ExecuteQuantize,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::DeviceOrdinal>()
                                  .Ctx<ffi::PlatformStream<cudaStream_t>>()
                                  .Arg<ffi::BufferR2<ffi::DataType::BF16>>()
                                  .Ret<ffi::BufferR2<ffi::DataType::U8>>()
                                  .Ret<ffi::BufferR2<ffi::DataType::BF16>>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(MokTraffic, ExecuteTraffic,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::DeviceOrdinal>()
                                  .Ctx<ffi::PlatformStream<cudaStream_t>>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Attr<int64_t>("table")
                                  .Attr<int64_t>("traffic")
                                  .Attr<int64_t>("repeats")
                                  .Attr<int64_t>("barriers")
                                  .Attr<int64_t>("sms")
                                  .Attr<double>("barrier_timeout"));

py::dict Stages(void* execute, void* initialize = reinterpret_cast<void*>(MokInitialize)) {
  py::dict stages;
  stages["initialize"] = Capsule(initialize);
  stages["execute"] = Capsule(execute);
  return stages;
}

}  // namespace

PYBIND11_MODULE(_cuda, module) {
  module.doc() = "The CUDA implementation of mok_jax; see mok_jax/ops.py. Importing it needs no GPU.";
  module.attr("JAXLIB_VERSION") = MOK_JAXLIB_VERSION;  // whose headers this was built with
  module.attr("CUDA_VERSION") = MOK_CUDA_VERSION;      // of the compiler
  module.attr("MAX_RANKS") = kMaxRanks;
  module.def("targets", [] {
    py::dict targets;
    targets["mok_forward"] = Stages(reinterpret_cast<void*>(MokForward));
    targets["mok_backward"] = Stages(reinterpret_cast<void*>(MokBackward));
    void* initialize = reinterpret_cast<void*>(MokInitializePeers);
    targets["mok_forward_peers"] = Stages(reinterpret_cast<void*>(MokForwardPeers), initialize);
    targets["mok_backward_peers"] = Stages(reinterpret_cast<void*>(MokBackwardPeers), initialize);
    targets["mok_schedule"] = Stages(reinterpret_cast<void*>(MokSchedule));
    targets["mok_quantize"] = Stages(reinterpret_cast<void*>(MokQuantize));
    targets["mok_traffic"] = Stages(reinterpret_cast<void*>(MokTraffic));
#ifdef MOK_BORROWS_COMMUNICATORS
    py::dict window;
    window["prepare"] = Capsule(reinterpret_cast<void*>(MokWindowPrepare));
    window["execute"] = Capsule(reinterpret_cast<void*>(MokWindow));
    targets["mok_window"] = window;
#endif
    return targets;
  });
  const auto tiles = [](bool portable) { return TilesOf(portable ? Path::kPortable : Path::kHopper); };
  DefinePlanning(module, {tiles, kRowTile, kComputeUnits});
  DefineMemory(module);
  DefinePeers(module);
  module.def("new_reports", &NewFaults);
  module.def(
      "open_device",
      [](int ordinal) {
        const Current current(ordinal);
        Device* device;
        const std::string error = current.error() == cudaSuccess ? DeviceAt(ordinal, &device) : ErrorOf(current);
        if (!error.empty()) throw std::runtime_error(error);
      },
      py::arg("ordinal"));
  // Where in one rank's workspace the bytes that it pulled are counted.
  module.def(
      "pulled_bytes_offset",
      [](const Plan& plan, const Pass& pass, int64_t storage_bytes, int64_t wide_bytes) {
        Ring ring;
        char* const base = reinterpret_cast<char*>(uintptr_t{64});  // any but null
        LayOutRing(plan, pass, plan.tiles, storage_bytes, wide_bytes, base, &ring);
        return reinterpret_cast<char*>(ring.control + kPulledBytes) - base;
      },
      py::arg("dims"), py::arg("pass_"), py::arg("storage_bytes"), py::arg("wide_bytes"));
  module.def("schedule_scratch", [](const Plan& plan) { return ScheduleScratch(plan); }, py::arg("dims"));
}

}  // namespace mok::cuda

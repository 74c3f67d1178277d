// From the buffers and attributes of an FFI call to one Params a rank, for the host's handlers.cc and
// cuda/handlers.cc alike; with them the only files that include XLA. Reads no buffer: they may be a GPU's.
#ifndef MOK_DECODE_H_
#define MOK_DECODE_H_

#include <cstdint>
#include <optional>
#include <string>
#include <type_traits>
#include <vector>

#include "params.h"
#include "workspace.h"
#include "xla/ffi/api/ffi.h"

namespace mok {

namespace ffi = xla::ffi;

// Attributes of a call, the same on every rank.
struct CallAttributes {
  int64_t ranks, virtual_ranks, row_tile, minibatch, macrobatch, context, gradients, random_order;
  double swiglu_limit, timeout;
  int64_t num_threads;                            // host
  int64_t portable, num_comm_sms, stuck_counter;  // CUDA
  const void* site;                               // unique to this call site of the compiled program
};

// Bits of CallAttributes::gradients.
enum GradientBit { kGateUpBit = 1, kDownBit = 2, kSharedGateUpBit = 4, kSharedDownBit = 8 };

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
    read("random_order", &call.random_order);
    read("swiglu_limit", &call.swiglu_limit);
    read("timeout", &call.timeout);
    read("num_threads", &call.num_threads);
    read("portable", &call.portable);
    read("num_comm_sms", &call.num_comm_sms);
    read("stuck_counter", &call.stuck_counter);
    call.site = attrs->attrs;
    if (!complete) return diagnostic.Emit("mok_jax: an attribute is missing or of another type");
    return call;
  }
};

namespace mok {

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

inline std::optional<ScalarType> TypeOf(const ffi::AnyBuffer& buffer) {
  switch (buffer.element_type()) {
    case ffi::DataType::F32: return ScalarType::kFloat32;
    case ffi::DataType::F64: return ScalarType::kFloat64;
    case ffi::DataType::BF16: return ScalarType::kBFloat16;
    default: return std::nullopt;
  }
}

inline int64_t Bytes(ScalarType type) {
  return type == ScalarType::kFloat64 ? 8 : type == ScalarType::kFloat32 ? 4 : 2;
}

// Element `index` of a buffer, or null where the buffer is.
inline void* At(const void* buffer, int64_t index, int64_t bytes) {
  return buffer == nullptr ? nullptr : const_cast<char*>(static_cast<const char*>(buffer)) + index * bytes;
}

// The ranks that one device holds (one, or all virtual ones), or a complaint.
struct Decoded {
  std::vector<Params> ranks;  // `rank` counts from 0 on each device
  const int32_t* place;       // the device's rank and group
  char* workspace;            // of all ranks
  int64_t workspace_bytes;
  std::string complaint;
};

// tiles: the target's.
inline Decoded Decode(Direction direction, const CallAttributes& call, ffi::RemainingArgs arguments,
                      ffi::RemainingRets results, const Tiles& tiles) {
  Decoded decoded{};
  const bool backward = direction == Direction::kBackward;
  if (arguments.size() != (backward ? 19 : 10) || results.size() != (backward ? 9 : 10)) {
    decoded.complaint = "mok_jax: this module and mok_jax/ops.py are of different versions; reinstall mok_jax";
    return decoded;
  }
  Buffers buffers(arguments, results);
  decoded.place = static_cast<const int32_t*>(buffers.Argument("place", 2));
  const void* d_y = backward ? buffers.Argument().untyped_data() : nullptr;
  const ffi::AnyBuffer x = buffers.Argument(), ids = buffers.Argument(), router_weights = buffers.Argument();
  ffi::AnyBuffer weights[6] = {buffers.Argument(), buffers.Argument(), buffers.Argument(),
                               buffers.Argument(), buffers.Argument(), buffers.Argument()};
  const std::optional<ScalarType> type = TypeOf(x);
  if (!type) return decoded.complaint = "mok_jax: x must be float32, float64 or bfloat16", decoded;
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
  const int64_t ring_bytes = LayOutRing(d, pass, tiles, s, w, nullptr, &measured);
  decoded.workspace_bytes = copies * ring_bytes;
  decoded.workspace = static_cast<char*>(buffers.Result("workspace", decoded.workspace_bytes));
  decoded.complaint = buffers.complaint();
  if (!decoded.complaint.empty()) return decoded;

  for (int64_t v = 0; v < copies; ++v) {
    Params p{};
    p.dims = d;
    p.pass = pass;
    p.type = *type;
    p.activation = Activation::kSwiGlu;
    p.swiglu_limit = call.swiglu_limit;
    p.rank = v;
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
    LayOutRing(d, pass, tiles, s, w, decoded.workspace + v * ring_bytes, &p.ring);
    p.y = At(y, v * d.tokens * d.hidden, s);
    p.d_x = At(d_x, v * d.tokens * d.hidden, s);
    p.d_router_weights = At(d_router_weights, v * d.Routes(), w);
    const auto gradient = [&](int i) {
      const Gradient& g = gradients[i];
      return Gradient{At(g.values, v * (i < 3 ? expert_elements : shared_elements), Bytes(g.type)), g.type};
    };
    p.d_routed = {gradient(0), gradient(1), gradient(2)};
    p.d_shared = {gradient(3), gradient(4), gradient(5)};
    decoded.ranks.push_back(p);
  }
  return decoded;
}

}  // namespace mok

#endif  // MOK_DECODE_H_

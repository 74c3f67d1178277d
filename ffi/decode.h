// From the buffers and attributes of an FFI call to one Params a rank, for the host's handlers.cc and
// cuda/handlers.cc alike; with them the only files that include XLA. Reads no buffer: they may be a GPU's.
// ops.py sends what passes here; what an older export or another caller sends must not reach foreign memory.
#ifndef MOK_DECODE_H_
#define MOK_DECODE_H_

#include <cstdint>
#include <optional>
#include <sstream>
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
  int64_t ranks, virtual_ranks, row_tile, minibatch, macrobatch, context, gradients, mxfp8, random_order;
  double swiglu_limit, timeout;
  int64_t num_threads;                            // host
  int64_t portable, num_comm_sms, stuck_counter;  // CUDA
  int64_t table;                                  // CUDA: of the peers (cuda/arena.h); 0: there are none
  double barrier_timeout;                         // CUDA, with peers
  const void* site;                               // unique to this call site of the compiled program
};

inline constexpr int64_t kMostRows = 0x7fffffff;  // that int32 can count

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
    read("mxfp8", &call.mxfp8);
    read("random_order", &call.random_order);
    read("swiglu_limit", &call.swiglu_limit);
    read("timeout", &call.timeout);
    read("num_threads", &call.num_threads);
    read("portable", &call.portable);
    read("num_comm_sms", &call.num_comm_sms);
    read("stuck_counter", &call.stuck_counter);
    read("table", &call.table);
    read("barrier_timeout", &call.barrier_timeout);
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

  // The data of the next buffer, which must have this dtype and so many elements.
  void* Argument(const char* name, ffi::DataType type, int64_t elements) {
    return Check(name, Argument(), type, elements);
  }
  void* Result(const char* name, ffi::DataType type, int64_t elements) { return Check(name, Result(), type, elements); }

  void* Check(const char* name, const ffi::AnyBuffer& buffer, ffi::DataType type, int64_t elements) {
    if ((buffer.element_type() != type || static_cast<int64_t>(buffer.element_count()) != elements) &&
        complaint_.empty()) {
      std::ostringstream text;
      text << "mok_jax: " << name << " must have " << elements << " elements of " << static_cast<XLA_FFI_DataType>(type)
           << ", got " << buffer.element_count() << " of " << static_cast<XLA_FFI_DataType>(buffer.element_type());
      complaint_ = text.str();
    }
    return elements == 0 ? nullptr : buffer.untyped_data();
  }

  const std::string& complaint() const { return complaint_; }

 private:
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

// What the sizes are made of: empty, or the first of these that is out of range.
inline std::string Complaint(const CallAttributes& call) {
  const struct {
    const char* name;
    int64_t value, factor;
  } integers[] = {{"ranks", call.ranks, 1},
                  {"virtual_ranks", call.virtual_ranks, 1},
                  {"row_tile", call.row_tile, 1},
                  {"minibatch", call.minibatch, call.row_tile},
                  {"macrobatch", call.macrobatch, call.row_tile}};
  for (const auto& [name, value, factor] : integers) {
    if (value < 1 || value > kMostRows || value % factor != 0) {
      return std::string("mok_jax: ") + name + " must be a multiple of " + std::to_string(factor) +
             " in [1, 2**31), got " + std::to_string(value);
    }
  }
  if (!(call.timeout > 0)) return "mok_jax: timeout must be more than 0 s, got " + std::to_string(call.timeout);
  if (!(call.barrier_timeout > 0)) {
    return "mok_jax: barrier_timeout must be more than 0 s, got " + std::to_string(call.barrier_timeout);
  }
  return "";
}

// Likewise of a call whose attributes are in range.
inline std::string Complaint(const ffi::AnyBuffer& x, const ffi::AnyBuffer& ids, const ffi::AnyBuffer& w_gate,
                             const ffi::AnyBuffer& shared_w_gate, const CallAttributes& call) {
  const struct {
    const char* name;
    const ffi::AnyBuffer& buffer;
    size_t axes;
  } buffers[] = {{"x", x, 2}, {"expert_ids", ids, 2}, {"w_gate", w_gate, 3}, {"shared w_gate", shared_w_gate, 2}};
  for (const auto& [name, buffer, axes] : buffers) {
    if (buffer.dimensions().size() != axes) {
      return std::string("mok_jax: ") + name + " must have " + std::to_string(axes) + " axes, got " +
             std::to_string(buffer.dimensions().size());
    }
  }
  const int64_t tokens = x.dimensions()[0], experts = w_gate.dimensions()[0], routes = ids.element_count();
  if (tokens % call.virtual_ranks != 0 || experts % call.virtual_ranks != 0) {
    return "mok_jax: tokens and experts must be multiples of virtual_ranks=" + std::to_string(call.virtual_ranks) +
           ", got " + std::to_string(tokens) + " and " + std::to_string(experts);
  }
  if (experts == 0 || x.dimensions()[1] == 0) {
    return "mok_jax: experts and hidden must be at least 1, got " + std::to_string(experts) + " and " +
           std::to_string(x.dimensions()[1]);
  }
  if (routes > kMostRows / call.ranks) {
    return "mok_jax: ranks * routes must be less than 2**31, got " + std::to_string(call.ranks) + " * " +
           std::to_string(routes);
  }
  return "";
}

// tiles: the target's.
inline Decoded Decode(Direction direction, const CallAttributes& call, ffi::RemainingArgs arguments,
                      ffi::RemainingRets results, const Tiles& tiles) {
  Decoded decoded{};
  const bool backward = direction == Direction::kBackward, mxfp8 = call.mxfp8 != 0;
  const bool for_gradient = mxfp8 && backward;  // the input gradient has weights of its own
  if (arguments.size() != (for_gradient ? 22 : backward ? 19 : 10) || results.size() != (backward ? 9 : 10)) {
    decoded.complaint = "mok_jax: this module and mok_jax/ops.py are of different versions; reinstall mok_jax";
    return decoded;
  }
  decoded.complaint = Complaint(call);
  if (!decoded.complaint.empty()) return decoded;
  Buffers buffers(arguments, results);
  decoded.place = static_cast<const int32_t*>(buffers.Argument("place", ffi::DataType::S32, 2));
  const std::optional<ffi::AnyBuffer> d_y = backward ? std::optional(buffers.Argument()) : std::nullopt;
  const ffi::AnyBuffer x = buffers.Argument(), ids = buffers.Argument(), router_weights = buffers.Argument();
  ffi::AnyBuffer weights[6] = {buffers.Argument(), buffers.Argument(), buffers.Argument(),
                               buffers.Argument(), buffers.Argument(), buffers.Argument()};
  ffi::AnyBuffer gradient_weights[3] = {weights[0], weights[1], weights[2]};
  if (for_gradient) {
    for (ffi::AnyBuffer& weight : gradient_weights) weight = buffers.Argument();
  }
  const std::optional<ScalarType> type = TypeOf(x);
  if (!type) return decoded.complaint = "mok_jax: x must be float32, float64 or bfloat16", decoded;
  if (mxfp8 && type != ScalarType::kBFloat16)
    return decoded.complaint = "mok_jax: x must be bfloat16 for MXFP8", decoded;
  decoded.complaint = Complaint(x, ids, weights[0], weights[3], call);
  if (!decoded.complaint.empty()) return decoded;
  const ffi::DataType storage = x.element_type(), index = ffi::DataType::S32;
  const ffi::DataType wide = storage == ffi::DataType::F64 ? storage : ffi::DataType::F32;
  const int64_t s = Bytes(*type), w = storage == ffi::DataType::F64 ? 8 : 4, copies = call.virtual_ranks;

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
  d.peers = call.table != 0;
  d.capacity = Capacity(d.ranks, d.Routes(), d.local_experts, d.row_tile);
  if (d.capacity > kMostRows) {
    decoded.complaint = "mok_jax: padded rows must be less than 2**31, got " + std::to_string(d.capacity);
    return decoded;
  }

  Pass pass{};
  pass.direction = direction;
  pass.context = call.context != 0;
  pass.gate_up_gradient = backward && (call.gradients & kGateUpBit);
  pass.down_gradient = backward && (call.gradients & kDownBit);
  pass.shared_gate_up_gradient = backward && (call.gradients & kSharedGateUpBit);
  pass.shared_down_gradient = backward && (call.gradients & kSharedDownBit);
  pass.mxfp8 = mxfp8;

  const int64_t expert_elements = d.local_experts * d.hidden * d.intermediate;
  const int64_t shared_elements = d.hidden * d.shared_intermediate;
  const int64_t kept = pass.context ? copies * d.macrobatch : 0, kept_tokens = pass.context ? copies * d.tokens : 0;
  const int64_t kept_x = d.Exchanges() ? kept * d.hidden : 0;

  if (d_y) buffers.Check("d_y", *d_y, storage, copies * d.tokens * d.hidden);
  buffers.Check("x", x, storage, copies * d.tokens * d.hidden);
  buffers.Check("expert_ids", ids, index, copies * d.Routes());
  buffers.Check("router_weights", router_weights, wide, copies * d.Routes());
  static constexpr const char* kWeights[6] = {"w_gate",        "w_up",        "w_down",
                                              "shared w_gate", "shared w_up", "shared w_down"};
  for (int i = 0; i < 6; ++i) {
    buffers.Check(kWeights[i], weights[i], storage, i < 3 ? copies * expert_elements : shared_elements);
  }
  for (int i = 0; i < 3; ++i) {
    buffers.Check((std::string(kWeights[i]) + " for the gradient").c_str(), gradient_weights[i], storage,
                  copies * expert_elements);
  }

  Schedule schedule{};
  Context context{};
  void *y = nullptr, *d_x = nullptr, *d_router_weights = nullptr;
  Gradient gradients[6] = {};
  const auto take = [&](const char* name, ffi::DataType of, int64_t elements) {
    return backward ? buffers.Argument(name, of, elements) : buffers.Result(name, of, elements);
  };
  if (!backward) y = buffers.Result("y", storage, copies * d.tokens * d.hidden);
  schedule.row_source = static_cast<int32_t*>(take("row_source", index, copies * d.capacity));
  schedule.row_offset = static_cast<int32_t*>(take("row_offset", index, copies * (d.local_experts + 1)));
  schedule.row_count = static_cast<int32_t*>(take("row_count", index, copies * d.local_experts));
  context.x = take("context x", storage, kept_x);
  context.gate = take("context gate", storage, kept * d.intermediate);
  context.up = take("context up", storage, kept * d.intermediate);
  context.shared_gate = take("context shared gate", storage, kept_tokens * d.shared_intermediate);
  context.shared_up = take("context shared up", storage, kept_tokens * d.shared_intermediate);
  if (backward) {
    d_x = buffers.Result("d_x", storage, copies * d.tokens * d.hidden);
    d_router_weights = buffers.Result("d_router_weights", wide, copies * d.Routes());
    const bool wanted[6] = {pass.gate_up_gradient,        pass.gate_up_gradient,        pass.down_gradient,
                            pass.shared_gate_up_gradient, pass.shared_gate_up_gradient, pass.shared_down_gradient};
    for (int i = 0; i < 6; ++i) {
      const ffi::AnyBuffer result = buffers.Result();
      const ffi::DataType of = result.element_type() == wide ? wide : storage;
      const int64_t elements = wanted[i] ? copies * (i < 3 ? expert_elements : shared_elements) : 0;
      void* values = buffers.Check((std::string("d_") + kWeights[i]).c_str(), result, of, elements);
      gradients[i] = {values, TypeOf(result).value_or(*type)};
    }
  }
  Ring measured;
  const int64_t ring_bytes = LayOutRing(d, pass, tiles, s, w, nullptr, &measured);
  decoded.workspace_bytes = copies * ring_bytes;
  decoded.workspace = static_cast<char*>(buffers.Result("workspace", ffi::DataType::U8, decoded.workspace_bytes));
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
    p.d_y = d_y ? At(d_y->untyped_data(), v * d.tokens * d.hidden, s) : nullptr;
    const auto operands = [&](const ffi::AnyBuffer* of, const ffi::AnyBuffer* of_gradient, int64_t width, int64_t at) {
      const auto operand = [&](const ffi::AnyBuffer& weight, int64_t pitch) {
        return WeightOperand{At(weight.untyped_data(), at, s), pitch};
      };
      return Weights{operand(of[0], width),
                     operand(of[1], width),
                     operand(of[2], d.hidden),
                     operand(of_gradient[0], width),
                     operand(of_gradient[1], width),
                     operand(of_gradient[2], d.hidden),
                     nullptr,
                     nullptr,
                     nullptr};
    };
    p.routed = operands(weights, gradient_weights, d.intermediate, v * expert_elements);
    p.shared = operands(weights + 3, weights + 3, d.shared_intermediate, 0);
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

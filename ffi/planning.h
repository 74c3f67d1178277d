// What Python plans a call with, in the modules of host and CUDA alike: sizes and bytes, computed by
// workspace.h. Included by the two handlers.cc alone.
#ifndef MOK_PLANNING_H_
#define MOK_PLANNING_H_

#include <pybind11/pybind11.h>

#include <cstdint>
#include <vector>

#include "decode.h"
#include "params.h"
#include "tasks.h"
#include "workspace.h"

namespace mok {

namespace py = pybind11;

// One implementation's sizes.
struct Target {
  Tiles (*tiles)(bool portable);
  int64_t row_tile;  // the default
  int64_t units;     // compute units that the default minibatch is planned for
};

struct Plan : Dims {
  Tiles tiles;
};

inline Pass MakePass(bool backward, bool context, int64_t gradients, bool mxfp8) {
  return {backward ? Direction::kBackward : Direction::kForward,
          context,
          (gradients & kGateUpBit) != 0,
          (gradients & kDownBit) != 0,
          (gradients & kSharedGateUpBit) != 0,
          (gradients & kSharedDownBit) != 0,
          mxfp8};
}

// The most compute tasks that any pass over these sizes can have, if all rows are there and nothing is kept.
inline int64_t MostTasks(const Plan& p) {
  const std::vector<int32_t> row_offset(p.local_experts + 1, static_cast<int32_t>(p.capacity));
  return TaskList(p, p.tiles, {Direction::kBackward, false, true, true, true, true, false}, row_offset.data())
      .NumCompute();
}

inline py::capsule Capsule(void* handler) { return py::capsule(handler, "xla._CUSTOM_CALL_TARGET"); }

inline void DefinePlanning(py::module_& module, const Target& target) {
  const auto plan = [target](int64_t tokens, int64_t hidden, int64_t intermediate, int64_t shared_intermediate,
                             int64_t local_experts, int64_t ranks, int64_t top_k, int64_t row_tile, int64_t minibatch,
                             int64_t macrobatch, bool portable, bool forward, bool peers) {
    Plan p{{tokens, hidden, intermediate, shared_intermediate, local_experts, ranks, top_k,
            row_tile > 0 ? row_tile : target.row_tile, minibatch, macrobatch, 0, peers},
           target.tiles(portable)};
    PlanRows(&p, p.tiles, target.units, forward);
    return p;
  };
  module.attr("ROW_TILE") = target.row_tile;
  py::class_<Plan>(module, "Dims", py::module_local())
      .def(py::init(plan), py::kw_only(), py::arg("tokens"), py::arg("hidden"), py::arg("intermediate"),
           py::arg("shared_intermediate"), py::arg("local_experts"), py::arg("ranks"), py::arg("top_k"),
           py::arg("row_tile"), py::arg("minibatch"), py::arg("macrobatch"), py::arg("portable") = false,
           py::arg("forward") = false, py::arg("peers") = false)
      .def_readonly("row_tile", &Plan::row_tile)
      .def_readonly("minibatch", &Plan::minibatch)
      .def_readonly("macrobatch", &Plan::macrobatch)
      .def_readonly("capacity", &Plan::capacity)
      .def_property_readonly("most_tasks", &MostTasks);
  py::class_<Pass>(module, "Pass", py::module_local())
      .def(py::init(&MakePass), py::kw_only(), py::arg("backward"), py::arg("context"), py::arg("gradients"),
           py::arg("mxfp8") = false);
  module.def(
      "workspace_bytes",
      [](const Plan& p, const Pass& pass, int64_t storage_bytes, int64_t wide_bytes) {
        Ring ring;
        return LayOutRing(p, pass, p.tiles, storage_bytes, wide_bytes, nullptr, &ring);
      },
      py::arg("dims"), py::arg("pass_"), py::arg("storage_bytes"), py::arg("wide_bytes"));
  module.def(
      "arena_bytes", [](const Plan& p, int64_t storage_bytes) { return LayOutArena(p, storage_bytes).total; },
      py::arg("dims"), py::arg("storage_bytes"));
}

}  // namespace mok

#endif  // MOK_PLANNING_H_

#include "peers.h"

#include <pybind11/stl.h>

#include <algorithm>
#include <map>
#include <memory>
#include <mutex>
#include <sstream>
#include <stdexcept>
#include <utility>
#include <vector>

#include "../decode.h"

namespace mok::cuda {
namespace {

namespace py = pybind11;

struct Tables {
  std::mutex mutex;
  std::map<std::pair<int64_t, int>, std::unique_ptr<Group>> groups;
};
Tables& AllTables() {
  static auto* tables = new Tables;  // never destroyed: calls may run while the process ends
  return *tables;
}

char* Pointer(uintptr_t address) { return reinterpret_cast<char*>(address); }

void SetTable(int64_t table, int ordinal, int64_t number, int64_t rank, int64_t bytes,
              const std::vector<uintptr_t>& arenas) {
  if (arenas.empty() || arenas.size() > kMaxRanks || rank < 0 || rank >= static_cast<int64_t>(arenas.size())) {
    throw std::runtime_error("a group has 1 to " + std::to_string(kMaxRanks) + " ranks");
  }
  auto group = std::make_unique<Group>();
  *group = {rank, static_cast<int64_t>(arenas.size()), number, bytes, {}};
  std::transform(arenas.begin(), arenas.end(), group->arenas, Pointer);
  Tables& tables = AllTables();
  const std::lock_guard<std::mutex> lock(tables.mutex);
  tables.groups[{table, ordinal}] = std::move(group);
}

void RemoveTable(int64_t table) {
  Tables& tables = AllTables();
  const std::lock_guard<std::mutex> lock(tables.mutex);
  for (auto at = tables.groups.begin(); at != tables.groups.end();) {
    at = at->first.first == table ? tables.groups.erase(at) : std::next(at);
  }
}

std::string Text(const int32_t (&words)[Signature::kWords]) {
  static constexpr const char* kNames[] = {"tokens", "hidden", "intermediate", "shared_intermediate", "local_experts",
                                           "ranks",  "top_k",  "minibatch",    "macrobatch"};
  std::ostringstream text;
  text << (words[0] == static_cast<int32_t>(Direction::kForward) ? "forward" : "backward") << "(dtype "
       << (words[1] == static_cast<int32_t>(ScalarType::kBFloat16) ? "bfloat16" : "float32") << ", context "
       << words[2];
  for (int i = 3; i < Signature::kWords; ++i) text << ", " << kNames[i - 3] << " " << words[i];
  text << ")";
  return text.str();
}

}  // namespace

const Group* FindGroup(int64_t table, int ordinal) {
  Tables& tables = AllTables();
  const std::lock_guard<std::mutex> lock(tables.mutex);
  const auto found = tables.groups.find({table, ordinal});
  return found == tables.groups.end() ? nullptr : found->second.get();
}

std::string Complaint(const Group* group, int64_t ranks, const Params& params) {
  if (group == nullptr) {
    return "mok_jax cuda: this device is in no table of peers; call mok_jax.distributed.initialize for this mesh in "
           "this process, and after finalize again, with the same sizes or after jax.clear_caches()";
  }
  if (group->ranks != ranks) {
    return "mok_jax cuda: this call has " + std::to_string(ranks) + " ranks, its table of peers " +
           std::to_string(group->ranks);
  }
  const int64_t wanted = LayOutArena(params.dims, Bytes(params.type)).total;
  if (wanted > group->bytes) {
    return "mok_jax cuda: this call needs an arena of " + std::to_string(wanted) + " bytes, there are " +
           std::to_string(group->bytes) + "; call mok_jax.distributed.initialize with its sizes";
  }
  return "";
}

std::string Describe(const Report& report) {
  const ExchangeStatus& s = report.exchange;
  std::ostringstream text;
  text << "mok_jax cuda: rank " << s.rank << " of " << s.ranks << " in group " << s.group << ": ";
  const bool waited = (s.missing[0] | s.missing[1] | s.missing[2]) != 0;
  const auto missing = [&text, &s] {
    for (int r = 0; r < s.ranks; ++r) {
      if (s.missing[r / 32] >> r % 32 & 1) text << " " << r;
    }
  };
  const char* phase = s.barrier == 0 ? "before rows travel" : "after rows have travelled";
  const char* dead =
      "; the group is given up: that call's results and those of later ones are NaN on every rank, "
      "until all processes call mok_jax.distributed.finalize and initialize again";
  switch (s.fault) {
    case Fault::kMissing: {
      text << "at the barrier " << phase << " (number " << s.epoch << ") ranks";
      missing();
      text << " did not come within " << static_cast<double>(report.timeout_ns) * 1e-9 << " s for " << Text(s.mine)
           << dead << ". They died, run another program, or are late: raise MoKConfig.barrier_timeout where "
           << "ranks may be further apart, as while one compiles or saves a checkpoint";
      break;
    }
    case Fault::kDiffers:
      text << "rank " << s.peer << " came to the barrier " << phase << " with another call: here " << Text(s.mine)
           << ", there " << Text(s.theirs) << dead << ". Every rank must run the same program with the same shapes";
      break;
    case Fault::kAborted:
      text << "rank " << s.peer << "'s part of the call failed (its process says why); this call's results are NaN";
      break;
    case Fault::kAbandoned:
      if (s.epoch == 0) {
        text << "an earlier call failed" << dead;
        break;
      }
      text << "another rank gave up before this one had passed the barrier " << phase << " (number " << s.epoch
           << ") of " << Text(s.mine);
      if (waited) {
        text << ", to which ranks";
        missing();
        text << " had not come";
      }
      text << dead;
      break;
    case Fault::kOverlaps: text << "two calls use one arena at once" << dead << ". Make one depend on the other"; break;
    case Fault::kMisplaced:
      text << "the device is rank " << s.peer << " of the mesh that runs" << dead
           << ". initialize got a mesh whose devices stand in another order";
      break;
    case Fault::kNone: break;
  }
  return text.str();
}

void DefinePeers(py::module_& module) {
  module.def("set_table", &SetTable, py::arg("table"), py::arg("ordinal"), py::arg("group"), py::arg("rank"),
             py::arg("bytes"), py::arg("arenas"));
  module.def("remove_table", &RemoveTable, py::arg("table"));
}

}  // namespace mok::cuda

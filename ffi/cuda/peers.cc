#include "peers.h"

#include <pybind11/stl.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <condition_variable>
#include <cstring>
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

struct Seat {
  Group group;
  int64_t calls = 0;  // that came to Gather
  int32_t refused = 0;
};
struct Tables {
  std::mutex mutex;
  std::condition_variable changed;
  std::map<std::pair<int64_t, int>, std::unique_ptr<Seat>> seats;
};
Tables& AllTables() {
  static auto* tables = new Tables;  // never destroyed: calls may run while the process ends
  return *tables;
}

// With the lock held.
Seat* SeatOf(const Tables& tables, int64_t table, int ordinal) {
  const auto found = tables.seats.find({table, ordinal});
  return found == tables.seats.end() ? nullptr : found->second.get();
}

char* Pointer(uintptr_t address) { return reinterpret_cast<char*>(address); }

void SetTable(int64_t table, int ordinal, int64_t number, int64_t rank, int64_t bytes,
              const std::vector<uintptr_t>& arenas) {
  if (arenas.empty() || arenas.size() > kMaxRanks || rank < 0 || rank >= static_cast<int64_t>(arenas.size())) {
    throw std::runtime_error("a group has 1 to " + std::to_string(kMaxRanks) + " ranks");
  }
  auto seat = std::make_unique<Seat>();
  seat->group = {rank, static_cast<int64_t>(arenas.size()), number, bytes, {}};
  std::transform(arenas.begin(), arenas.end(), seat->group.arenas, Pointer);
  Tables& tables = AllTables();
  const std::lock_guard<std::mutex> lock(tables.mutex);
  tables.seats[{table, ordinal}] = std::move(seat);
}

void RemoveTable(int64_t table) {
  Tables& tables = AllTables();
  const std::lock_guard<std::mutex> lock(tables.mutex);
  for (auto at = tables.seats.begin(); at != tables.seats.end();) {
    at = at->first.first == table ? tables.seats.erase(at) : std::next(at);
  }
}

std::string Text(const int32_t (&words)[Signature::kWords]) {
  static constexpr const char* kNames[] = {"tokens", "hidden", "intermediate", "shared_intermediate", "local_experts",
                                           "ranks",  "top_k",  "minibatch",    "macrobatch"};
  static constexpr const char* kTypes[] = {"float32", "float64", "bfloat16", "mxfp8"};
  std::ostringstream text;
  text << (words[0] == static_cast<int32_t>(Direction::kForward) ? "forward" : "backward") << "(dtype "
       << kTypes[words[1] & 3] << ", context " << words[2];
  for (int i = 3; i < 12; ++i) text << ", " << kNames[i - 3] << " " << words[i];
  float limit;
  std::memcpy(&limit, &words[12], sizeof(limit));
  if (std::isfinite(limit)) text << ", swiglu_limit " << limit;
  text << ")";
  if (words[13] != 0) text << " after " << words[13] << " calls that it refused";
  return text.str();
}

}  // namespace

const Group* FindGroup(int64_t table, int ordinal) {
  Tables& tables = AllTables();
  const std::lock_guard<std::mutex> lock(tables.mutex);
  const Seat* seat = SeatOf(tables, table, ordinal);
  return seat == nullptr ? nullptr : &seat->group;
}

std::string Gather(int64_t table, int ordinal, double seconds) {
  Tables& tables = AllTables();
  std::unique_lock<std::mutex> lock(tables.mutex);
  Seat* own = SeatOf(tables, table, ordinal);
  if (own == nullptr) return "";
  const int64_t call = ++own->calls;
  const int32_t refused = own->refused;
  tables.changed.notify_all();
  int refusing = -1;
  const auto together = [&] {
    bool all = true;
    for (const auto& [key, seat] : tables.seats) {
      if (key.first != table || seat->group.number != own->group.number || seat->calls >= call) continue;
      all = false;
      if (seat->refused > refused) refusing = key.second;
    }
    return all || refusing >= 0;
  };
  const std::chrono::duration<double> most(std::min(seconds, 1e6));
  tables.changed.wait_for(lock, most, together);
  if (refusing < 0) return "";
  --own->calls;
  return "mok_jax cuda: device " + std::to_string(refusing) +
         " of this process has refused this call or the one before (its own error says why), so this device does too";
}

void CountRefusal(int64_t table, int ordinal) {
  Tables& tables = AllTables();
  const std::lock_guard<std::mutex> lock(tables.mutex);
  Seat* seat = SeatOf(tables, table, ordinal);
  if (seat == nullptr) return;
  ++seat->refused;
  tables.changed.notify_all();
}

int32_t Refused(int64_t table, int ordinal) {
  Tables& tables = AllTables();
  const std::lock_guard<std::mutex> lock(tables.mutex);
  const Seat* seat = SeatOf(tables, table, ordinal);
  return seat == nullptr ? 0 : seat->refused;
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
  // For tests: what handlers.cc does.
  module.def("gather", &Gather, py::arg("table"), py::arg("ordinal"), py::arg("seconds"),
             py::call_guard<py::gil_scoped_release>());
  module.def("count_refusal", &CountRefusal, py::arg("table"), py::arg("ordinal"));
  module.def("refused", &Refused, py::arg("table"), py::arg("ordinal"));
}

}  // namespace mok::cuda

// The tables of peers, their Python face, and what is said of a fault between ranks.
#ifndef MOK_CUDA_PEERS_H_
#define MOK_CUDA_PEERS_H_

#include <pybind11/pybind11.h>

#include <string>

#include "arena.h"
#include "status.h"

namespace mok::cuda {

// What mok_jax/distributed.py enters arenas with, once it has their addresses (memory.h).
void DefinePeers(pybind11::module_& module);

// Empty, or why a call of so many ranks cannot use this group; null: the device is in none.
std::string Complaint(const Group* group, int64_t ranks, const Params& params);

// The message of a report of a fault.
std::string Describe(const Report& report);

}  // namespace mok::cuda

#endif  // MOK_CUDA_PEERS_H_

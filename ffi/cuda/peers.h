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

// Waits for the calls of this process's other devices in the same group, at most so many seconds: from then on no XLA
// thread has memory to map or modules to load before its device comes to the barrier, which may need the devices that
// wait there. On the host, before anything is on the stream. Empty, or an error where another device has refused the
// call; who is late the barrier tells.
std::string Gather(int64_t table, int ordinal, double seconds);

// Counts a call that this device refuses before its peers could hear of it: what its later ones tell them. Both are
// zero for a device without a group.
void CountRefusal(int64_t table, int ordinal);
int32_t Refused(int64_t table, int ordinal);

// Empty, or why a call of so many ranks cannot use this group; null: the device is in none.
std::string Complaint(const Group* group, int64_t ranks, const Params& params);

// The message of a report of a fault.
std::string Describe(const Report& report);

}  // namespace mok::cuda

#endif  // MOK_CUDA_PEERS_H_

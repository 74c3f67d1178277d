// The memory of arenas: the ways in which a process makes it and opens what another process made. Called by
// mok_jax/distributed.py before anything compiles; handlers.cc makes that of NCCL.
//
//   "pointers"  cudaMalloc; peers are devices of this process
//   "ipc"       cudaMalloc; peers open a CUDA IPC handle, on this machine
//   "fabric"    a physical allocation that peers map by its fabric handle, on any machine of the NVLink domain
//   "nccl"      ncclMemAlloc, registered as a window of a communicator that XLA lends
#ifndef MOK_CUDA_MEMORY_H_
#define MOK_CUDA_MEMORY_H_

#include <pybind11/pybind11.h>

#include <cstdint>
#include <string>

namespace mok::cuda {

void DefineMemory(pybind11::module_& module);

// Makes this rank's arena on the current device and registers it as a window of a communicator (ncclComm_t): by all
// of its ranks at once. What comes of it the module's `window` tells. Empty, or an error.
std::string MakeWindow(void* communicator, int ordinal, int64_t bytes);

}  // namespace mok::cuda

#endif  // MOK_CUDA_MEMORY_H_

#include "memory.h"

#include <cuda.h>
#include <dlfcn.h>
#include <pybind11/stl.h>

#include <chrono>
#include <cstring>
#include <map>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

#include "../tasks.h"
#include "current.h"
#include "driver_api.h"

namespace mok::cuda {
namespace {

namespace py = pybind11;

void Check(cudaError_t error, const char* doing) {
  if (error == cudaSuccess) return;
  cudaGetLastError();  // or the next launch on this thread would find it
  throw std::runtime_error(std::string(doing) + ": " + cudaGetErrorString(error));
}

template <typename Function>
auto On(int ordinal, Function function) {
  const Current current(ordinal);
  Check(current.error(), "choosing a device");
  return function();
}

void* Pointer(uintptr_t address) { return reinterpret_cast<void*>(address); }
uintptr_t Address(const void* pointer) { return reinterpret_cast<uintptr_t>(pointer); }

void Clear(void* memory, int64_t bytes) {
  Check(cudaMemset(memory, 0, static_cast<size_t>(bytes)), "clearing an arena");
  Check(cudaDeviceSynchronize(), "clearing an arena");
}

template <typename Handle>
py::bytes Bytes(const Handle& handle) {
  return py::bytes(reinterpret_cast<const char*>(&handle), sizeof(handle));
}
template <typename Handle>
Handle HandleOf(const std::string& bytes) {
  Handle handle;
  if (bytes.size() != sizeof(handle)) throw std::runtime_error("importing an arena: not a handle");
  std::memcpy(&handle, bytes.data(), sizeof(handle));
  return handle;
}

// ---- cudaMalloc, with or without a handle ----

// In whole pages of the device: a handle of less would open to peers whatever shares its page.
uintptr_t Allocate(int, int64_t bytes) {
  void* memory = nullptr;
  const int64_t size = RoundUp(bytes, int64_t{2} << 20);
  Check(cudaMalloc(&memory, static_cast<size_t>(size)), "allocating an arena");
  Clear(memory, size);
  return Address(memory);
}

void Free(int, uintptr_t address) { Check(cudaFree(Pointer(address)), "freeing an arena"); }

py::bytes ExportByIpc(uintptr_t address) {
  cudaIpcMemHandle_t handle;
  Check(cudaIpcGetMemHandle(&handle, Pointer(address)), "exporting an arena");
  return Bytes(handle);
}

uintptr_t ImportByIpc(int, const std::string& bytes, int64_t) {
  void* memory = nullptr;
  Check(cudaIpcOpenMemHandle(&memory, HandleOf<cudaIpcMemHandle_t>(bytes), cudaIpcMemLazyEnablePeerAccess),
        "importing an arena");
  return Address(memory);
}

void CloseIpc(int, uintptr_t address) { Check(cudaIpcCloseMemHandle(Pointer(address)), "closing an arena"); }

// ---- fabric handles ----

using Allocation = CUmemGenericAllocationHandle;

struct Driver {
#define MOK_DRIVER(name) decltype(&::name) name = FindInDriver<decltype(&::name)>(#name)
  MOK_DRIVER(cuDeviceGetAttribute);
  MOK_DRIVER(cuMemGetAllocationGranularity);
  MOK_DRIVER(cuMemCreate);
  MOK_DRIVER(cuMemRelease);
  MOK_DRIVER(cuMemAddressReserve);
  MOK_DRIVER(cuMemAddressFree);
  MOK_DRIVER(cuMemMap);
  MOK_DRIVER(cuMemUnmap);
  MOK_DRIVER(cuMemSetAccess);
  MOK_DRIVER(cuMemExportToShareableHandle);
  MOK_DRIVER(cuMemImportFromShareableHandle);
#undef MOK_DRIVER
  bool complete() const {
    return cuDeviceGetAttribute && cuMemGetAllocationGranularity && cuMemCreate && cuMemRelease &&
           cuMemAddressReserve && cuMemAddressFree && cuMemMap && cuMemUnmap && cuMemSetAccess &&
           cuMemExportToShareableHandle && cuMemImportFromShareableHandle;
  }
};
const Driver& TheDriver() {
  static const Driver driver;
  if (!driver.complete()) throw std::runtime_error("the CUDA driver lacks functions for virtual memory");
  return driver;
}

void Check(CUresult error, const char* doing) {
  if (error != CUDA_SUCCESS) throw std::runtime_error(std::string(doing) + ": " + TextOf(error));
}

CUmemAllocationProp OnDevice(int ordinal) {
  CUmemAllocationProp prop{};
  prop.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  prop.location = {CU_MEM_LOCATION_TYPE_DEVICE, ordinal};
  prop.requestedHandleTypes = CU_MEM_HANDLE_TYPE_FABRIC;
  return prop;
}

size_t Granularity(int ordinal) {
  const CUmemAllocationProp prop = OnDevice(ordinal);
  size_t granularity = 0;
  Check(TheDriver().cuMemGetAllocationGranularity(&granularity, &prop, CU_MEM_ALLOC_GRANULARITY_RECOMMENDED),
        "asking for the size of pages");
  return granularity;
}

struct Mapping {
  Allocation allocation;
  size_t size;
};
struct Mappings {
  std::mutex mutex;
  std::map<uintptr_t, Mapping> at;
};
Mappings& AllMappings() {
  static auto* mappings = new Mappings;
  return *mappings;
}

// Maps an allocation, which it takes over, for these devices.
uintptr_t Map(const Mapping& mapping, const std::vector<int>& devices) {
  const Driver& driver = TheDriver();
  CUdeviceptr address = 0;
  bool mapped = false;
  try {
    Check(driver.cuMemAddressReserve(&address, mapping.size, 0, 0, 0), "reserving addresses for an arena");
    Check(driver.cuMemMap(address, mapping.size, 0, mapping.allocation, 0), "mapping an arena");
    mapped = true;
    std::vector<CUmemAccessDesc> access;
    for (const int device : devices) {
      access.push_back({{CU_MEM_LOCATION_TYPE_DEVICE, device}, CU_MEM_ACCESS_FLAGS_PROT_READWRITE});
    }
    Check(driver.cuMemSetAccess(address, mapping.size, access.data(), access.size()), "opening an arena to devices");
  } catch (...) {
    if (mapped) driver.cuMemUnmap(address, mapping.size);
    if (address != 0) driver.cuMemAddressFree(address, mapping.size);
    driver.cuMemRelease(mapping.allocation);
    throw;
  }
  Mappings& all = AllMappings();
  const std::lock_guard<std::mutex> lock(all.mutex);
  all.at[address] = mapping;
  return address;
}

void Unmap(int, uintptr_t address) {
  Mappings& all = AllMappings();
  const std::lock_guard<std::mutex> lock(all.mutex);
  const auto found = all.at.find(address);
  if (found == all.at.end()) throw std::runtime_error("freeing an arena: there is none at this address");
  const Mapping mapping = found->second;
  all.at.erase(found);
  const Driver& driver = TheDriver();
  Check(driver.cuMemUnmap(address, mapping.size), "unmapping an arena");
  Check(driver.cuMemAddressFree(address, mapping.size), "freeing an arena's addresses");
  Check(driver.cuMemRelease(mapping.allocation), "freeing an arena");
}

uintptr_t AllocateForFabric(int ordinal, int64_t bytes) {
  const Driver& driver = TheDriver();
  int supported = 0, count = 0;
  Check(driver.cuDeviceGetAttribute(&supported, CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_FABRIC_SUPPORTED, ordinal),
        "asking for fabric handles");
  if (supported == 0) throw std::runtime_error("the device has no fabric handles");
  Check(cudaGetDeviceCount(&count), "counting the devices");
  std::vector<int> devices{ordinal};  // and those of this process that can reach it
  for (int peer = 0; peer < count; ++peer) {
    int can = 0;
    if (peer != ordinal) Check(cudaDeviceCanAccessPeer(&can, peer, ordinal), "asking for peer access");
    if (can != 0) devices.push_back(peer);
  }
  const size_t size = static_cast<size_t>(RoundUp(bytes, static_cast<int64_t>(Granularity(ordinal))));
  const CUmemAllocationProp prop = OnDevice(ordinal);
  Allocation allocation{};
  Check(driver.cuMemCreate(&allocation, size, &prop, 0), "allocating an arena with a fabric handle");
  const uintptr_t address = Map({allocation, size}, devices);
  Clear(Pointer(address), static_cast<int64_t>(size));
  return address;
}

py::bytes ExportToFabric(uintptr_t address) {
  Mappings& all = AllMappings();
  const std::lock_guard<std::mutex> lock(all.mutex);
  CUmemFabricHandle handle;
  Check(TheDriver().cuMemExportToShareableHandle(&handle, all.at.at(address).allocation, CU_MEM_HANDLE_TYPE_FABRIC, 0),
        "exporting an arena to the fabric");
  return Bytes(handle);
}

uintptr_t ImportFromFabric(int ordinal, const std::string& bytes, int64_t size) {
  auto handle = HandleOf<CUmemFabricHandle>(bytes);
  Allocation allocation{};
  Check(TheDriver().cuMemImportFromShareableHandle(&allocation, &handle, CU_MEM_HANDLE_TYPE_FABRIC),
        "importing an arena from the fabric");
  const int64_t rounded = RoundUp(size, static_cast<int64_t>(Granularity(ordinal)));
  return Map({allocation, static_cast<size_t>(rounded)}, {ordinal});
}

// ---- NCCL ----

// Of the library that XLA has loaded. Source: nccl.h and nccl_device/core.h of NCCL 2.29.
struct Nccl {
  using Comm = void*;
  using Window = void*;
  template <typename... Arguments>
  using Function = int (*)(Arguments...);

  Nccl() {
    void* library = dlopen("libnccl.so.2", RTLD_LAZY | RTLD_NOLOAD);
    if (library == nullptr) {
      reason = "XLA has not loaded NCCL";
      return;
    }
    const auto look = [library](auto* function, const char* name) {
      void* symbol = dlsym(library, name);
      std::memcpy(function, &symbol, sizeof(symbol));
      return symbol != nullptr;
    };
    const auto find = [&](auto* function, const char* name) {
      if (!look(function, name) && reason.empty()) reason = Lacks(name, "2.27");
    };
    find(&allocate, "ncclMemAlloc");
    find(&free, "ncclMemFree");
    find(&enroll, "ncclCommWindowRegister");
    find(&withdraw, "ncclCommWindowDeregister");
    find(&rank, "ncclCommUserRank");
    find(&count, "ncclCommCount");
    find(&progress, "ncclCommGetAsyncError");
    find(&text, "ncclGetErrorString");
    look(&peer, "ncclGetPeerDevicePointer");
  }

  static std::string Lacks(const char* name, const char* release) {
    return std::string("NCCL lacks ") + name + "; it needs " + release + " or newer";
  }

  // Of a call on a communicator: XLA may have made it one whose calls return before they are done.
  int Await(Comm communicator, int error) const {
    constexpr int kInProgress = 7;
    while (error == kInProgress) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
      if (const int failed = progress(communicator, &error)) return failed;
    }
    return error;
  }

  std::string reason;
  Function<void**, size_t> allocate = nullptr;
  Function<void*> free = nullptr;
  Function<Comm, void*, size_t, Window*, int> enroll = nullptr;
  Function<Comm, Window> withdraw = nullptr;
  Function<Comm, int*> rank = nullptr;
  Function<Comm, int*> count = nullptr;
  Function<Window, size_t, int, void**> peer = nullptr;  // of 2.29.2; where there are peers
  Function<Comm, int*> progress = nullptr;
  const char* (*text)(int) = nullptr;
};

struct Lent {
  Nccl::Comm communicator;
  Nccl::Window window;
  int rank;
  std::vector<uintptr_t> arenas;  // by rank of the communicator
};
struct AllLent {
  std::mutex mutex;
  std::map<uintptr_t, Lent> at;  // by this rank's own address
  std::map<int, uintptr_t> last;
};
AllLent& EveryLent() {
  static auto* lent = new AllLent;
  return *lent;
}

// The last window made on a device: address, rank in the communicator, every rank's arena as this device sees it.
std::tuple<uintptr_t, int, std::vector<uintptr_t>> LastWindow(int ordinal) {
  AllLent& all = EveryLent();
  const std::lock_guard<std::mutex> lock(all.mutex);
  const auto found = all.last.find(ordinal);
  if (found == all.last.end()) throw std::runtime_error("there is no window on this device");
  const Lent& lent = all.at.at(found->second);
  return {found->second, lent.rank, lent.arenas};
}

void FreeWindow(int, uintptr_t address) {
  AllLent& all = EveryLent();
  const std::lock_guard<std::mutex> lock(all.mutex);
  const Nccl nccl;
  const Lent lent = all.at.at(address);
  all.at.erase(address);
  int error = nccl.Await(lent.communicator, nccl.withdraw(lent.communicator, lent.window));
  if (error == 0) error = nccl.free(Pointer(address));
  if (error != 0) throw std::runtime_error(std::string("freeing a window: ") + nccl.text(error));
}

uintptr_t RefuseToAllocate(int, int64_t) { throw std::runtime_error("NCCL's memory is made with its window"); }
py::bytes NoHandle(uintptr_t) { return {}; }
uintptr_t RefuseToImport(int, const std::string&, int64_t) {
  throw std::runtime_error("an arena of this way has no handle");
}

// ---- the ways ----

struct Way {
  uintptr_t (*allocate)(int ordinal, int64_t bytes);
  void (*free)(int ordinal, uintptr_t address);
  py::bytes (*exporting)(uintptr_t address);
  uintptr_t (*importing)(int ordinal, const std::string& handle, int64_t bytes);
  void (*close)(int ordinal, uintptr_t address);
};

const Way& WayOf(const std::string& name) {
  static const std::map<std::string, Way> ways = {
      {"pointers", {Allocate, Free, NoHandle, RefuseToImport, Free}},
      {"ipc", {Allocate, Free, ExportByIpc, ImportByIpc, CloseIpc}},
      {"fabric", {AllocateForFabric, Unmap, ExportToFabric, ImportFromFabric, Unmap}},
      {"nccl", {RefuseToAllocate, FreeWindow, NoHandle, RefuseToImport, FreeWindow}}};
  const auto found = ways.find(name);
  if (found == ways.end()) throw std::invalid_argument("no way to make an arena: " + name);
  return found->second;
}

// Lets a device reach another one of this process. Empty, or why it cannot.
std::string Reach(int ordinal, int peer) {
  if (ordinal == peer) return "";
  int can = 0;
  Check(cudaDeviceCanAccessPeer(&can, ordinal, peer), "asking for peer access");
  if (can == 0) return "device " + std::to_string(ordinal) + " cannot access device " + std::to_string(peer);
  return On(ordinal, [peer]() -> std::string {
    const cudaError_t error = cudaDeviceEnablePeerAccess(peer, 0);
    if (error != cudaErrorPeerAccessAlreadyEnabled) Check(error, "enabling peer access");
    cudaGetLastError();
    return "";
  });
}

}  // namespace

std::string MakeWindow(void* communicator, int ordinal, int64_t bytes) {
  const Nccl nccl;
  if (!nccl.reason.empty()) return nccl.reason;
  const auto text = [&nccl](const char* doing, int error) { return std::string(doing) + ": " + nccl.text(error); };
  int ranks = 0;
  if (const int error = nccl.count(communicator, &ranks)) return text("ncclCommCount", error);
  // Before anything is made; the library is the same on every rank, or NCCL would have refused the communicator.
  if (ranks > 1 && nccl.peer == nullptr) return Nccl::Lacks("ncclGetPeerDevicePointer", "2.29.2");
  constexpr int kSymmetric = 1;  // NCCL_WIN_COLL_SYMMETRIC
  const size_t size = static_cast<size_t>(RoundUp(bytes, int64_t{2} << 20));
  Lent lent{communicator, nullptr, 0, {}};
  void* memory = nullptr;
  if (const int error = nccl.allocate(&memory, size)) return text("ncclMemAlloc", error);
  const auto finish = [&]() -> std::string {
    if (cudaMemset(memory, 0, size) != cudaSuccess || cudaDeviceSynchronize() != cudaSuccess) {
      return std::string("clearing a window: ") + cudaGetErrorString(cudaGetLastError());
    }
    if (const int error = nccl.Await(communicator, nccl.enroll(communicator, memory, size, &lent.window, kSymmetric))) {
      return text("ncclCommWindowRegister", error);
    }
    if (lent.window == nullptr) return "NCCL has no symmetric windows over these devices";
    if (const int error = nccl.rank(communicator, &lent.rank)) return text("ncclCommUserRank", error);
    for (int rank = 0; rank < ranks; ++rank) {
      void* arena = memory;
      const int error = rank == lent.rank ? 0 : nccl.peer(lent.window, 0, rank, &arena);
      if (error != 0) return text("ncclGetPeerDevicePointer", error);
      if (arena == nullptr) return "rank " + std::to_string(rank) + " of NCCL is not reached by loads and stores";
      lent.arenas.push_back(Address(arena));
    }
    return "";
  };
  const std::string error = finish();
  if (!error.empty()) {  // what comes of giving it back matters less than why
    if (lent.window != nullptr) nccl.Await(communicator, nccl.withdraw(communicator, lent.window));
    nccl.free(memory);
    return error;
  }
  AllLent& all = EveryLent();
  const std::lock_guard<std::mutex> lock(all.mutex);
  all.last[ordinal] = Address(memory);
  all.at[Address(memory)] = lent;
  return "";
}

void DefineMemory(py::module_& module) {
  module.def(
      "arena_allocate",
      [](const std::string& way, int ordinal, int64_t bytes) {
        return On(ordinal, [&] { return WayOf(way).allocate(ordinal, bytes); });
      },
      py::arg("way"), py::arg("ordinal"), py::arg("bytes"));
  module.def(
      "arena_free",
      [](const std::string& way, int ordinal, uintptr_t address) {
        On(ordinal, [&] { WayOf(way).free(ordinal, address); });
      },
      py::arg("way"), py::arg("ordinal"), py::arg("address"));
  module.def(
      "arena_export",
      [](const std::string& way, int ordinal, uintptr_t address) {
        return On(ordinal, [&] { return WayOf(way).exporting(address); });
      },
      py::arg("way"), py::arg("ordinal"), py::arg("address"));
  module.def(
      "arena_import",
      [](const std::string& way, int ordinal, const std::string& handle, int64_t bytes) {
        return On(ordinal, [&] { return WayOf(way).importing(ordinal, handle, bytes); });
      },
      py::arg("way"), py::arg("ordinal"), py::arg("handle"), py::arg("bytes"));
  module.def(
      "arena_close",
      [](const std::string& way, int ordinal, uintptr_t address) {
        On(ordinal, [&] { WayOf(way).close(ordinal, address); });
      },
      py::arg("way"), py::arg("ordinal"), py::arg("address"));
  module.def("window", &LastWindow, py::arg("ordinal"));
  module.def("reach", &Reach, py::arg("ordinal"), py::arg("peer"));
  module.def(
      "synchronize",
      [](int ordinal) {
        On(ordinal, [] {
          const py::gil_scoped_release release;
          Check(cudaDeviceSynchronize(), "waiting for a device");
        });
      },
      py::arg("ordinal"));
}

}  // namespace mok::cuda

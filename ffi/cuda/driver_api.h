// Functions of the CUDA driver, found at run time: nothing links against it, so that importing needs no driver.
#ifndef MOK_CUDA_DRIVER_API_H_
#define MOK_CUDA_DRIVER_API_H_

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <string>

namespace mok::cuda {

// Null where the driver lacks it.
template <typename Function>
Function FindInDriver(const char* name) {
  void* found = nullptr;
  cudaDriverEntryPointQueryResult result;
  const cudaError_t error = cudaGetDriverEntryPointByVersion(name, &found, 12030, cudaEnableDefault, &result);
  return error == cudaSuccess && result == cudaDriverEntryPointSuccess ? reinterpret_cast<Function>(found) : nullptr;
}

inline std::string TextOf(CUresult error) {
  static const auto text_of = FindInDriver<CUresult (*)(CUresult, const char**)>("cuGetErrorString");
  const char* text = nullptr;
  if (text_of == nullptr || text_of(error, &text) != CUDA_SUCCESS) text = "an unknown error";
  return std::string(text) + " (" + std::to_string(error) + ")";
}

}  // namespace mok::cuda

#endif  // MOK_CUDA_DRIVER_API_H_

// Makes a device current on this thread for a while.
#ifndef MOK_CUDA_CURRENT_H_
#define MOK_CUDA_CURRENT_H_

#include <cuda.h>
#include <cuda_runtime_api.h>

#include "driver_api.h"

namespace mok::cuda {

// What was current comes back, be it nothing: a thread without a context says that it is on device 0, and to choose
// that one on the way out would make a context there, of some hundred MB for each process that has another GPU.
class Current {
 public:
  explicit Current(int ordinal) {
    int device = 0;
    error_ = cudaGetDevice(&device);
    if (error_ != cudaSuccess) return;
    static const auto get = FindInDriver<decltype(&::cuCtxGetCurrent)>("cuCtxGetCurrent");
    if (get == nullptr || Set() == nullptr) {
      error_ = cudaErrorCallRequiresNewerDriver;
      return;
    }
    if (get(&before_) != CUDA_SUCCESS) before_ = nullptr;
    if (before_ != nullptr && device == ordinal) return;
    error_ = cudaSetDevice(ordinal);
    changed_ = error_ == cudaSuccess;
  }
  ~Current() {
    if (changed_) Set()(before_);
  }
  Current(const Current&) = delete;
  Current& operator=(const Current&) = delete;

  cudaError_t error() const { return error_; }

 private:
  using SetContext = decltype(&::cuCtxSetCurrent);
  static SetContext Set() {
    static const auto set = FindInDriver<SetContext>("cuCtxSetCurrent");
    return set;
  }

  CUcontext before_ = nullptr;
  bool changed_ = false;
  cudaError_t error_;
};

}  // namespace mok::cuda

#endif  // MOK_CUDA_CURRENT_H_

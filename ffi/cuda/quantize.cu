// Before the megakernel, MXFP8 only: x and dy as this rank and its peers pull them. Moves memory, 16 bytes a
// thread where the sizes allow.
#include "kernels.h"
#include "mxfp8.cuh"

namespace mok::cuda {
namespace {

constexpr int kThreads = 256;

// A quad for each block of 32 of a row. rounded: null, or the rows rounded to MXFP8. aborted: null, or the call's
// flag: a rank that missed its peers writes nothing more.
template <bool whole>
__global__ void __launch_bounds__(kThreads)
    Quantize(const BFloat16* from, int64_t rows, int64_t n, uint8_t* to, BFloat16* rounded, const int32_t* aborted) {
  if (aborted != nullptr && *aborted != 0) return;
  const int64_t blocks = CeilDiv(n, kMxBlock), thread = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  const int64_t row = thread / 4 / blocks, column = thread / 4 % blocks * kMxBlock + thread % 4 * 8;
  const int columns = row < rows ? static_cast<int>(Max(0, Min(8, n - column))) : 0;
  Vector<BFloat16> v;
  v.Load<whole>(from + row * n + column, columns);
  const uint8_t scale = QuadScale(v);
  const uint2 codes = Encode(v, scale);
  uint8_t* to_row = to + row * MxRowBytes(n);
  if (columns > 0) *reinterpret_cast<uint2*>(to_row + MxValueAt(column)) = codes;
  if (row < rows && thread % 4 == 0) to_row[MxScaleAt(column)] = scale;
  if (rounded == nullptr) return;
  RoundToMx<whole>(v, columns);
  v.Store<whole>(rounded + row * n + column, columns);
}

}  // namespace

const char* LoadQuantize() { return Load(Quantize<true>, Quantize<false>); }

const char* LaunchQuantize(const void* from, int64_t rows, int64_t n, void* to, void* rounded, const int32_t* aborted,
                           cudaStream_t stream) {
  if (to == nullptr || rows == 0) return nullptr;
  const auto kernel = n % 8 == 0 ? Quantize<true> : Quantize<false>;
  const int64_t threads = rows * CeilDiv(n, kMxBlock) * 4;
  kernel<<<static_cast<unsigned>(CeilDiv(threads, kThreads)), kThreads, 0, stream>>>(
      static_cast<const BFloat16*>(from), rows, n, static_cast<uint8_t*>(to), static_cast<BFloat16*>(rounded), aborted);
  return Launched();
}

}  // namespace mok::cuda

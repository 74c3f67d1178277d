// What the stages do to rows: per-thread memory for them, rows by index, and the two loops over a row's elements
// whose order fixes the bits.
#ifndef MOK_HOST_VECTORS_H_
#define MOK_HOST_VECTORS_H_

#include <Eigen/Core>
#include <cstdint>
#include <cstring>
#include <memory>
#include <new>

#include "../task.h"

namespace mok::host {

// Per-thread memory that only grows; kept for the thread's life.
enum class Slot { kLeft, kRight, kFirst, kSecond, kConverted, kRow, kCount };
template <typename T>
T* Scratch(Slot slot, int64_t elements) {
  struct Free {
    void operator()(void* p) const { ::operator delete(p, std::align_val_t{64}); }
  };
  struct Memory {
    std::unique_ptr<void, Free> at;
    int64_t bytes = 0;
  };
  thread_local Memory memory[static_cast<int>(Slot::kCount)];
  Memory& m = memory[static_cast<int>(slot)];
  const int64_t bytes = elements * static_cast<int64_t>(sizeof(T));
  if (m.bytes < bytes) {
    m.at.reset();
    m.bytes = 0;
    m.at.reset(::operator new(bytes, std::align_val_t{64}));
    m.bytes = bytes;
  }
  return static_cast<T*>(m.at.get());
}

// Row i is row index[i] / divide of base, or row i where there is no index.
template <typename S>
struct Rows {
  const S* base;
  int64_t pitch;
  const int32_t* index = nullptr;
  int64_t divide = 1;

  const S* operator[](int64_t i) const { return base + (index == nullptr ? i : index[i] / divide) * pitch; }
};

// Vectorised over whole chunks only, so that an element's bits never depend on its address.
template <typename Wide>
void Sigmoid(const Wide* in, Wide* out, int64_t n) {
  constexpr int64_t kChunk = 32;
  for (int64_t at = 0; at < n; at += kChunk) {
    const int64_t count = Min(kChunk, n - at);
    Eigen::Array<Wide, kChunk, 1> v = Eigen::Array<Wide, kChunk, 1>::Zero();
    std::memcpy(v.data(), in + at, count * sizeof(Wide));
    v = (Wide(1) + (-v).exp()).inverse();
    std::memcpy(out + at, v.data(), count * sizeof(Wide));
  }
}

// Sum of products in eight interleaved sums: a fixed order that a compiler can vectorise.
template <typename Wide>
Wide Dot(const Wide* a, const Wide* b, int64_t n) {
  constexpr int kLanes = 8;
  Wide sums[kLanes] = {};
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    for (int lane = 0; lane < kLanes; ++lane) sums[lane] += a[i + lane] * b[i + lane];
  }
  for (int lane = 0; i < n; ++i, ++lane) sums[lane] += a[i] * b[i];
  return ((sums[0] + sums[4]) + (sums[2] + sums[6])) + ((sums[1] + sums[5]) + (sums[3] + sums[7]));
}

// The scale of a block of at most kMxBlock values in any dtype that ToFloat takes.
template <typename S>
uint8_t MxScaleOf(const S* block, int64_t n) {
  uint32_t amax = 0;
  for (int64_t i = 0; i < n; ++i) amax = Max(amax, FloatBits(ToFloat(block[i])) & 0x7fffffffu);
  return MxScale(amax);
}

// A row as it travels, and back. bfloat16 holds every value exactly, except that 2^128 and more is infinite.
inline void ToMx(const BFloat16* row, int64_t n, uint8_t* to) {
  for (int64_t at = 0; at < n; at += kMxBlock) {
    const int64_t end = Min(at + kMxBlock, n);
    const uint8_t scale = MxScaleOf(row + at, end - at);
    to[MxScaleAt(at)] = scale;
    for (int64_t i = at; i < end; ++i) to[MxValueAt(i)] = ToE4M3(ToFloat(row[i]) * MxInverse(scale));
  }
}
inline void FromMx(const uint8_t* from, int64_t n, BFloat16* row) {
  for (int64_t i = 0; i < n; ++i) {
    row[i] = ToBFloat16(E4M3ToFloat(from[MxValueAt(i)]) * MxScaleToFloat(from[MxScaleAt(i)]));
  }
}

// A row to MXFP8 and back in place.
inline void RoundToMx(BFloat16* row, int64_t n) {
  for (int64_t at = 0; at < n; at += kMxChunk) {
    uint8_t chunk[kMxChunkBytes];
    const int64_t count = Min(kMxChunk, n - at);
    ToMx(row + at, count, chunk);
    FromMx(chunk, count, row + at);
  }
}

}  // namespace mok::host

#endif  // MOK_HOST_VECTORS_H_

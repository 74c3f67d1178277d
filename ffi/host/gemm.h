// Single-threaded matrix products on Eigen. Its results depend on the shapes alone, never on threads.
// Called by stages.h.
#ifndef MOK_HOST_GEMM_H_
#define MOK_HOST_GEMM_H_

// Small products take the same path as large ones: Eigen's other one rounds by a buffer's alignment.
#define EIGEN_GEMM_TO_COEFFBASED_THRESHOLD 1
#include <Eigen/Core>
#include <cstdint>

namespace mok::host {

enum class Transpose { kNo, kYes };

// C (+)= op(A) op(B), all row-major with row pitches; op(A) is [m, k], op(B) [k, n].
template <typename Wide>
void Gemm(const Wide* a, int64_t a_pitch, Transpose a_transpose, const Wide* b, int64_t b_pitch, Transpose b_transpose,
          Wide* c, int64_t c_pitch, int64_t m, int64_t n, int64_t k, bool accumulate) {
  using Matrix = Eigen::Matrix<Wide, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
  using Pitch = Eigen::OuterStride<>;
  using In = Eigen::Map<const Matrix, 0, Pitch>;
  Eigen::Map<Matrix, 0, Pitch> out(c, m, n, Pitch(c_pitch));
  if (!accumulate) out.setZero();
  if (k == 0) return;
  const bool ta = a_transpose == Transpose::kYes, tb = b_transpose == Transpose::kYes;
  const In lhs(a, ta ? k : m, ta ? m : k, Pitch(a_pitch));
  const In rhs(b, tb ? n : k, tb ? k : n, Pitch(b_pitch));
  if (ta && tb) {
    out.noalias() += lhs.transpose() * rhs.transpose();
  } else if (ta) {
    out.noalias() += lhs.transpose() * rhs;
  } else if (tb) {
    out.noalias() += lhs * rhs.transpose();
  } else {
    out.noalias() += lhs * rhs;
  }
}

}  // namespace mok::host

#endif  // MOK_HOST_GEMM_H_

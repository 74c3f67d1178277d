// From every rank's expert ids to this rank's rows: count, pad, place. Called by job.h and by tests.
#ifndef MOK_HOST_SCHEDULE_H_
#define MOK_HOST_SCHEDULE_H_

#include <algorithm>
#include <cstdint>
#include <vector>

#include "../params.h"
#include "../tasks.h"

namespace mok::host {

// ids: one [T, K] array for each rank. Rows are expert-major; within a segment they are taken in turn
// from the ranks, beginning with this one, each rank's routes in ascending order, so that pulls spread
// over all links and no two ranks begin at the same peer. Every entry of the schedule is written.
inline void BuildSchedule(const Dims& d, int64_t rank, const std::vector<const int32_t*>& ids, const Schedule& out) {
  const int64_t experts = d.local_experts, ranks = d.ranks, routes = d.Routes(), first = rank * experts;
  std::vector<int64_t> counts(experts * ranks, 0);  // [expert, rank in turn]
  const auto turn = [&](int64_t source) { return (source - rank + ranks) % ranks; };
  for (int64_t source = 0; source < ranks; ++source) {
    for (int64_t route = 0; route < routes; ++route) {
      const int64_t expert = ids[source][route] - first;
      if (expert >= 0 && expert < experts) ++counts[expert * ranks + turn(source)];
    }
  }
  out.row_offset[0] = 0;
  for (int64_t e = 0; e < experts; ++e) {
    int64_t count = 0;
    for (int64_t r = 0; r < ranks; ++r) count += counts[e * ranks + r];
    out.row_count[e] = static_cast<int32_t>(count);
    out.row_offset[e + 1] = static_cast<int32_t>(out.row_offset[e] + RoundUp(count, d.row_tile));
  }
  std::fill_n(out.row_source, d.capacity, -1);
  std::vector<int64_t> placed(experts * ranks, 0);
  for (int64_t source = 0; source < ranks; ++source) {
    for (int64_t route = 0; route < routes; ++route) {
      const int64_t expert = ids[source][route] - first;
      if (expert < 0 || expert >= experts) continue;
      const int64_t mine = turn(source), round = placed[expert * ranks + mine]++;
      int64_t row = out.row_offset[expert];
      for (int64_t r = 0; r < ranks; ++r) {
        const int64_t count = counts[expert * ranks + r];
        row += Min(count, round) + (r < mine && count > round ? 1 : 0);
      }
      out.row_source[row] = static_cast<int32_t>(source * routes + route);
    }
  }
}

}  // namespace mok::host

#endif  // MOK_HOST_SCHEDULE_H_

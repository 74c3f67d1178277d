// One call over all ranks that this process holds: schedule, tasks, epilogue, worked off by any number
// of threads. Called by handlers.cc once every rank has arrived. The same driver serves real ranks (CPU
// devices of one process) and virtual ones.
#ifndef MOK_HOST_JOB_H_
#define MOK_HOST_JOB_H_

#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <memory>
#include <mutex>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "../op_names.h"
#include "../params.h"
#include "../tasks.h"
#include "../workspace.h"
#include "schedule.h"
#include "stages.h"

#ifdef __SSE__
#include <xmmintrin.h>
#endif

namespace mok::host {

// Denormals are kept, whatever the calling thread's mode: bits must not depend on the thread.
class KeepDenormals {
 public:
#ifdef __SSE__
  KeepDenormals() : saved_(_mm_getcsr()) { _mm_setcsr(saved_ & ~0x8040u); }
  ~KeepDenormals() { _mm_setcsr(saved_); }

 private:
  unsigned saved_;
#endif
};

// Hands a rank's tasks out. Not thread-safe: Job locks.
class TaskQueue {
 public:
  TaskQueue(const Params& params, std::optional<uint32_t> random_order)
      : list_(params.dims, kTiles, params.pass, params.schedule.row_offset), counters_(params.ring.counters) {
    std::memset(counters_, 0, list_.NumCounters() * sizeof(int32_t));
    if (random_order) {
      random_.emplace(*random_order);
      for (int64_t i = 0; i < list_.NumCommunication(); ++i) waiting_.push_back(list_.Communication(i));
      for (int64_t i = 0; i < list_.NumCompute(); ++i) waiting_.push_back(list_.Compute(i));
    } else {
      communication_end_ = list_.NumCommunication();
      compute_end_ = list_.NumCompute();
    }
  }

  const TaskList& list() const { return list_; }
  bool Empty() const { return waiting_.empty() && communication_ == communication_end_ && compute_ == compute_end_; }

  // The next task whose counters are full, communication first.
  std::optional<Task> Take() {
    if (random_) return TakeRandom();
    if (communication_ < communication_end_) {
      const Task task = list_.Communication(communication_);
      if (Ready(task)) return ++communication_, task;
    }
    if (compute_ < compute_end_) {
      const Task task = list_.Compute(compute_);
      if (Ready(task)) return ++compute_, task;
    }
    return std::nullopt;
  }

  void Done(const Task& task) {
    if (task.signal >= 0) ++counters_[task.signal];
  }

  // For the error when nothing can run: each head and the first counter that it lacks.
  std::string Stuck() const {
    std::string text;
    if (communication_ < communication_end_) text += Describe(list_.Communication(communication_));
    if (compute_ < compute_end_) text += Describe(list_.Compute(compute_));
    if (!waiting_.empty()) text += Describe(waiting_.front());
    return text;
  }

  // Empty, or what differs: at the end every counter equals its exact total.
  std::string CheckTotals() const {
    for (int64_t i = 0; i < list_.NumCounters(); ++i) {
      if (counters_[i] != list_.Expected(i)) {
        return "counter " + std::to_string(i) + " ended at " + std::to_string(counters_[i]) + ", expected " +
               std::to_string(list_.Expected(i));
      }
    }
    return "";
  }

 private:
  bool Ready(const Task& task) const { return Missing(task) < 0; }

  int64_t Missing(const Task& task) const {
    for (int w = 0; w < Task::kWaits; ++w) {
      const Wait& wait = task.waits[w];
      for (int64_t i = wait.counter; i < wait.counter + wait.count; ++i) {
        if (counters_[i] != wait.target) return i;
      }
    }
    return -1;
  }

  std::string Describe(const Task& task) const {
    const int64_t counter = Missing(task);
    return std::string("; ") + Name(task.op) + " of block " + std::to_string(task.block) + " tile " +
           std::to_string(task.tile) + " waits for counter " + std::to_string(counter) + ", found " +
           std::to_string(counter < 0 ? 0 : counters_[counter]);
  }

  std::optional<Task> TakeRandom() {
    std::vector<size_t> ready;
    for (size_t i = 0; i < waiting_.size(); ++i) {
      if (Ready(waiting_[i])) ready.push_back(i);
    }
    if (ready.empty()) return std::nullopt;
    const size_t chosen = ready[(*random_)() % ready.size()];
    const Task task = waiting_[chosen];
    waiting_[chosen] = waiting_.back();
    waiting_.pop_back();
    return task;
  }

  TaskList list_;
  int32_t* counters_;
  int64_t communication_ = 0, communication_end_ = 0, compute_ = 0, compute_end_ = 0;
  std::optional<std::mt19937> random_;
  std::vector<Task> waiting_;
};

// `ranks`: every rank of the group, in order. Any number of threads call Work(), one calls Run().
template <typename S>
class Job {
 public:
  Job(std::vector<Params> ranks, std::optional<uint32_t> random_order)
      : ranks_(std::move(ranks)), random_order_(random_order) {
    for (const Params& p : ranks_) {
      peers_.push_back(PeerOf(p));
      ids_.push_back(p.ids);
    }
    for (const Params& p : ranks_) stages_.emplace_back(p, peers_);
    if (ranks_[0].pass.direction == Direction::kForward) {
      Enter(Phase::kSchedule, num_ranks());
    } else {
      EnterStage();
    }
  }

  // Takes part until nothing is left. A worker only ever waits for a task that another worker is
  // executing at that moment, never for one that is yet to start, so it may run on a shared pool.
  void Work() {
    const KeepDenormals denormals;
    std::unique_lock<std::mutex> lock(mutex_);
    while (phase_ != Phase::kDone) {
      if (const std::optional<Item> item = Take()) {
        ++running_;
        lock.unlock();
        std::string failure;
        try {
          Execute(*item);
        } catch (const std::exception& error) {
          failure = error.what();
        }
        lock.lock();
        --running_;
        if (!failure.empty()) Fail(failure);
        if (item->phase == Phase::kTasks) queues_[item->rank].Done(item->task);
        changed_.notify_all();
      } else if (running_ > 0) {
        changed_.wait(lock);
      } else {
        Advance();
        changed_.notify_all();
      }
    }
  }

  // As Work, then waits for the others' last tasks: no buffer is in use any more. Empty: all went well.
  std::string Run() {
    Work();
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [this] { return running_ == 0; });
    return error_;
  }

 private:
  enum class Phase { kSchedule, kStage, kTasks, kEpilogue, kDone };
  static constexpr int64_t kItemTokens = 64;  // of kStage and kEpilogue

  struct Item {
    Phase phase;
    int64_t rank;
    int64_t index;  // kStage, kEpilogue: which tokens
    Task task;      // kTasks
  };

  int64_t num_ranks() const { return static_cast<int64_t>(ranks_.size()); }
  int64_t TokenItems() const { return CeilDiv(ranks_[0].dims.tokens, kItemTokens) * num_ranks(); }

  void Enter(Phase phase, int64_t items) {
    phase_ = phase;
    next_ = 0;
    items_ = items;
  }

  void EnterStage() {
    if (!ranks_[0].pass.mxfp8) return EnterTasks();
    Enter(Phase::kStage, TokenItems());
  }

  void EnterTasks() {
    Enter(Phase::kTasks, 0);
    for (int64_t r = 0; r < num_ranks(); ++r) {
      const auto seed = random_order_ ? std::optional<uint32_t>(*random_order_ + r) : std::nullopt;
      queues_.emplace_back(ranks_[r], seed);
    }
  }

  void Fail(const std::string& what) {
    if (error_.empty()) error_ = what;
    phase_ = Phase::kDone;
  }

  std::optional<Item> Take() {
    if (phase_ == Phase::kTasks) {
      // In turn over the ranks: a task of one may wait for nothing but its own rank's counters.
      for (int64_t i = 0; i < num_ranks(); ++i) {
        const int64_t rank = (next_ + i) % num_ranks();
        if (const std::optional<Task> task = queues_[rank].Take()) {
          next_ = rank + 1;
          return Item{phase_, rank, 0, *task};
        }
      }
      return std::nullopt;
    }
    if (next_ >= items_) return std::nullopt;
    const int64_t item = next_++;
    return Item{phase_, item % num_ranks(), item / num_ranks(), {}};
  }

  void Execute(const Item& item) {
    const Stages<S>& stages = stages_[item.rank];
    const int64_t begin = item.index * kItemTokens, end = Min(begin + kItemTokens, ranks_[item.rank].dims.tokens);
    switch (item.phase) {
      case Phase::kSchedule:
        BuildSchedule(ranks_[item.rank].dims, item.rank, ids_, ranks_[item.rank].schedule);
        stages.ClearUnusedContext();
        return;
      case Phase::kTasks: return stages.Run(queues_[item.rank].list(), item.task);
      case Phase::kStage: return stages.Stage(begin, end);
      case Phase::kEpilogue: return stages.Epilogue(begin, end);
      case Phase::kDone: return;
    }
  }

  // Nothing to take and nobody running: the phase is over, or its tasks are stuck.
  void Advance() {
    switch (phase_) {
      case Phase::kSchedule: return EnterStage();
      case Phase::kStage: return EnterTasks();
      case Phase::kTasks:
        for (int64_t r = 0; r < num_ranks(); ++r) {
          const std::string where = "mok_jax host: rank " + std::to_string(r);
          if (!queues_[r].Empty()) return Fail(where + " has tasks left but none can start" + queues_[r].Stuck());
          const std::string wrong = queues_[r].CheckTotals();
          if (!wrong.empty()) return Fail(where + ": " + wrong);
        }
        return Enter(Phase::kEpilogue, TokenItems());
      case Phase::kEpilogue: phase_ = Phase::kDone; return;
      case Phase::kDone: return;
    }
  }

  const std::vector<Params> ranks_;
  const std::optional<uint32_t> random_order_;
  std::vector<Peer> peers_;
  std::vector<const int32_t*> ids_;
  std::vector<Stages<S>> stages_;
  std::vector<TaskQueue> queues_;

  std::mutex mutex_;  // guards all below
  std::condition_variable changed_;
  Phase phase_ = Phase::kDone;
  int64_t next_ = 0, items_ = 0;
  int running_ = 0;
  std::string error_;
};

}  // namespace mok::host

#endif  // MOK_HOST_JOB_H_

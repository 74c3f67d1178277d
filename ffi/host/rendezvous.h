// Where the ranks of one process meet before a call: each registers and leaves, the last one computes
// for all. No thread ever waits here. A watchdog reports the ranks that never came. Called by
// handlers.cc; knows neither XLA nor what a call does.
#ifndef MOK_HOST_RENDEZVOUS_H_
#define MOK_HOST_RENDEZVOUS_H_

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstdio>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

namespace mok::host {

// Which call: one launch of a program, one group of ranks in it, one call site of the program. A site's
// address is unique where a tag would not be: an inner jit used twice makes two sites with equal
// attributes.
struct CallKey {
  int64_t run;
  int64_t group;
  const void* site;
  bool operator<(const CallKey& other) const {
    return std::tie(run, group, site) < std::tie(other.run, other.group, other.site);
  }
};

// Completes one rank's call; empty: success. Runs on a thread of its own: XLA continues the program
// inside it and may block there in a collective.
using Completion = std::function<void(const std::string& error)>;

inline void CompleteAll(std::vector<Completion> completions, const std::string& error) {
  for (Completion& complete : completions) {
    std::thread([complete = std::move(complete), error] { complete(error); }).detach();
  }
}

template <typename Arrival>
class Rendezvous {
 public:
  struct Full {
    std::vector<Arrival> arrivals;  // by rank
    std::vector<Completion> completions;
  };

  // The process's only one; never destroyed, since its watchdog may outlive main.
  static Rendezvous& Get() {
    static auto* instance = new Rendezvous;
    return *instance;
  }

  // Registers rank `rank` of `ranks`. The last to arrive gets everything, the others nothing; whoever
  // gets it must call CompleteAll. A rank's executions of one site arrive in order, so its n-th meets
  // the other ranks' n-th: the queue of a key holds the calls that some rank has not reached yet.
  std::optional<Full> Arrive(const CallKey& key, int64_t rank, int64_t ranks, const char* phase, double timeout_seconds,
                             Arrival arrival, Completion completion) {
    std::unique_lock<std::mutex> lock(mutex_);
    std::deque<Call>& calls = calls_[key];
    size_t index = 0;
    while (index < calls.size() && calls[index].completions[rank]) ++index;
    if (index == calls.size()) {
      Call call;
      call.arrivals.resize(ranks);
      call.completions.resize(ranks);
      call.phase = phase;
      call.timeout_seconds = timeout_seconds;
      // At most some years: beyond that the nanoseconds of the clock would overflow.
      timeout_seconds = std::min(timeout_seconds, 1e8);
      call.deadline =
          Clock::now() + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(timeout_seconds));
      calls.push_back(std::move(call));
    }
    Call& call = calls[index];
    call.arrivals[rank] = std::move(arrival);
    call.completions[rank] = std::move(completion);
    if (++call.arrived < ranks) {
      StartWatchdog();
      watch_.notify_one();
      return std::nullopt;
    }
    // Every rank reached the calls before this one first, so they are gone and this is the front.
    Full full{std::move(call.arrivals), std::move(call.completions)};
    calls.erase(calls.begin() + static_cast<std::ptrdiff_t>(index));
    if (calls.empty()) calls_.erase(key);
    return full;
  }

 private:
  using Clock = std::chrono::steady_clock;

  struct Call {
    std::vector<Arrival> arrivals;
    std::vector<Completion> completions;  // empty: that rank has not arrived
    int64_t arrived = 0;
    const char* phase = "";
    double timeout_seconds = 0;
    Clock::time_point deadline;
  };

  void StartWatchdog() {
    if (watching_) return;
    watching_ = true;
    std::thread([this] { Watch(); }).detach();
  }

  [[noreturn]] void Watch() {
    std::unique_lock<std::mutex> lock(mutex_);
    while (true) {
      std::optional<Clock::time_point> next;
      const Clock::time_point now = Clock::now();
      for (auto at = calls_.begin(); at != calls_.end();) {
        std::deque<Call>& calls = at->second;
        for (size_t i = 0; i < calls.size();) {
          if (calls[i].deadline <= now) {
            GiveUp(at->first, calls[i]);
            calls.erase(calls.begin() + static_cast<std::ptrdiff_t>(i));
          } else {
            if (!next || calls[i].deadline < *next) next = calls[i].deadline;
            ++i;
          }
        }
        at = calls.empty() ? calls_.erase(at) : std::next(at);
      }
      if (next) {
        watch_.wait_until(lock, *next);
      } else {
        watch_.wait(lock);
      }
    }
  }

  static void GiveUp(const CallKey& key, Call& call) {
    std::string seen, missing;
    std::vector<Completion> arrived;
    for (size_t rank = 0; rank < call.completions.size(); ++rank) {
      std::string& list = call.completions[rank] ? seen : missing;
      list += (list.empty() ? "" : ", ") + std::to_string(rank);
      if (call.completions[rank]) arrived.push_back(std::move(call.completions[rank]));
    }
    char head[256];
    std::snprintf(head, sizeof(head), "mok_jax: %s of group %lld waited %g s for its ranks", call.phase,
                  static_cast<long long>(key.group), call.timeout_seconds);
    const std::string text = std::string(head) + ": ranks seen [" + seen + "], missing [" + missing +
                             "]; every rank must reach the call, and on CPU await each step";
    std::fprintf(stderr, "%s\n", text.c_str());
    std::fflush(stderr);
    CompleteAll(std::move(arrived), text);
  }

  std::mutex mutex_;  // guards all below
  std::condition_variable watch_;
  std::map<CallKey, std::deque<Call>> calls_;
  bool watching_ = false;
};

}  // namespace mok::host

#endif  // MOK_HOST_RENDEZVOUS_H_

// What error messages call the tasks of tasks.h.
#ifndef MOK_OP_NAMES_H_
#define MOK_OP_NAMES_H_

#include "tasks.h"

namespace mok {

inline const char* Name(Op op) {
  static constexpr const char* kNames[] = {"none",
                                           "dispatch",
                                           "combine",
                                           "reverse-combine",
                                           "reverse-dispatch",
                                           "gate-up",
                                           "down",
                                           "dgrad-down",
                                           "dgrad-gate-up",
                                           "weight-gradient-gate-up",
                                           "weight-gradient-down",
                                           "shared gate-up",
                                           "shared down",
                                           "shared dgrad-down",
                                           "shared dgrad-gate-up",
                                           "shared weight-gradient-gate-up",
                                           "shared weight-gradient-down"};
  return kNames[static_cast<int>(op)];
}

}  // namespace mok

#endif  // MOK_OP_NAMES_H_

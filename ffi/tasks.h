// The task list: which tile is computed when, and on which counts it waits. Host and CUDA execute the
// same list. Knows neither XLA nor CUDA.
//
// Two sequences, communication and compute, each in one global order in which a producer stands before
// its consumers, so that a worker may take the next task of either and wait for its counters. A task is
// decoded from its index by arithmetic and binary searches, never by a scan.
//
// Within a macrobatch the second stage of about a minibatch stands after the next one's first stage, and so on, so that
// a stage seldom waits for the tail of the one before. It is of whole experts, whose weights are then read once, unless
// experts are larger than that: results of the first rows must not wait for the last ones'.
//
// Words: a block is row_tile rows of one expert. Block b's predecessor is the block that held its ring
// rows before: of the next macrobatch in the forward pass, which runs last to first, of the previous
// one in the backward pass.
//
// Counters; each is used for one purpose once a call and starts at zero.
//   name                 arrives (how often)                          who waits
//   x_ready[block]       dispatch, reverse-combine (parts)            gate-up; without replay dgrad-down
//   hidden_ready[block]  gate-up (column tiles of I)                  down; in the backward pass dgrad-down
//   out_ready[block]     down, dgrad-gate-up (tiles of H)             combine, reverse-dispatch; whatever
//                                                                     overwrites the block's ring rows
//   out_consumed[block]  combine, reverse-dispatch (parts)            down, dgrad-down of the successor
//   d_hidden_ready[block] dgrad-down (its column tiles of I)          dgrad-gate-up, weight gradients
//   gradient_done[segment] weight gradients (tiles)                   whatever overwrites the expert's ring
//                                                                     rows; the carry's next reader or writer
//   shared_hidden_ready[token block], shared_d_hidden_ready[token block]: as above, for the shared expert
// The caller zeroes them before the first task.
#ifndef MOK_TASKS_H_
#define MOK_TASKS_H_

#include <cstdint>

#include "params.h"
#include "task.h"

namespace mok {

// Where each kind of counter begins; sized for any routing.
struct CounterLayout {
  Index x_ready, hidden_ready, out_ready, out_consumed, d_hidden_ready, gradient_done;
  Index shared_hidden_ready, shared_d_hidden_ready, total;

  MOK_HD explicit CounterLayout(const Dims& d) {
    const Index blocks = d.capacity / d.row_tile;
    const Index macrobatches = Max(1, CeilDiv(d.capacity, d.macrobatch));
    const Index token_blocks = CeilDiv(d.tokens, d.row_tile);
    x_ready = 0;
    hidden_ready = x_ready + blocks;
    out_ready = hidden_ready + blocks;
    out_consumed = out_ready + blocks;
    d_hidden_ready = out_consumed + blocks;
    gradient_done = d_hidden_ready + blocks;
    shared_hidden_ready = gradient_done + d.local_experts + macrobatches;
    shared_d_hidden_ready = shared_hidden_ready + token_blocks;
    total = shared_d_hidden_ready + token_blocks;
  }
};

// Whether x and dy come to the ring before they are multiplied.
MOK_HD inline bool Pulls(const Dims& dims, const Tiles& tiles, const Pass& pass) {
  return dims.Exchanges() || !tiles.gathers || pass.mxfp8;
}

class TaskList {
 public:
  // row_offset: Schedule::row_offset; read by every call.
  MOK_HD TaskList(const Dims& dims, const Tiles& tiles, const Pass& pass, const int32_t* row_offset)
      : context_(pass.context),
        row_offset_(row_offset),
        at_(dims),
        row_tile_(static_cast<Index>(dims.row_tile)),
        macrobatch_rows_(static_cast<Index>(dims.macrobatch)),
        local_experts_(static_cast<Index>(dims.local_experts)) {
    pushes_ = dims.Pushes();
    pulls_ = mok::Pulls(dims, tiles, pass);
    const bool whole = tiles.communication_values == 0;
    const int64_t moved = whole ? dims.row_tile : Min(tiles.communication_values / dims.hidden, kMostMovedRows);
    part_rows_ = static_cast<Index>(Max(1, Min(moved, dims.row_tile)));
    parts_ = CeilDiv(row_tile_, part_rows_);
    group_ = tiles.group;
    backward_ = pass.direction == Direction::kBackward;
    blocks_ = row_offset[dims.local_experts] / dims.row_tile;
    macrobatch_blocks_ = dims.macrobatch / dims.row_tile;
    macrobatches_ = Max(1, CeilDiv(blocks_, macrobatch_blocks_));
    minibatch_blocks_ = dims.minibatch / dims.row_tile;
    step_experts_ = dims.minibatch / Max(dims.Routes() / dims.local_experts, dims.row_tile);
    width_tiles_ = CeilDiv(dims.intermediate, tiles.gate_up_columns);
    d_width_tiles_ = CeilDiv(dims.intermediate, tiles.d_hidden_columns);
    hidden_tiles_ = CeilDiv(dims.hidden, tiles.hidden_columns);
    if (pass.gate_up_gradient) gate_up_gradient_ = GridOf(dims.hidden, dims.intermediate, tiles.gate_up_gradient);
    if (pass.down_gradient) down_gradient_ = GridOf(dims.intermediate, dims.hidden, tiles.down_gradient);
    gradient_tiles_ = gate_up_gradient_.Tiles() + down_gradient_.Tiles();
    const bool shared = dims.shared_intermediate > 0;
    token_blocks_ = shared ? CeilDiv(dims.tokens, dims.row_tile) : 0;
    shared_width_tiles_ = CeilDiv(dims.shared_intermediate, tiles.gate_up_columns);
    shared_d_width_tiles_ = CeilDiv(dims.shared_intermediate, tiles.d_hidden_columns);
    if (shared && pass.shared_gate_up_gradient) {
      shared_gate_up_gradient_ = GridOf(dims.hidden, dims.shared_intermediate, tiles.gate_up_gradient);
    }
    if (shared && pass.shared_down_gradient) {
      shared_down_gradient_ = GridOf(dims.shared_intermediate, dims.hidden, tiles.down_gradient);
    }
  }

  MOK_HD Index NumCommunication() const { return ((pulls_ ? 1 : 0) + (pushes_ ? 1 : 0)) * blocks_ * parts_; }
  MOK_HD Index NumCompute() const { return NumShared() + Before(macrobatches_); }
  MOK_HD Index NumCounters() const { return at_.total; }
  MOK_HD Index Macrobatches() const { return macrobatches_; }
  MOK_HD Index DHiddenTiles() const { return d_width_tiles_; }  // partial sums of a row's <dh', h>
  // Of a block's rows communication task `tile` moves the tile-th PartRows(), as far as there are so many.
  MOK_HD Index PartRows() const { return part_rows_; }
  MOK_HD Index MinibatchTasks() const { return minibatch_blocks_ * parts_; }  // communication tasks of one kind
  MOK_HD bool Pulls() const { return pulls_; }
  MOK_HD Index RowOffset(Index expert) const { return row_offset_[expert]; }
  // Whether gate and up of a macrobatch are computed in this pass (always in the forward pass).
  MOK_HD bool Computes(Index macrobatch) const { return !backward_ || macrobatch > 0 || !context_; }

  MOK_HD Task Communication(Index index) const {
    Task task = backward_ ? BackwardCommunication(index / parts_) : ForwardCommunication(index / parts_);
    task.tile = index % parts_;
    return task;
  }

  // Tasks [begin, end) of one stage, of one expert's blocks in a step or of one weight's gradient. Who decodes
  // task after task keeps the run that he is in: a task's place in it is a few divisions.
  struct Run {
    Index begin = 0, end = 0;
    Task task;                               // what all of them have in common; block: the first one
    Index rows = 0, columns = 0, group = 0;  // of their grid of tiles; see Walk
  };
  MOK_HD Run RunOf(Index index) const {
    Run run = index < NumShared() ? SharedRun(index) : RoutedRun(index);
    const Index groups = Max(1, (run.rows + group_ / 2) / group_) * (pushes_ ? Haste(run) : 1);
    run.group = RoundUp(CeilDiv(run.rows, groups), 2);
    return run;
  }

  MOK_HD Task Compute(Index index) const { return Compute(RunOf(index), index); }
  MOK_HD Task Compute(const Run& run, Index index) const {
    Task task = run.task;
    if (task.op == Op::kNone) return task;
    Index row, column;
    Walk(run, index - run.begin, &row, &column);
    switch (task.op) {
      case Op::kGradGateUp:
      case Op::kGradDown:
      case Op::kSharedGradGateUp:
      case Op::kSharedGradDown: task.tile = row * run.columns + column; return task;
      default: break;
    }
    task.block += row;
    task.tile = column;
    WaitAndSignal(&task);
    return task;
  }

  // A counter's total when every task is done.
  MOK_HD Index Expected(Index counter) const {
    if (counter < at_.hidden_ready) {
      return pulls_ && counter - at_.x_ready < blocks_ ? parts_ : 0;
    }
    if (counter < at_.out_ready) {
      const Index block = counter - at_.hidden_ready;
      return block < blocks_ && Computes(block / macrobatch_blocks_) ? width_tiles_ : 0;
    }
    if (counter < at_.out_consumed) return counter - at_.out_ready < blocks_ ? hidden_tiles_ : 0;
    if (counter < at_.d_hidden_ready) return pushes_ && counter - at_.out_consumed < blocks_ ? parts_ : 0;
    if (counter < at_.gradient_done) {
      return backward_ && counter - at_.d_hidden_ready < blocks_ ? d_width_tiles_ : 0;
    }
    if (counter < at_.shared_hidden_ready) {
      if (!backward_) return 0;
      for (Index m = 0; m < macrobatches_; ++m) {
        const Index slot = counter - at_.gradient_done - m;
        if (slot >= FirstExpert(m) && slot <= LastExpert(m)) return gradient_tiles_;
      }
      return 0;
    }
    if (counter < at_.shared_d_hidden_ready) {
      return counter - at_.shared_hidden_ready < token_blocks_ && Computes(0) ? shared_width_tiles_ : 0;
    }
    return backward_ && counter - at_.shared_d_hidden_ready < token_blocks_ ? shared_d_width_tiles_ : 0;
  }

  // The expert whose segment holds this row.
  MOK_HD Index ExpertOf(Index row) const {
    Index low = 0, high = local_experts_ - 1;  // the first expert that ends after the row
    while (low < high) {
      const Index middle = (low + high) / 2;
      if (row_offset_[middle + 1] > row) high = middle;
      else low = middle + 1;
    }
    return low;
  }

 private:
  // Tiles of a matrix.
  struct Grid {
    Index rows = 0, columns = 0;
    MOK_HD Index Tiles() const { return rows * columns; }
  };
  MOK_HD static Grid GridOf(Index rows, Index columns, const Tiles::Shape& tile) {
    return {static_cast<Index>(CeilDiv(rows, tile.rows)), static_cast<Index>(CeilDiv(columns, tile.columns))};
  }

  MOK_HD Index BlocksIn(Index macrobatch) const {
    return Min(macrobatch_blocks_, blocks_ - macrobatch * macrobatch_blocks_);
  }

  // Experts of a macrobatch. An expert without rows belongs to the macrobatch where it would stand, so
  // that somebody stores its zero gradient. Expert e of macrobatch m has segment number e + m: each
  // boundary that no expert straddles leaves one number unused, a task that does nothing.
  MOK_HD Index FirstExpert(Index macrobatch) const {
    return macrobatch == 0 ? 0 : ExpertOf(macrobatch * macrobatch_rows_);
  }
  MOK_HD bool Straddles(Index macrobatch) const {  // into this macrobatch from the one before
    return macrobatch > 0 && row_offset_[FirstExpert(macrobatch)] < macrobatch * macrobatch_rows_;
  }
  MOK_HD Index LastExpert(Index macrobatch) const {
    if (macrobatch == macrobatches_ - 1) return local_experts_ - 1;
    return FirstExpert(macrobatch + 1) - (Straddles(macrobatch + 1) ? 0 : 1);
  }

  // Routed compute tasks before the step-th macrobatch that runs.
  MOK_HD Index Before(Index step) const {
    if (step == 0) return 0;
    if (!backward_) {
      const Index blocks = blocks_ - (macrobatches_ - step) * macrobatch_blocks_;
      return blocks * (width_tiles_ + hidden_tiles_);
    }
    const Index blocks = Min(step * macrobatch_blocks_, blocks_);
    const Index replayed = Computes(0) ? blocks : blocks - BlocksIn(0);
    const Index segments = step == macrobatches_ ? local_experts_ + macrobatches_ - 1 : FirstExpert(step) + step;
    return blocks * (d_width_tiles_ + hidden_tiles_) + replayed * width_tiles_ + segments * gradient_tiles_;
  }

  // The stages that a block of this macrobatch goes through: gate-up, dgrad-down and what makes the result;
  // those it skips have no tiles. A stage runs `lag` steps behind the first one.
  struct Stages {
    Index tiles[3];
    Index lag[3];
  };
  MOK_HD Stages StagesOf(Index macrobatch) const {
    const bool computes = Computes(macrobatch);
    return {{computes ? width_tiles_ : 0, backward_ ? d_width_tiles_ : 0, hidden_tiles_},
            {0, computes ? 1 : 0, (computes ? 1 : 0) + (backward_ ? 1 : 0)}};
  }

  // Steps of a stage in a macrobatch, whose first expert is given, and blocks of it before the step-th one.
  MOK_HD Index StepsIn(Index macrobatch, Index first_expert) const {
    if (step_experts_ == 0) return CeilDiv(BlocksIn(macrobatch), minibatch_blocks_);
    return CeilDiv(LastExpert(macrobatch) - first_expert + 1, step_experts_);
  }
  MOK_HD Index BlocksBefore(Index macrobatch, Index first_expert, Index step) const {
    Index blocks = Max(step, 0) * minibatch_blocks_;
    if (step_experts_ > 0) {
      const Index expert = Min(first_expert + Max(step, 0) * step_experts_, local_experts_);
      blocks = Max(row_offset_[expert] / row_tile_ - macrobatch * macrobatch_blocks_, 0);
    }
    return Min(blocks, BlocksIn(macrobatch));
  }

  // How much smaller a run's groups are where rows travel between ranks. Small ones where a pass begins, so that its
  // products wait for few rows, and where a forward pass ends, so that few results are left to push. (A backward pass
  // ends with weight gradients.)
  MOK_HD Index Haste(const Run& run) const {
    const Index first = backward_ ? 0 : (macrobatches_ - 1) * macrobatch_blocks_, block = run.task.block;
    switch (run.task.op) {
      case Op::kGateUp:
      case Op::kDgradDown: return block == first ? 2 : 1;
      case Op::kDown: return block + run.rows == BlocksIn(0) ? 4 : 1;
      default: return 1;
    }
  }

  // Tasks of a macrobatch before its step-th step. Step t runs step t - lag of each stage.
  MOK_HD Index BeforeStep(const Stages& stages, Index macrobatch, Index first_expert, Index step) const {
    Index tasks = 0;
    for (int s = 0; s < 3; ++s) {
      tasks += stages.tiles[s] * BlocksBefore(macrobatch, first_expert, step - stages.lag[s]);
    }
    return tasks;
  }

  MOK_HD Run RoutedRun(Index index) const {
    Index before = NumShared();
    // The last macrobatch whose first task is not after this one. In the forward pass `step` counts
    // macrobatches in the order they run.
    Index low = 0, high = macrobatches_ - 1;
    while (low < high) {
      const Index middle = (low + high + 1) / 2;
      if (before + Before(middle) <= index) low = middle;
      else high = middle - 1;
    }
    before += Before(low);
    const Index macrobatch = backward_ ? low : macrobatches_ - 1 - low;
    const Stages stages = StagesOf(macrobatch);
    const Index first_expert = FirstExpert(macrobatch);
    const Index steps = StepsIn(macrobatch, first_expert) + stages.lag[2];
    const Index in_blocks = BlocksIn(macrobatch) * (stages.tiles[0] + stages.tiles[1] + stages.tiles[2]);
    if (index - before >= in_blocks) return GradientRun(macrobatch, before + in_blocks, index);
    low = 0, high = steps - 1;  // the last step whose first task is not after this one
    while (low < high) {
      const Index middle = (low + high + 1) / 2;
      if (before + BeforeStep(stages, macrobatch, first_expert, middle) <= index) low = middle;
      else high = middle - 1;
    }
    before += BeforeStep(stages, macrobatch, first_expert, low);
    Run run;
    run.task.macrobatch = macrobatch;
    Index first = 0, here = 0;
    bool found = false;
    for (int s = 0; s < 3; ++s) {
      if (found) continue;
      run.task.op = s == 0 ? Op::kGateUp : s == 1 ? Op::kDgradDown : backward_ ? Op::kDgradGateUp : Op::kDown;
      run.columns = stages.tiles[s];
      first = BlocksBefore(macrobatch, first_expert, low - stages.lag[s]);
      here = BlocksBefore(macrobatch, first_expert, low - stages.lag[s] + 1) - first;
      found = index - before < here * run.columns;
      if (!found) before += here * run.columns;
    }
    // Expert by expert. Each block has as many tasks, so this one stands where those of the block at that place would.
    first += macrobatch * macrobatch_blocks_;
    const Index expert = ExpertOf((first + (index - before) / run.columns) * row_tile_);
    run.task.expert = expert;
    run.task.block = Max(first, row_offset_[expert] / row_tile_);
    run.rows = Min(first + here, row_offset_[expert + 1] / row_tile_) - run.task.block;
    run.begin = before + (run.task.block - first) * run.columns;
    run.end = run.begin + run.rows * run.columns;
    return run;
  }

  // first: of the macrobatch's tasks of this kind.
  MOK_HD Run GradientRun(Index macrobatch, Index first, Index index) const {
    const Index segment = (index - first) / gradient_tiles_, expert = FirstExpert(macrobatch) + segment;
    Run run;
    Task& task = run.task;
    task.macrobatch = macrobatch;
    task.expert = expert;
    run.begin = first + segment * gradient_tiles_;
    run.end = run.begin + gradient_tiles_;
    if (expert > LastExpert(macrobatch)) return run;
    SetGradient(&run, index, Op::kGradGateUp, Op::kGradDown, gate_up_gradient_, down_gradient_);
    const Index start = macrobatch * macrobatch_rows_, end = start + macrobatch_rows_;
    const Index first_row = Max(row_offset_[expert], start), last_row = Min(row_offset_[expert + 1], end);
    task.block = first_row / row_tile_;
    task.blocks = Max(0, (last_row - first_row) / row_tile_);
    task.carry_in = row_offset_[expert] < start && row_offset_[expert + 1] > start;
    task.carry_out = row_offset_[expert + 1] > end;
    task.WaitFor<0>(at_.d_hidden_ready + task.block, d_width_tiles_, task.blocks);
    if (task.carry_in) {
      task.WaitFor<1>(at_.gradient_done + expert + macrobatch - 1, gradient_tiles_);
    } else if (task.carry_out) {
      // There is one carry: the expert that came in last, here or earlier, must have read it.
      Index last = macrobatch;
      while (last > 0 && !Straddles(last)) --last;
      if (last > 0) task.WaitFor<1>(at_.gradient_done + FirstExpert(last) + last, gradient_tiles_);
    }
    task.signal = at_.gradient_done + expert + macrobatch;
    return run;
  }

  // Of the two gradients, gate-up's tasks stand first.
  MOK_HD static void SetGradient(Run* run, Index index, Op gate_up_op, Op down_op, const Grid& gate_up,
                                 const Grid& down) {
    const bool is_down = index >= run->begin + gate_up.Tiles();
    const Grid& grid = is_down ? down : gate_up;
    run->task.op = is_down ? down_op : gate_up_op;
    run->begin += is_down ? gate_up.Tiles() : 0;
    run->rows = grid.rows;
    run->columns = grid.columns;
    run->end = run->begin + grid.Tiles();
  }

  // What depends on a task's block.
  MOK_HD void WaitAndSignal(Task* task) const {
    const Index block = task->block;
    switch (task->op) {
      case Op::kGateUp:
        WaitForX(task);
        task->signal = at_.hidden_ready + block;
        return;
      case Op::kDgradDown:
        if (Computes(task->macrobatch)) task->WaitFor<0>(at_.hidden_ready + block, width_tiles_);
        else if (pulls_) WaitForX(task);
        // Its partial sums overwrite those that the predecessor's push adds up.
        WaitForPush(task);
        task->signal = at_.d_hidden_ready + block;
        return;
      case Op::kDown:
        task->WaitFor<0>(at_.hidden_ready + block, width_tiles_);
        WaitForPush(task);
        task->signal = at_.out_ready + block;
        return;
      case Op::kDgradGateUp:  // dgrad-down has waited for the push
        task->WaitFor<0>(at_.d_hidden_ready + block, d_width_tiles_);
        task->signal = at_.out_ready + block;
        return;
      case Op::kSharedGateUp: task->signal = at_.shared_hidden_ready + block; return;
      case Op::kSharedDgradDown:
        if (Computes(0)) task->WaitFor<0>(at_.shared_hidden_ready + block, shared_width_tiles_);
        task->signal = at_.shared_d_hidden_ready + block;
        return;
      case Op::kSharedDown: return task->WaitFor<0>(at_.shared_hidden_ready + block, shared_width_tiles_);
      case Op::kSharedDgradGateUp: return task->WaitFor<0>(at_.shared_d_hidden_ready + block, shared_d_width_tiles_);
      default: return;
    }
  }

  MOK_HD Task ForwardCommunication(Index index) const {
    // Dispatch of the last macrobatch; then, for each earlier one, its dispatch alternating with the
    // combine of the one after it; then the combine of macrobatch 0.
    const Index last = BlocksIn(macrobatches_ - 1);
    if (!pushes_) {
      const Index step = index < last ? 0 : 1 + (index - last) / macrobatch_blocks_;
      const Index before = step == 0 ? 0 : last + (step - 1) * macrobatch_blocks_;
      return Dispatch((macrobatches_ - 1 - step) * macrobatch_blocks_ + index - before);
    }
    if (index < last) return Dispatch((macrobatches_ - 1) * macrobatch_blocks_ + index);
    index -= last;
    Index macrobatch = macrobatches_ - 2;  // to dispatch
    Index combines = last;                 // of the macrobatch after it
    if (macrobatch >= 0 && index >= combines + macrobatch_blocks_) {
      index -= combines + macrobatch_blocks_;
      combines = macrobatch_blocks_;
      const Index skip = Min(index / (2 * macrobatch_blocks_), macrobatch);
      index -= skip * 2 * macrobatch_blocks_;
      macrobatch -= 1 + skip;
    }
    const Index first_combine = (macrobatch + 1) * macrobatch_blocks_;
    if (macrobatch < 0) return Combine(first_combine + index);
    const Index first_dispatch = macrobatch * macrobatch_blocks_;
    if (index >= 2 * combines) return Dispatch(first_dispatch + index - combines);
    return index % 2 == 0 ? Combine(first_combine + index / 2) : Dispatch(first_dispatch + index / 2);
  }

  MOK_HD Task BackwardCommunication(Index index) const {
    if (!pushes_) return Dispatch(index);
    const Index macrobatch = index / (2 * macrobatch_blocks_);
    index -= macrobatch * 2 * macrobatch_blocks_;
    const Index first = macrobatch * macrobatch_blocks_, blocks = BlocksIn(macrobatch);
    return index < blocks ? Dispatch(first + index) : Combine(first + index - blocks);
  }

  // Pulls a block's rows into the ring.
  MOK_HD Task Dispatch(Index block) const {
    Task task;
    task.macrobatch = block / macrobatch_blocks_;
    Place(&task, backward_ ? Op::kReverseCombine : Op::kDispatch, block, 0);
    WaitForRing(&task);
    task.signal = at_.x_ready + block;
    return task;
  }

  // Pushes a block's result rows to the other ranks that they came from.
  MOK_HD Task Combine(Index block) const {
    Task task;
    task.macrobatch = block / macrobatch_blocks_;
    Place(&task, backward_ ? Op::kReverseDispatch : Op::kCombine, block, 0);
    task.WaitFor<0>(at_.out_ready + block, hidden_tiles_);
    task.signal = at_.out_consumed + block;
    return task;
  }

  // The block's x (and dy) rows are there; what is gathered instead only needs its ring rows free.
  MOK_HD void WaitForX(Task* task) const {
    if (pulls_) task->WaitFor<0>(at_.x_ready + task->block, parts_);
    else WaitForRing(task);
  }

  // Everything that read the ring rows of this block before has done so: the predecessor is out (so
  // its x, h and gradients of h are read), and in the backward pass so are its weight gradients.
  MOK_HD void WaitForRing(Task* task) const {
    const Index before = Predecessor(task->block);
    if (before < 0) return;
    task->WaitFor<0>(at_.out_ready + before, hidden_tiles_);
    if (backward_) {
      const Index segment = ExpertOf(before * row_tile_) + before / macrobatch_blocks_;
      task->WaitFor<1>(at_.gradient_done + segment, gradient_tiles_);
    }
  }

  // The predecessor's result rows have left the ring.
  MOK_HD void WaitForPush(Task* task) const {
    const Index before = Predecessor(task->block);
    if (pushes_ && before >= 0) task->WaitFor<2>(at_.out_consumed + before, parts_);
  }

  MOK_HD Index Predecessor(Index block) const {
    const Index before = backward_ ? block - macrobatch_blocks_ : block + macrobatch_blocks_;
    return before >= 0 && before < blocks_ ? before : -1;
  }

  MOK_HD void Place(Task* task, Op op, Index block, Index tile) const {
    task->op = op;
    task->block = block;
    task->tile = tile;
    task->expert = ExpertOf(task->block * row_tile_);
  }

  // ---- the shared expert: all tokens, first in the list, waits for nobody else ----

  MOK_HD Index NumShared() const {
    const Index gate_up = Computes(0) ? shared_width_tiles_ : 0;
    const Index d_down = backward_ ? shared_d_width_tiles_ : 0;
    return token_blocks_ * (gate_up + d_down + hidden_tiles_) +
           (backward_ ? shared_gate_up_gradient_.Tiles() + shared_down_gradient_.Tiles() : 0);
  }

  MOK_HD Run SharedRun(Index index) const {
    const Index tiles[3] = {Computes(0) ? shared_width_tiles_ : 0, backward_ ? shared_d_width_tiles_ : 0,
                            hidden_tiles_};
    Run run;
    run.rows = token_blocks_;
    for (int s = 0; s < 3; ++s) {
      run.task.op = s == 0   ? Op::kSharedGateUp
                    : s == 1 ? Op::kSharedDgradDown
                             : (backward_ ? Op::kSharedDgradGateUp : Op::kSharedDown);
      run.columns = tiles[s];
      run.end = run.begin + run.rows * run.columns;
      if (index < run.end) return run;
      run.begin = run.end;
    }
    SetGradient(&run, index, Op::kSharedGradGateUp, Op::kSharedGradDown, shared_gate_up_gradient_,
                shared_down_gradient_);
    run.task.blocks = token_blocks_;
    run.task.WaitFor<0>(at_.shared_d_hidden_ready, shared_d_width_tiles_, token_blocks_);
    return run;
  }

  // Place `index` of a walk over a run's grid: in groups of Run::group rows, whose operands a second level
  // cache holds, two columns at a time, first one, then the other. Places 2 i and 2 i + 1 are two rows of one
  // column, those of an odd last row the two columns, so that two multiprocessors can share an operand.
  MOK_HD static void Walk(const Run& run, Index index, Index* row, Index* column) {
    const Index before = index / (run.group * run.columns) * run.group;
    index -= before * run.columns;
    const Index here = Min(run.group, run.rows - before), even = here / 2 * 2;
    const Index first = index / (2 * here) * 2, columns = Min(2, run.columns - first);
    index -= first * here;
    const bool paired = index < columns * even;
    *row = before + (paired ? index % even : here - 1);
    *column = first + (paired ? index / even : index - columns * even);
  }

  bool context_;
  const int32_t* row_offset_;
  CounterLayout at_;
  Index row_tile_, macrobatch_rows_, local_experts_;
  bool pulls_, pushes_, backward_;
  Index part_rows_, parts_, group_, minibatch_blocks_, step_experts_;
  Index blocks_, macrobatch_blocks_, macrobatches_;
  Index width_tiles_, d_width_tiles_, hidden_tiles_, gradient_tiles_;
  Index token_blocks_, shared_width_tiles_, shared_d_width_tiles_;
  Grid gate_up_gradient_, down_gradient_, shared_gate_up_gradient_, shared_down_gradient_;
};

}  // namespace mok

#endif  // MOK_TASKS_H_

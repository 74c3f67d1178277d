"""The peer protocol of the CUDA implementation as a set of steps, and an explorer of all their interleavings.

Used by test_protocol.py, which says what the protocol promises and why that holds.

Every step happens at most once and is atomic. What a step finds follows from the set of steps already done, so
that set is the whole state: no memory is kept. A buffer's place (a cell) has the same sequence of versions in
every run; reading is wrong before the version's writer is done ("too early") and writing is wrong while somebody
has yet to read an earlier version ("overwritten").

Memory order. A rank's own steps are ordered only where `after` says so. A write to what peers read is done at
the moment they can see it, which nothing bounds but a flag of this rank that is written after it (release); a
read happens no earlier than the flags it comes after have been seen (acquire).

The reduction is Valmari's stubborn sets. Two steps conflict if their order matters: one of them writes what the
other touches, or prevents the other. From each state only a set of steps is followed that nothing outside it
interferes with: it holds an enabled step, whatever conflicts with its enabled steps, and for each of its disabled
steps enough others that one of them must come first. Every run is then followed in one of its equivalent orders,
those that differ by exchanging steps without conflict; they do the same and find the same. Runs end, since no step
happens twice.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator

import numpy as np
from test_schedule import make_dims

from mok_jax import ops

host = ops._host

TOO_EARLY, OVERWRITTEN, DEADLOCK = "read too early", "overwritten before it was read", "deadlock"
ROW_TILE = 8

# What a task reads and writes in the ring, one tile a block. Versions of the carry are test_tasks.py's subject.
RING = {
    "dispatch": ((), ("x",)),
    "gate-up": (("x",), ("gate",)),
    "down": (("gate",), ("out",)),  # forward, "gate" is h
    "combine": (("out",), ()),
    "reverse-combine": ((), ("x", "d_y")),
    "dgrad-down": (("d_y", "gate"), ("d_h", "d_weights")),
    "dgrad-gate-up": (("d_h",), ("out",)),
    "weight-gradient-gate-up": (("x", "d_h"), ()),
    "weight-gradient-down": (("d_y", "d_h"), ()),
    "reverse-dispatch": (("out", "d_weights"), ()),
}
STAGED = {"forward": ("x", "ids"), "backward": ("x", "d_y")}
PULLED = {"dispatch": ("x",), "reverse-combine": ("x", "d_y")}
PUSHES = ("combine", "reverse-dispatch")


@dataclasses.dataclass(frozen=True)
class Protocol:
    """What is explored. The defaults are the design; from `barriers` on every other value is a fault."""

    ranks: int = 3
    passes: tuple[str, ...] = ("forward", "forward")
    blocks: int = 5  # of rows on each rank; two fit the ring
    one_worker: bool = False  # each task sequence in its order, or whatever its counters allow
    flags: int = 2  # words that a rank has for each peer, used in turn
    at_least: bool = False  # a barrier waits for its epoch or a later one, or for its own alone
    timeout: str = "never"  # "last": when nothing else can happen; "early": at any time
    dies: int | None = None  # this rank, at any time
    same_signature: bool = True  # of both calls, as those of one call site in a loop
    barriers: tuple[int, ...] = (0, 1)
    epoch: Callable[[int], int] = lambda number: number + 1  # of the rank's n-th barrier; flags begin as 0
    stage_after: str = "epilogue"  # of the call before; or its last "barrier", which is no fault, or "megakernel"
    waits_for_epilogue: bool = True  # a call begins after the epilogue of the one before
    released: tuple[str, ...] = ("staged", "pushed")  # what is visible before the flag is
    swaps_calls: int | None = None  # this rank
    stages_after_error: bool = False
    edit_task: Callable[[dict], None] = lambda task: None

    def order(self, rank):
        calls = range(len(self.passes))
        return tuple(reversed(calls)) if rank == self.swaps_calls else tuple(calls)

    @property
    def may_fail(self):
        return self.timeout != "never" or self.dies is not None or self.swaps_calls is not None


@functools.cache
def task_list(direction: str, blocks: int):
    """The two sequences for a rank with one expert: tasks of one tile, two blocks in a mini- and a macrobatch."""
    rows = 2 * ROW_TILE
    dims = make_dims(tokens=blocks * ROW_TILE, top_k=1, experts=1, ranks=2, minibatch=rows, macrobatch=rows)
    pass_ = host.Pass(backward=direction == "backward", context=False, gradients=3)
    offsets = np.asarray([0, blocks * ROW_TILE], np.int32)
    return host.list_tasks(dims, pass_, offsets, (4, 4, 4, 4, 4, 4, 4, 1, 1), False)[:2]


@dataclasses.dataclass
class Step:
    """Sets of steps are bit masks. `kind`: "work", "flag", "pass" or "fail" of a barrier, "abort", "die"."""

    name: str
    rank: int
    kind: str = "work"
    after: int = 0
    never: int = 0  # once one of these is done, this cannot be
    waits: tuple = ()  # (counter, target)
    reads: tuple = ()  # (cell, version)
    writes: tuple = ()
    epoch: int = 0
    signature: object = None
    task: bool = False


def bits(mask: int) -> Iterator[int]:
    while mask:
        lowest = mask & -mask
        yield lowest.bit_length() - 1
        mask ^= lowest


class Program:
    """All steps of all ranks."""

    def __init__(self, protocol: Protocol):
        self.protocol = protocol
        self.steps: list[Step] = []
        self.of_rank = [0] * protocol.ranks
        self.signals: dict[tuple, int] = {}  # counter: those that add one
        self.flags: dict[tuple, list[int]] = {}  # (reader, writer, word): writes in order
        self.aborts = [0] * protocol.ranks  # that reach a rank
        self.last = [self._rank(rank) for rank in range(protocol.ranks)]
        self.fails = self._mask("fail")
        self.deaths = self._mask("die")
        self._resolve()

    # ---- the protocol ----

    def _add(self, rank, name, after, kind="work", **more) -> int:
        bit = 1 << len(self.steps)
        self.steps.append(Step(f"{name} of rank {rank}", rank, kind, after, **more))
        self.of_rank[rank] |= bit
        return bit

    def _rank(self, rank) -> int:
        done = staged = 0
        if rank == self.protocol.dies:
            self._add(rank, "death", 0, "die")
        for position, call in enumerate(self.protocol.order(rank)):
            done, staged = self._call(rank, position, call, done, staged)
        return done

    def _call(self, rank, position, call, done, stage_after) -> tuple[int, int]:
        """`done`: what the stream has done. Returns that, and what the next call's staging comes after."""
        p, direction = self.protocol, self.protocol.passes[call]
        staged = self._stage(rank, call, stage_after)
        released = staged if "staged" in p.released else 0
        begun = self._barrier(rank, position, 0, call, done | released) | staged
        if direction == "forward":
            ids = tuple((("staged ids", peer), call) for peer in range(p.ranks))
            begun |= self._add(rank, f"schedule {call}", begun, reads=ids)
        computed, pushed = self._megakernel(rank, call, direction, begun)
        released = pushed if "pushed" in p.released else 0
        done = self._barrier(rank, position, 1, call, computed | released)
        slots = tuple((("window", rank, *slot), call) for slot in self._slots(rank))
        barrier = done
        epilogue = self._add(rank, f"epilogue {call}", done | computed, reads=slots)
        # Careful: what was pushed but not released here is with the next call's flags.
        done |= (epilogue if p.waits_for_epilogue or position == len(p.passes) - 1 else 0) | pushed
        return done, {"epilogue": done, "barrier": barrier, "megakernel": computed}[p.stage_after] | staged

    def _stage(self, rank, call, after) -> int:
        staged = 0
        for name in STAGED[self.protocol.passes[call]]:
            staged |= self._add(rank, f"stage {name} {call}", after, writes=(((f"staged {name}", rank), call),))
        return staged

    def _barrier(self, rank, position, barrier, call, after) -> int:
        p = self.protocol
        if barrier not in p.barriers or p.ranks == 1:
            return after
        epoch = p.epoch(position * len(p.barriers) + p.barriers.index(barrier))
        what = dict(epoch=epoch, signature=None if p.same_signature else call)
        told = after
        for peer in range(p.ranks):
            if peer != rank:
                flag = self._add(rank, f"flag {epoch} for rank {peer}", after, "flag", **what)
                self.flags.setdefault((peer, rank, epoch % p.flags), []).append(flag)
                told |= flag
        passed = self._add(rank, f"passing of barrier {barrier} of call {call}", told, "pass", **what)
        if p.may_fail:
            failed = self._add(rank, f"failure of barrier {barrier} of call {call}", told, "fail", never=passed, **what)
            self.steps[-2].never = failed
            for peer in range(p.ranks):
                if peer != rank:
                    self.aborts[peer] |= self._add(rank, f"abort for rank {peer}", failed, "abort")
            if p.stages_after_error and call + 1 < len(p.passes):
                self._stage(rank, call + 1, failed)
        return passed

    def _source(self, owner, block) -> int:
        """Whose row is in this block; every owner begins with another rank's."""
        return (owner + 1 + block) % self.protocol.ranks

    def _slots(self, rank):
        p = self.protocol
        return [(owner, b) for owner in range(p.ranks) for b in range(p.blocks) if self._source(owner, b) == rank]

    def _megakernel(self, rank, call, direction, begun) -> tuple[int, int]:
        """All tasks but those that push to a peer, and those."""
        p, computed, pushed = self.protocol, 0, 0
        for sequence in task_list(direction, p.blocks):
            before = 0
            for task in sequence:
                if task["op"] == "none":
                    continue
                task = task | {"waits": list(task["waits"])}
                p.edit_task(task)
                before = self._task(rank, call, task, begun | (before if p.one_worker else 0))
                remote = task["op"] in PUSHES and self._source(rank, task["block"]) != rank
                pushed |= before if remote else 0
                computed |= 0 if remote else before
        return computed, pushed

    def _task(self, rank, call, task, after) -> int:
        op, block, source = task["op"], task["block"], self._source(rank, task["block"])
        ring_reads, ring_writes = RING[op]
        place = lambda buffer, b: ((buffer, rank, call, b % 2), b)  # noqa: E731
        reads = [place(buffer, b) for buffer in ring_reads for b in range(block, block + task["blocks"])]
        reads += [((f"staged {name}", source), call) for name in PULLED.get(op, ())]
        writes = [place(buffer, block) for buffer in ring_writes]
        if op in PUSHES:
            writes.append((("window", source, rank, block), call))
        waits = [((rank, call, c), target) for first, n, target in task["waits"] for c in range(first, first + n)]
        what = dict(reads=tuple(reads), writes=tuple(writes), waits=tuple(waits), task=True)
        bit = self._add(rank, f"{op} {call} of block {block}", after, **what)
        if task["signal"] >= 0:
            counter = rank, call, task["signal"]
            self.signals[counter] = self.signals.get(counter, 0) | bit
        return bit

    # ---- what follows from the steps: who touches what, which order matters ----

    def _mask(self, kind) -> int:
        return sum(1 << i for i, step in enumerate(self.steps) if step.kind == kind)

    def _resolve(self):
        count = len(self.steps)
        self.conflicts = [0] * count
        self.writers: list[list[int]] = [[] for _ in range(count)]  # of each version that a step reads
        self.readers = [0] * count  # of versions before those that a step writes
        writers, readers, versions = {}, {}, {}
        for i, step in enumerate(self.steps):
            for cell, version in step.writes:
                versions.setdefault(cell, {}).setdefault(version, len(versions[cell]) if cell in versions else 0)
                writers[cell, version] = writers.get((cell, version), 0) | 1 << i
            for cell, version in step.reads:
                readers[cell, version] = readers.get((cell, version), 0) | 1 << i
        for i, step in enumerate(self.steps):
            self.writers[i] = [writers[read] for read in step.reads]
            for cell, version in step.writes:
                for other, number in versions[cell].items():
                    touching = readers.get((cell, other), 0)
                    self.readers[i] |= touching if number < versions[cell][version] else 0
                    self._conflict(i, touching | writers[cell, other])
            for counter, target in step.waits:
                if self.signals[counter].bit_count() > target:
                    self._conflict(i, self.signals[counter])
            if step.kind in ("pass", "fail"):
                self._conflict(i, step.never)
                for words in self._words(step):
                    self._conflict(i, sum(words))
            if step.kind == "die":
                self._conflict(i, self.of_rank[step.rank])
                for other in bits(self.of_rank[step.rank] & ~(1 << i)):
                    self.steps[other].never |= 1 << i

    def _conflict(self, i, others):
        others &= ~(1 << i)
        self.conflicts[i] |= others
        for other in bits(others):
            self.conflicts[other] |= 1 << i

    def _words(self, step) -> list[list[int]]:
        """The writes of each flag that a barrier looks at."""
        p = self.protocol
        peers = [peer for peer in range(p.ranks) if peer != step.rank]
        return [self.flags[step.rank, peer, step.epoch % p.flags] for peer in peers]

    # ---- one step from a state ----

    def enabled(self, done: int) -> int:
        chosen = 0
        for i, step in enumerate(self.steps):
            if not done >> i & 1 and not step.after & ~done and self.blockers(i, done, 0, 0) is None:
                chosen |= 1 << i
        return chosen

    def blockers(self, i: int, done: int, chosen: int, rank: int) -> int | None:
        """None if step i is enabled, else steps one of which must come first; 0: it can never happen.

        Where there is a choice, those in `chosen`, then those of `rank`.
        """
        step = self.steps[i]
        prefer = lambda some, n=1: _first(some, n, (chosen, self.of_rank[rank]))  # noqa: E731
        if done & step.never:
            return 0
        if step.after & ~done:
            return prefer(step.after & ~done)
        for counter, target in step.waits:
            signals = self.signals[counter]
            lacking, left = target - (done & signals).bit_count(), signals & ~done
            if lacking:
                spare = left.bit_count() - lacking
                return prefer(left, spare + 1) if lacking > 0 and spare >= 0 else 0
        if step.kind == "pass":
            late = [words for words in self._words(step) if not self._accepts(step, words, done)]
            missing = [[word for word in words if not word & done] for words in late]
            return None if not late else prefer(sum(words[0] for words in missing)) if all(missing) else 0
        if step.kind == "fail" and self.protocol.timeout != "early":
            return self._failing(step, done)
        return None

    def _accepts(self, step, words, done) -> bool:
        flag = self._flag(words, done) or Step("", 0, signature=step.signature)
        # A peer that is ahead has passed this barrier, so it has compared the signatures itself.
        ahead = self.protocol.at_least and flag.epoch > step.epoch
        return ahead or (flag.epoch == step.epoch and flag.signature == step.signature)

    def _flag(self, words, done) -> Step | None:
        written = [word for word in words if word & done]
        return self.steps[written[-1].bit_length() - 1] if written else None

    def _failing(self, step, done) -> int | None:
        if done & self.aborts[step.rank]:
            return None
        wrong = lambda flag: flag.epoch == step.epoch and flag.signature != step.signature  # noqa: E731
        flags = [self._flag(words, done) for words in self._words(step)]
        if any(flag is not None and wrong(flag) for flag in flags):
            return None
        coming = sum(w for words in self._words(step) for w in words if wrong(self.steps[w.bit_length() - 1]))
        return (coming | self.aborts[step.rank]) & ~done

    def timeouts(self, done: int) -> int:
        """Barriers that wait and may give up when nothing else can happen."""
        if self.protocol.timeout != "last":
            return 0
        waiting = [i for i in bits(self.fails & ~done) if not self.steps[i].after & ~done]
        return sum(1 << i for i in waiting if not self.steps[i].never & done)

    def violation(self, i: int, done: int) -> str | None:
        if not all(writers & done for writers in self.writers[i]):
            return TOO_EARLY
        return OVERWRITTEN if self.readers[i] & ~done else None

    def outcome(self, rank: int, done: int) -> str:
        if not self.last[rank] & ~done:
            return "done"
        for name, steps in (("error", self.fails), ("dead", self.deaths)):
            if steps & self.of_rank[rank] & done:
                return name
        return "hung"


def _first(some: int, n: int, preferred: tuple[int, ...]) -> int:
    """n of them."""
    found = 0
    for group in (*preferred, some):
        for i in bits(some & group & ~found):
            if found.bit_count() == n:
                return found
            found |= 1 << i
    return found


@dataclasses.dataclass
class Found:
    states: int
    violations: dict[str, list[str]]  # kind: the steps that led there
    outcomes: set[tuple[str, ...]]  # of the ranks, at an end
    ends: set[int]


def explore(protocol: Protocol, *, reduced: bool = True) -> Found:
    program = Program(protocol)
    came_from: dict[int, tuple[int, int]] = {0: (0, -1)}
    found = Found(0, {}, set(), set())
    waiting = [0]

    def report(kind, state, *last):
        if kind not in found.violations:
            trace = list(last)
            while state:
                state, i = came_from[state]
                trace.append(i)
            found.violations[kind] = [program.steps[i].name for i in reversed(trace)]

    while waiting:
        state = waiting.pop()
        enabled = program.enabled(state)
        following = stubborn(program, state, enabled) if reduced else enabled
        following = following or program.timeouts(state)
        if not following:
            outcome = tuple(program.outcome(rank, state) for rank in range(protocol.ranks))
            found.outcomes.add(outcome)
            found.ends.add(state)
            if "hung" in outcome:
                report(DEADLOCK, state)
        for i in bits(following):
            if kind := program.violation(i, state):
                report(kind, state, i)
            after = state | 1 << i
            if after not in came_from:
                came_from[after] = state, i
                waiting.append(after)
    found.states = len(came_from)
    return found


def stubborn(program: Program, done: int, enabled: int) -> int:
    """The enabled steps of a stubborn set, of those that begin with one step the smallest."""
    best = enabled
    for seed in bits(enabled):
        chosen, open_, rank = 1 << seed, [seed], program.steps[seed].rank
        while open_:
            i = open_.pop()
            if enabled >> i & 1:
                more = program.conflicts[i] & ~done
            else:
                more = program.blockers(i, done, chosen, rank)
            open_ += bits(more & ~chosen)
            chosen |= more
        if (chosen & enabled).bit_count() < best.bit_count():
            best = chosen & enabled
        if best.bit_count() == 1:
            break
    return best

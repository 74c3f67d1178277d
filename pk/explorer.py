"""Follows every interleaving of the steps of several ranks. What the steps are, peer_protocol.py says.

Every step happens at most once and is atomic. What a step finds follows from the set of steps already done, so
that set is the whole state: no memory is kept. A place in memory (a cell) has the same sequence of versions in
every run; reading one is wrong before its writer is done ("too early") and once the writer of a later one is
("overwritten").

The reduction is Valmari's stubborn sets. Two steps conflict if their order matters: one of them writes what the
other touches, or prevents the other. From each state only a set of steps is followed that nothing outside it
interferes with: it holds an enabled step, whatever conflicts with its enabled steps, and for each of its disabled
steps enough others that one of them must come first. So every run is followed in one of its equivalent orders,
those that differ by exchanging steps without conflict, and these find the same. Runs end, since no step happens
twice.
"""

import dataclasses
from collections.abc import Hashable, Iterator

TOO_EARLY, OVERWRITTEN, DEADLOCK = "read too early", "overwritten before it was read", "deadlock"

Version = tuple[Hashable, int]  # cell, which of its versions


@dataclasses.dataclass
class Step:
    """Sets of steps are bit masks."""

    name: str
    rank: int
    kind: str
    after: int = 0
    never: int = 0  # once one of these is done, this cannot be
    waits: tuple[tuple[Hashable, int], ...] = ()  # counters, and what they must be
    reads: tuple[Version, ...] = ()
    writes: tuple[Version, ...] = ()
    epoch: int = 0  # of a barrier
    signature: tuple[int, int] | None = None


def bits(mask: int) -> Iterator[int]:
    while mask:
        lowest = mask & -mask
        yield lowest.bit_length() - 1
        mask ^= lowest


def first(some: int, count: int, preferred: tuple[int, ...]) -> int:
    """`count` of them: those in the first set of `preferred`, then in the next."""
    found = 0
    for group in (*preferred, some):
        for i in bits(some & group & ~found):
            if found.bit_count() == count:
                return found
            found |= 1 << i
    return found


class System:
    """All steps of all ranks. A subclass adds them, says what else holds one back, and calls `resolve`."""

    def __init__(self, ranks: int):
        self.steps: list[Step] = []
        self.of_rank = [0] * ranks
        self.signals: dict[Hashable, int] = {}  # counter: the steps that add one to it

    def add(self, name: str, rank: int, kind: str, after: int, **more) -> int:
        bit = 1 << len(self.steps)
        self.steps.append(Step(f"{name} of rank {rank}", rank, kind, after, **more))
        self.of_rank[rank] |= bit
        return bit

    def resolve(self):
        """What follows from the steps: who touches what, and which order matters."""
        self.conflicts = [0] * len(self.steps)
        self.overwriters = [0] * len(self.steps)  # writers of versions after those that a step reads
        writers: dict[Version, int] = {}
        readers: dict[Version, int] = {}
        numbers: dict[Hashable, dict[int, int]] = {}  # of each cell's versions
        for i, step in enumerate(self.steps):
            for cell, version in step.writes:
                of_cell = numbers.setdefault(cell, {})
                of_cell.setdefault(version, len(of_cell))
                writers[cell, version] = writers.get((cell, version), 0) | 1 << i
            for read in step.reads:
                readers[read] = readers.get(read, 0) | 1 << i
        self.writers = [[writers.get(read, 0) for read in step.reads] for step in self.steps]
        for i, step in enumerate(self.steps):
            for cell, version in step.writes:
                for other, number in numbers[cell].items():
                    reading = readers.get((cell, other), 0)
                    self.conflict(i, reading | writers[cell, other])
                    for reader in bits(reading if number < numbers[cell][version] else 0):
                        self.overwriters[reader] |= 1 << i
            for counter, target in step.waits:
                if self.signals[counter].bit_count() > target:
                    self.conflict(i, self.signals[counter])
            self.conflict(i, step.never)

    def conflict(self, i: int, others: int):
        others &= ~(1 << i)
        self.conflicts[i] |= others
        for other in bits(others):
            self.conflicts[other] |= 1 << i

    def enabled(self, done: int) -> int:
        found = 0
        for i, step in enumerate(self.steps):
            if not (done >> i & 1 or step.after & ~done) and self.blockers(i, done) is None:
                found |= 1 << i
        return found

    def blockers(self, i: int, done: int, preferred: tuple[int, ...] = ()) -> int | None:
        """None if step i is enabled, else steps one of which must come first; 0: it can never happen."""
        step = self.steps[i]
        if done & step.never:
            return 0
        if step.after & ~done:
            return first(step.after & ~done, 1, preferred)
        for counter, target in step.waits:
            lacking = target - (done & self.signals[counter]).bit_count()
            left = self.signals[counter] & ~done
            if lacking:
                spare = left.bit_count() - lacking
                return first(left, spare + 1, preferred) if lacking > 0 and spare >= 0 else 0
        return self.held_back(step, done, preferred)

    def violation(self, i: int, done: int) -> str | None:
        """What is wrong with doing step i now."""
        if not all(writers & done for writers in self.writers[i]):
            return TOO_EARLY
        return OVERWRITTEN if self.overwriters[i] & done else None

    # ---- of the subclass ----

    def held_back(self, step: Step, done: int, preferred: tuple[int, ...]) -> int | None:
        """As `blockers`, for what is neither `after` nor `waits`."""
        raise NotImplementedError

    def timeouts(self, done: int) -> int:
        """What may happen when nothing is enabled."""
        raise NotImplementedError

    def outcome(self, rank: int, done: int) -> str:
        """How the rank ended; "hung": it did not."""
        raise NotImplementedError


@dataclasses.dataclass
class Found:
    states: int
    violations: dict[str, list[str]]  # kind: the steps that led there
    outcomes: set[tuple[str, ...]]  # of the ranks
    ends: set[int]  # the states they are in then


def explore(system: System, *, reduced: bool = True) -> Found:
    came_from = {0: (0, -1)}  # state: the one before, and the step
    found = Found(0, {}, set(), set())
    waiting = [0]

    def report(kind, state, *last):
        if kind in found.violations:
            return
        trace = list(last)
        while state:
            state, i = came_from[state]
            trace.append(i)
        found.violations[kind] = [system.steps[i].name for i in reversed(trace)]

    while waiting:
        state = waiting.pop()
        enabled = system.enabled(state)
        following = stubborn(system, state, enabled) if reduced else enabled
        following = following or system.timeouts(state)
        if not following:
            outcome = tuple(system.outcome(rank, state) for rank in range(len(system.of_rank)))
            found.outcomes.add(outcome)
            found.ends.add(state)
            if "hung" in outcome:
                report(DEADLOCK, state)
        for i in bits(following):
            if kind := system.violation(i, state):
                report(kind, state, i)
            after = state | 1 << i
            if after not in came_from:
                came_from[after] = state, i
                waiting.append(after)
    found.states = len(came_from)
    return found


def stubborn(system: System, done: int, enabled: int) -> int:
    """The enabled steps of a stubborn set: of those built from one step each, the smallest."""
    best = enabled
    for seed in bits(enabled):
        chosen, left, own = 1 << seed, [seed], system.of_rank[system.steps[seed].rank]
        while left:
            i = left.pop()
            blockers = system.blockers(i, done, (chosen, ~enabled, own))
            more = ~chosen & ~done & (system.conflicts[i] if blockers is None else blockers)
            left += bits(more)
            chosen |= more
        if (chosen & enabled).bit_count() < best.bit_count():
            best = chosen & enabled
        if best.bit_count() == 1:
            break
    return best

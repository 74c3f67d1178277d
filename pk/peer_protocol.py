"""The peer protocol of the CUDA implementation as steps for explorer.py. What it promises and why that holds,
test_protocol.py says.

Memory order. A rank's own steps are ordered only where `after` says so. A write to what peers read is done at
the moment they can see it, which nothing bounds but a flag of this rank that is written after it (release); a
read happens no earlier than the flags it comes after have been seen (acquire).
"""

import dataclasses
import functools
from collections.abc import Callable

import numpy as np
from explorer import Step, System, bits, first
from test_schedule import make_dims

from mok_jax import ops

host = ops._host

ROW_TILE = 8

# What a task reads and writes in the ring, one tile a block. "gate" is h in the forward pass. The carry is the
# subject of test_tasks.py.
RING = {
    "dispatch": ((), ("x",)),
    "gate-up": (("x",), ("gate",)),
    "down": (("gate",), ("out",)),
    "combine": (("out",), ()),
    "reverse-combine": ((), ("x", "d_y")),
    "dgrad-down": (("d_y", "gate"), ("d_h", "d_weights")),
    "dgrad-gate-up": (("d_h",), ("out",)),
    "weight-gradient-gate-up": (("x", "d_h"), ()),
    "weight-gradient-down": (("d_y", "d_h"), ()),
    "reverse-dispatch": (("out", "d_weights"), ()),
}
STAGED = {"forward": ("x", "ids"), "backward": ("x", "d_y")}  # the router weights are with d_y
PULLED = {"dispatch": ("x",), "reverse-combine": ("x", "d_y")}
PUSHES = ("combine", "reverse-dispatch")  # to other ranks; a rank's own results go straight to its return window:
RESULTS = ("down", "dgrad-gate-up")


@dataclasses.dataclass(frozen=True)
class Protocol:
    """What is explored. The defaults are the design. From `barriers` on, what differs is a fault."""

    ranks: int = 3
    passes: tuple[str, ...] = ("forward", "forward")
    blocks: int = 5  # of rows on each rank; two fit the ring
    one_worker: bool = False  # for each task sequence, in its order; else whatever the counters allow
    flags: int = 2  # words that a rank has for each peer, used in turn
    at_least: bool = False  # a barrier waits for its epoch or a later one; else for its own alone
    timeout: str = "never"  # "last": when nothing else can happen; "early": at any time
    dies: int | None = None  # this rank, at any time
    same_signature: bool = True  # of all calls, as those of one call site in a loop
    stage_after: str = "epilogue"  # of the call before; or its last "barrier"; or "megakernel", which is a fault
    barriers: tuple[int, ...] = (0, 1)
    epoch: Callable[[int], int] = lambda number: number + 1  # of the rank's n-th barrier; flags begin as 0
    waits_for_epilogue: bool = True  # a call begins after the epilogue of the one before
    released: tuple[str, ...] = ("staged", "pushed")  # what is visible before the next flag is
    swaps_calls: int | None = None  # this rank makes its calls last to first
    refuses: int | None = None  # this rank leaves its first call out
    counts_refusals: bool = True  # in the signature
    after_error: str = "nothing"  # a rank that gave up "stages" its next call, or "flags" its next barrier
    edit_task: Callable[[dict], None] = lambda task: None

    def calls(self, rank: int) -> list[int]:
        calls = list(range(int(rank == self.refuses), len(self.passes)))
        return calls[::-1] if rank == self.swaps_calls else calls

    @property
    def may_fail(self) -> bool:
        return self.timeout != "never" or {self.dies, self.swaps_calls, self.refuses} != {None}


@functools.cache
def task_list(direction: str, blocks: int):
    """Both sequences of a rank with one expert: tasks of one tile, two blocks in a macrobatch."""
    rows = 2 * ROW_TILE
    dims = make_dims(tokens=blocks * ROW_TILE, top_k=1, experts=1, ranks=2, minibatch=rows, macrobatch=rows)
    pass_ = host.Pass(backward=direction == "backward", context=False, gradients=3)
    offsets = np.asarray([0, blocks * ROW_TILE], np.int32)
    return host.list_tasks(dims, pass_, offsets, (4, 4, 4, 4, 4, 4, 4, 1, 0), False)[:2]


class Program(System):
    """Kinds of steps: "work"; "task" of a megakernel; "flag", "pass" and "fail" of a barrier; "abort"; "die"."""

    def __init__(self, protocol: Protocol):
        super().__init__(protocol.ranks)
        self.protocol = protocol
        self.flags: dict[tuple[int, int, int], list[int]] = {}  # (reader, writer, word): writes in order
        self.aborts = [0] * protocol.ranks  # that reach a rank
        self.last = [self._rank(rank) for rank in range(protocol.ranks)]
        self.resolve()

    # ---- the steps ----

    def _rank(self, rank: int) -> int:
        done = staging_after = 0
        for position, call in enumerate(self.protocol.calls(rank)):
            done, staging_after = self._call(rank, position, call, done, staging_after)
        if rank == self.protocol.dies:
            death = self.add("death", rank, "die", 0)
            for i in bits(self.of_rank[rank] & ~death):
                self.steps[i].never |= death
        return done

    def _call(self, rank: int, position: int, call: int, done: int, staging_after: int) -> tuple[int, int]:
        """done: what the stream has done. Returns that, and what the next call stages after."""
        p, direction = self.protocol, self.protocol.passes[call]
        staged = self._stage(rank, call, staging_after)
        begun = self._barrier(rank, position, 0, call, done | (staged if "staged" in p.released else 0)) | staged
        if direction == "forward":
            ids = tuple((("staged ids", peer), call) for peer in range(p.ranks))
            begun |= self.add(f"schedule {call}", rank, "work", begun, reads=ids)
        computed, pushed = self._megakernel(rank, call, direction, begun)
        barrier = self._barrier(rank, position, 1, call, computed | (pushed if "pushed" in p.released else 0))
        window = tuple((("window", rank, *slot), call) for slot in self._slots(rank))
        epilogue = self.add(f"epilogue {call}", rank, "work", barrier | computed, reads=window)
        # Careful: what was pushed but not released here is released with the next call's flags.
        waits_for_epilogue = p.waits_for_epilogue or position == len(p.passes) - 1
        done = barrier | pushed | (epilogue if waits_for_epilogue else 0)
        return done, {"epilogue": done, "barrier": barrier, "megakernel": computed}[p.stage_after] | staged

    def _stage(self, rank: int, call: int, after: int) -> int:
        staged = 0
        for name in STAGED[self.protocol.passes[call]]:
            staged |= self.add(
                f"staging {call} of {name}", rank, "work", after, writes=(((f"staged {name}", rank), call),)
            )
        return staged

    def _barrier(self, rank: int, position: int, barrier: int, call: int, after: int) -> int:
        p = self.protocol
        if barrier not in p.barriers or p.ranks == 1:
            return after
        epoch = p.epoch(position * len(p.barriers) + p.barriers.index(barrier))
        refused = int(p.counts_refusals and rank == p.refuses)
        signature = (0 if p.same_signature else call, refused)
        what = dict(epoch=epoch, signature=signature)
        told = after | self._tell(rank, after, epoch=epoch, signature=signature)
        passed = self.add(f"passing of barrier {barrier} of call {call}", rank, "pass", told, **what)
        if p.may_fail:
            failed = self.add(f"failing of barrier {barrier} of call {call}", rank, "fail", told, never=passed, **what)
            self.steps[passed.bit_length() - 1].never = failed
            for peer in self._peers(rank):
                self.aborts[peer] |= self.add(f"abort for rank {peer}", rank, "abort", failed)
            if p.after_error == "stages" and call + 1 < len(p.passes):
                self._stage(rank, call + 1, failed)
            if p.after_error == "flags" and barrier == 0:
                self._tell(rank, failed, epoch=epoch + 1, signature=signature)
        return passed

    def _tell(self, rank: int, after: int, *, epoch: int, signature: tuple[int, int]) -> int:
        told = 0
        for peer in self._peers(rank):
            flag = self.add(f"flag {epoch} for rank {peer}", rank, "flag", after, epoch=epoch, signature=signature)
            self.flags.setdefault((peer, rank, epoch % self.protocol.flags), []).append(flag)
            told |= flag
        return told

    def _peers(self, rank: int) -> list[int]:
        return [peer for peer in range(self.protocol.ranks) if peer != rank]

    def _sources(self, owner: int, block: int) -> set[int]:
        """Whose rows are in this block: another rank's first, and the owner's too in every second one."""
        return {(owner + 1 + block) % self.protocol.ranks} | ({owner} if block % 2 else set())

    def _slots(self, rank: int) -> list[tuple[int, int]]:
        p = self.protocol
        return [(owner, b) for owner in range(p.ranks) for b in range(p.blocks) if rank in self._sources(owner, b)]

    def _megakernel(self, rank: int, call: int, direction: str, begun: int) -> tuple[int, int]:
        """All tasks but those that push to a peer, and those."""
        computed = pushed = 0
        for sequence in task_list(direction, self.protocol.blocks):
            before = 0
            for task in sequence:
                task = task | {"waits": list(task["waits"])}
                self.protocol.edit_task(task)
                before = self._task(rank, call, task, begun | (before if self.protocol.one_worker else 0))
                if task["op"] in PUSHES and self._sources(rank, task["block"]) != {rank}:
                    pushed |= before
                else:
                    computed |= before
        return computed, pushed

    def _task(self, rank: int, call: int, task: dict, after: int) -> int:
        op, block, sources = task["op"], task["block"], self._sources(rank, task["block"])
        if op == "none":
            return after

        def ring(buffers, blocks):
            return tuple(((buffer, rank, call, b % 2), b) for buffer in buffers for b in blocks)

        unused = {"out"} if sources == {rank} else set()
        reads = ring(set(RING[op][0]) - unused, range(block, block + task["blocks"]))
        reads += tuple(((f"staged {name}", source), call) for name in PULLED.get(op, ()) for source in sources)
        writes = ring(set(RING[op][1]) - unused, [block])
        returned = (sources & {rank} if op in RESULTS else set()) | (sources - {rank} if op in PUSHES else set())
        writes += tuple((("window", source, rank, block), call) for source in returned)
        waits = [((rank, call, c), target) for first, n, target in task["waits"] for c in range(first, first + n)]
        name = f"{op} {call} of block {block}"
        bit = self.add(name, rank, "task", after, reads=reads, writes=writes, waits=tuple(waits))
        if task["signal"] >= 0:
            counter = rank, call, task["signal"]
            self.signals[counter] = self.signals.get(counter, 0) | bit
        return bit

    # ---- barriers ----

    def resolve(self):
        super().resolve()
        for i, step in enumerate(self.steps):
            if step.kind in ("pass", "fail"):
                for word in self._words(step):
                    self.conflict(i, sum(word))

    def _words(self, step: Step) -> list[list[int]]:
        """The writes of each flag that a barrier looks at."""
        return [self.flags[step.rank, peer, step.epoch % self.protocol.flags] for peer in self._peers(step.rank)]

    def _flag(self, word: list[int], done: int) -> Step | None:
        """What the flag holds."""
        written = [write for write in word if write & done]
        return self.steps[written[-1].bit_length() - 1] if written else None

    def _accepts(self, step: Step, flag: Step | None) -> bool:
        if flag is None:
            return step.epoch == 0
        # A peer that is ahead has passed this barrier, so it has compared the signatures itself.
        ahead = self.protocol.at_least and flag.epoch > step.epoch
        return ahead or (flag.epoch == step.epoch and flag.signature == step.signature)

    def held_back(self, step: Step, done: int, preferred: tuple[int, ...]) -> int | None:
        if step.kind == "pass":
            lacking = [word for word in self._words(step) if not self._accepts(step, self._flag(word, done))]
            if not lacking:
                return None
            coming = [sum(write for write in word if not write & done) for word in lacking]
            chosen = first(sum(coming), 1, preferred)
            return next(writes for writes in coming if writes & chosen) if all(coming) else 0
        if step.kind == "fail" and self.protocol.timeout != "early":
            return self._not_failing(step, done)
        return None

    def _not_failing(self, step: Step, done: int) -> int | None:
        """A barrier fails where a signature is wrong, or when a peer aborts."""

        def wrong(flag):
            return flag is not None and flag.epoch == step.epoch and flag.signature != step.signature

        words = self._words(step)
        if done & self.aborts[step.rank] or any(wrong(self._flag(word, done)) for word in words):
            return None
        coming = [write for word in words for write in word if wrong(self.steps[write.bit_length() - 1])]
        return (sum(coming) | self.aborts[step.rank]) & ~done

    def timeouts(self, done: int) -> int:
        if self.protocol.timeout != "last":
            return 0
        waiting = [i for i, step in enumerate(self.steps) if step.kind == "fail" and not step.after & ~done]
        return sum(1 << i for i in waiting if not (self.steps[i].never | 1 << i) & done)

    def outcome(self, rank: int, done: int) -> str:
        if not self.last[rank] & ~done:
            return "done"
        kinds = {self.steps[i].kind for i in bits(self.of_rank[rank] & done)}
        return "error" if "fail" in kinds else "dead" if "die" in kinds else "hung"

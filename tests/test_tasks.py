"""The task list: each tile once, exact counts, and no task that reads a row before its writer or after
the next one. Checked by executing the list on versions instead of numbers, in an order that only the
counters bound; each wait that is taken away must be found."""

import collections
import itertools
import random

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
from test_schedule import make_dims

from mok_jax import ops

host = ops._host

TILE = 8
# Of each target: columns of gate-up, dgrad-down and the hidden axis, rows and columns of both weight
# gradients, blocks in a group, values of a communication task (0: a block); whether it gathers on one rank.
TARGETS = {"gathering": ((4, 4, 4, 4, 4, 4, 4, 1, 0), True), "pulling": ((4, 6, 4, 4, 4, 4, 4, 2, 18), False)}
MACROBATCH = 4 * TILE

# Real rows per expert: more than two macrobatches, an expert over three of them, empty ones at each edge.
COUNTS = {
    "one block": [5],
    "no rows": [0, 0],
    "even": [16, 16, 16, 16, 16],
    "straddling": [20, 0, 30, 1, 9, 0],
    "straddling by a minibatch": [24, 24, 12, 30],
    "straddling twice, apart": [24, 16, 24, 24, 16, 8],
    "one long expert": [0, 3, 90, 7],
    "empty at a boundary": [32, 0, 0, 32, 0],
    "all on the last": [0, 0, 70],
}


def listing(counts, *, ranks=2, backward=False, context=True, gradients=15, shared=6, target="gathering"):
    """The list for one rank that holds these experts."""
    tokens = max(1, sum(counts))
    dims = make_dims(
        tokens=tokens,
        top_k=1,
        experts=len(counts),
        ranks=ranks,
        row_tile=TILE,
        minibatch=2 * TILE,
        macrobatch=MACROBATCH,
        hidden=6,
        intermediate=10,
        shared_intermediate=shared,
    )
    offsets = np.concatenate([[0], np.cumsum([-(-c // TILE) * TILE for c in counts])]).astype(np.int32)
    pass_ = host.Pass(backward=backward, context=context, gradients=gradients)
    tiles, gathers = TARGETS[target]
    communication, compute, expected = host.list_tasks(dims, pass_, offsets, tiles, gathers)
    pulls = ranks > 1 or not gathers
    return Listing(communication, compute, expected, offsets, tokens, pulls, ranks > 1, backward, context, target)


Listing = collections.namedtuple(
    "Listing", "communication compute expected offsets tokens pulls pushes backward context target"
)

VARIANTS = [
    pytest.param(
        dict(ranks=ranks, backward=backward, context=context, target=target),
        id=f"{target}-{ranks} rank-{way}-{kept}",
    )
    for target in TARGETS
    for ranks in (1, 2)
    for backward, way in ((False, "forward"), (True, "backward"))
    for context, kept in ((True, "context"), (False, "no context"))
]
every_variant = pytest.mark.parametrize("variant", VARIANTS)
every_count = pytest.mark.parametrize("counts", [pytest.param(c, id=name) for name, c in COUNTS.items()])

HIDDEN_TILES, WIDTH_TILES, SHARED_TILES = 2, 3, 2
D_WIDTH_TILES, SHARED_D_TILES = {"gathering": 3, "pulling": 2}, {"gathering": 2, "pulling": 1}
PARTS = {"gathering": 1, "pulling": 3}  # of 3, 3 and 2 rows


class Versions:
    """Buffers that hold, for each ring place, which block wrote it last."""

    def __init__(self, listing):
        self.listing = listing
        self.held = {}

    def reads(self, task):
        """((buffer, place...), version) that must be there while the task runs."""
        op, block, tile = task["op"], task["block"], task["tile"]
        ring = block - task["macrobatch"] * MACROBATCH // TILE
        target, pushes = self.listing.target, self.listing.pushes
        every = lambda buffer, tiles: [((buffer, ring, t), block) for t in range(tiles)]  # noqa: E731
        pulled = lambda buffer: every(buffer, PARTS[target] * self.listing.pulls)  # noqa: E731
        if op == "gate-up":
            return pulled(self.x_buffer(task))
        if op == "down":
            return every("h", WIDTH_TILES)
        if op == "combine":
            return every("out", HIDDEN_TILES)
        if op == "dgrad-down":
            return pulled("d_y") + (every("gate", WIDTH_TILES) if self.replayed(task) else [])
        if op == "dgrad-gate-up":
            partials = every("d_weights", D_WIDTH_TILES[target]) if tile == 0 and not pushes else []
            return every("d_h", D_WIDTH_TILES[target]) + partials
        if op == "reverse-dispatch":
            return every("out", HIDDEN_TILES) + every("d_weights", D_WIDTH_TILES[target])
        if op.startswith("weight-gradient"):
            found = []
            for b in range(block, block + task["blocks"]):
                place = b - task["macrobatch"] * MACROBATCH // TILE
                found += [(("d_h", place, t), b) for t in range(D_WIDTH_TILES[target])]
                buffer = self.x_buffer(task) if op.endswith("gate-up") else "d_y"
                found += [((buffer, place, part), b) for part in range(PARTS[target] * self.listing.pulls)]
            if task["carry_in"]:
                found.append((("carry", op, tile), (task["expert"], task["macrobatch"] - 1)))
            return found
        if op == "shared down":
            return every("shared h", SHARED_TILES)
        if op == "shared dgrad-down":
            return [] if self.listing.context else every("shared gate", SHARED_TILES)
        if op == "shared dgrad-gate-up":
            return every("shared d_h", SHARED_D_TILES[target])
        if op.startswith("shared weight-gradient"):
            blocks = range(-(-self.listing.tokens // TILE))
            return [(("shared d_h", b, t), b) for b in blocks for t in range(SHARED_D_TILES[target])]
        return []

    def writes(self, task):
        op, block, tile = task["op"], task["block"], task["tile"]
        ring = block - task["macrobatch"] * MACROBATCH // TILE
        if op == "dispatch":
            return [((self.x_buffer(task), ring, tile), block)]
        if op == "reverse-combine":
            again = self.x_buffer(task) == "x"
            return [(("d_y", ring, tile), block)] + ([(("x", ring, tile), block)] if again else [])
        if op == "gate-up":
            return [(("gate" if self.listing.backward else "h", ring, tile), block)]
        if op in ("down", "dgrad-gate-up"):
            return [(("out", ring, tile), block)] if self.listing.pushes else []
        if op == "dgrad-down":
            return [(("d_h", ring, tile), block), (("d_weights", ring, tile), block)]
        if op.startswith("weight-gradient") and task["carry_out"]:
            return [(("carry", op, tile), (task["expert"], task["macrobatch"]))]
        if op == "shared gate-up":
            return [(("shared gate" if self.listing.backward else "shared h", ring, tile), block)]
        if op == "shared dgrad-down":
            return [(("shared d_h", ring, tile), block)]
        return []

    def replayed(self, task):
        return self.listing.backward and (task["macrobatch"] > 0 or not self.listing.context)

    def x_buffer(self, task):
        kept = self.listing.pushes and task["macrobatch"] == 0 and self.listing.context
        return "context x" if kept else "x"

    def start(self, task):
        """While it runs, a task's results hold nothing."""
        self.check(task)
        for place, _ in self.writes(task):
            self.held[place] = None

    def finish(self, task):
        self.check(task)
        self.held.update(self.writes(task))

    def check(self, task):
        # A carry that the task itself has begun to overwrite: it read it at its start.
        own = {place for place, _ in self.writes(task)}
        for place, version in self.reads(task):
            if self.listing.backward and place[0] == "context x":
                continue  # written by the forward pass
            if place in own:
                continue
            if self.held.get(place) != version:
                raise AssertionError(f"{task} needs {version} in {place}, found {self.held.get(place)}")


def execute(listing, seed):
    """Runs all tasks, several at once, in an order bounded by the counters alone. Returns the counters.

    Of those that may start, the one of the highest random priority does; priorities lean on a task's
    kind and macrobatch, so that whole stages are starved, which is how a missing wait shows.
    """
    rng = random.Random(seed)
    lean = collections.defaultdict(rng.random)
    tasks = [*listing.communication, *listing.compute]
    waiting = sorted(tasks, key=lambda t: lean[t["op"], t["macrobatch"], t["expert"]] + 0.3 * rng.random())
    counters = [0] * len(listing.expected)
    versions = Versions(listing)
    workers, running = rng.choice((1, 2, 4)), []

    def full(wait):
        first, count, target = wait
        return all(counters[c] == target for c in range(first, first + count))

    while waiting or running:
        ready = None
        if not running or (len(running) < workers and rng.random() < 0.7):
            ready = next((task for task in waiting if all(map(full, task["waits"]))), None)
        if ready:
            waiting.remove(ready)
            versions.start(ready)
            running.append(ready)
        elif running:
            task = running.pop(rng.randrange(len(running)))
            versions.finish(task)
            if task["signal"] >= 0:
                counters[task["signal"]] += 1
        else:
            raise AssertionError(f"stuck: {waiting[0]}")
    return counters


@every_variant
@every_count
def test_any_order_that_the_counters_allow_is_right_and_ends_at_the_exact_totals(counts, variant):
    tasks = listing(counts, **variant)
    for seed in range(10):
        assert execute(tasks, seed) == tasks.expected


@hypothesis.given(
    st.lists(st.integers(0, 40), min_size=1, max_size=8),
    st.sampled_from([variant.values[0] for variant in VARIANTS]),
    st.integers(0, 2**32),
)
@hypothesis.settings(deadline=None)
def test_any_order_is_right_for_any_counts(counts, variant, seed):
    tasks = listing(counts, **variant)
    assert execute(tasks, seed) == tasks.expected


@every_variant
@every_count
def test_two_cursors_never_get_stuck(counts, variant):
    tasks = listing(counts, **variant)
    counters = [0] * len(tasks.expected)
    heads = [collections.deque(tasks.communication), collections.deque(tasks.compute)]
    while any(heads):
        for head in heads:
            if head and all(counters[c] == t for first, n, t in head[0]["waits"] for c in range(first, first + n)):
                signal = head.popleft()["signal"]
                if signal >= 0:
                    counters[signal] += 1
                break
        else:
            pytest.fail(f"neither head is ready: {[head[0] for head in heads if head]}")
    assert counters == tasks.expected


@every_variant
@every_count
def test_every_tile_once(counts, variant):
    tasks = listing(counts, **variant)
    backward, replays = variant["backward"], 0 if variant["context"] else 1
    blocks = tasks.offsets[-1] // TILE
    first = min(blocks, MACROBATCH // TILE)
    found = collections.Counter((t["op"], t["block"], t["tile"]) for t in tasks.compute + tasks.communication)
    grid = lambda op, begin, end, tiles: {(op, b, t): 1 for b in range(begin, end) for t in range(tiles)}  # noqa: E731
    token_blocks = -(-tasks.tokens // TILE)
    if backward:
        expected = grid("gate-up", 0 if replays else first, blocks, WIDTH_TILES)
        expected |= grid("dgrad-down", 0, blocks, D_WIDTH_TILES[tasks.target]) | grid(
            "dgrad-gate-up", 0, blocks, HIDDEN_TILES
        )
        expected |= grid("shared gate-up", 0, token_blocks * replays, SHARED_TILES)
        expected |= grid("shared dgrad-down", 0, token_blocks, SHARED_D_TILES[tasks.target])
        expected |= grid("shared dgrad-gate-up", 0, token_blocks, HIDDEN_TILES)
        moves = ("reverse-combine", "reverse-dispatch")
    else:
        expected = grid("gate-up", 0, blocks, WIDTH_TILES) | grid("down", 0, blocks, HIDDEN_TILES)
        expected |= grid("shared gate-up", 0, token_blocks, SHARED_TILES)
        expected |= grid("shared down", 0, token_blocks, HIDDEN_TILES)
        moves = ("dispatch", "combine")
    for move, moved in zip(moves, (tasks.pulls, tasks.pushes), strict=True):
        expected |= grid(move, 0, blocks if moved else 0, PARTS[tasks.target])
    found = {key: n for key, n in found.items() if "weight-gradient" not in key[0] and key[0] != "none"}
    assert found == expected


@pytest.mark.parametrize("gradients", [pytest.param(g, id=f"bits {g}") for g in (0, 1, 2, 4, 8, 15)])
@every_count
def test_every_weight_gradient_is_stored_once_from_all_its_rows(counts, gradients):
    tasks = listing(counts, backward=True, gradients=gradients)
    rows, stored = collections.defaultdict(list), collections.Counter()
    for task in tasks.compute:
        if "weight-gradient" in task["op"]:
            key = (task["op"], task["expert"], task["tile"])
            assert task["carry_in"] == bool(rows[key]) or task["blocks"] == 0
            rows[key] += range(task["block"], task["block"] + task["blocks"])
            stored[key] += not task["carry_out"]
    tiles = {1: ("weight-gradient-gate-up", 2 * 3), 2: ("weight-gradient-down", 3 * 2)}
    for bit, (op, count) in tiles.items():
        for expert, tile in itertools.product(range(len(counts)), range(count)):
            key = (op, expert, tile)
            begin, end = tasks.offsets[expert] // TILE, tasks.offsets[expert + 1] // TILE
            assert rows.get(key, []) == list(range(begin, end)) * bool(gradients & bit)
            assert stored[key] == bool(gradients & bit)
    for bit, op in ((4, "shared weight-gradient-gate-up"), (8, "shared weight-gradient-down")):
        assert sum(n for key, n in stored.items() if key[0] == op) == 4 * bool(gradients & bit)


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
def test_an_expert_s_weights_are_read_in_one_go(backward):
    """Though a minibatch ends within it."""
    counts = [3, 2, 0, 3, 3, 1, 5]  # blocks
    dims = make_dims(tokens=17 * TILE, top_k=1, experts=7, row_tile=TILE, minibatch=4 * TILE, macrobatch=20 * TILE)
    offsets = np.cumsum([0, *counts]).astype(np.int32) * TILE
    pass_ = host.Pass(backward=backward, context=True, gradients=0)
    _, tasks, _ = host.list_tasks(dims, pass_, offsets, *TARGETS["pulling"])
    runs = [key for key, _ in itertools.groupby((t["op"], t["expert"]) for t in tasks)]
    assert len(runs) == len(set(runs)) == 2 * 6
    assert [op for op, _ in runs[:3]] != [runs[0][0]] * 3  # and stages take turns


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("experts", [1, 2, 5])
def test_results_of_the_first_rows_do_not_wait_for_a_large_expert_s_last(experts, backward):
    """Else few of them would be pushed while others are still multiplied."""
    blocks = 20
    dims = make_dims(
        tokens=blocks * TILE, top_k=1, experts=experts, ranks=2, row_tile=TILE, minibatch=4 * TILE, macrobatch=64 * TILE
    )
    offsets = (np.arange(experts + 1) * (blocks // experts) * TILE).astype(np.int32)
    pass_ = host.Pass(backward=backward, context=True, gradients=0)
    _, tasks, _ = host.list_tasks(dims, pass_, offsets, *TARGETS["pulling"])
    ops_of = [t["op"] for t in tasks]
    first, last = ("dgrad-down", "dgrad-gate-up") if backward else ("gate-up", "down")
    assert ops_of[: ops_of.index(last)].count(first) <= 2 / 5 * ops_of.count(first)


@pytest.mark.parametrize("columns", [5, 6])
def test_an_odd_last_row_stands_beside_its_columns(columns):
    dims = make_dims(tokens=40, top_k=1, experts=1, row_tile=TILE, minibatch=64, macrobatch=64, hidden=2 * columns)
    tiles = (4, 4, 2, 4, 4, 4, 4, 16, 0)
    _, tasks, _ = host.list_tasks(
        dims, host.Pass(backward=False, context=False, gradients=0), np.array([0, 40], np.int32), tiles, False
    )
    places = [(t["block"], t["tile"]) for t in tasks if t["op"] == "down"]
    assert sorted(places) == [(block, tile) for block in range(5) for tile in range(columns)]
    assert [tile // 2 for _, tile in places] == sorted(tile // 2 for _, tile in places)
    pairs = zip(places[::2], places[1::2], strict=False)
    assert all(one[0] == other[0] or one[1] == other[1] for one, other in pairs)  # they share an operand


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_between_ranks_the_first_and_the_last_tiles_are_of_few_blocks(ranks, backward):
    """Products begin when few rows have come, and when those of a forward pass end few are left to push."""
    counts = [32, 17, 16, 0]  # blocks; two groups of 16 make a run of 32
    sizes = dict(tokens=65 * TILE, top_k=1, experts=4, hidden=24, intermediate=24)
    dims = make_dims(**sizes, ranks=ranks, row_tile=TILE, minibatch=80 * TILE, macrobatch=80 * TILE)
    offsets = np.cumsum([0, *counts]).astype(np.int32) * TILE
    tiles = (4, 4, 4, 4, 4, 4, 4, 16, 18)
    _, tasks, _ = host.list_tasks(dims, host.Pass(backward=backward, context=True, gradients=0), offsets, tiles, False)
    first, last = ("dgrad-down", "dgrad-gate-up") if backward else ("gate-up", "down")
    begins = [t["block"] for t in tasks if t["op"] == first]
    ends = [t["block"] for t in tasks if t["op"] == last]
    assert begins.count(0) == ends.count(0) == 6
    few = len(set(begins[: 8 * 6])), len(set(ends[-4 * 6 :]))
    assert few == (8 if ranks == 2 else 16, 4 if ranks == 2 and not backward else 16)


def test_macrobatches_run_last_to_first_and_back():
    forward = [t["macrobatch"] for t in listing([70, 30]).compute if t["op"] == "gate-up"]
    backward = [t["macrobatch"] for t in listing([70, 30], backward=True).compute if t["op"] == "dgrad-down"]
    assert sorted(set(forward)) == [0, 1, 2, 3]
    assert forward == sorted(forward, reverse=True) and backward == sorted(backward)


# ---- the check itself: each wait is needed ----


def _kinds():
    """(variant, op, position of a wait in its task) of all waits of one listing with several macrobatches."""
    for variant in VARIANTS:
        tasks = listing(COUNTS["straddling"], **variant.values[0])
        seen = sorted({(t["op"], w) for t in tasks.communication + tasks.compute for w in range(len(t["waits"]))})
        for op, wait in seen:
            yield pytest.param(variant.values[0], op, wait, id=f"{variant.id}-{op}-{wait}")


@pytest.mark.parametrize("variant, op, wait", list(_kinds()))
def test_without_this_wait_some_order_is_wrong(variant, op, wait):
    for seed, counts, gradients in itertools.product(
        range(40), ("straddling", "straddling by a minibatch", "straddling twice, apart"), (15, 0)
    ):
        tasks = listing(COUNTS[counts], gradients=gradients, **variant)
        for task in tasks.communication + tasks.compute:
            if task["op"] == op and wait < len(task["waits"]):
                del task["waits"][wait]
        try:
            execute(tasks, seed)
        except AssertionError:
            return
    pytest.fail("every order was right without it: the wait is not needed, or the check does not see its hazard")

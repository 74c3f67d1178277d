"""What every process of the benchmark shares: shapes, routing, and how a call is timed. Needs numpy alone.

Used by bench_layer.py (JAX) and torch_layer.py (torch), so that both measure the same layer the same way.
"""

import dataclasses
import itertools
import math
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np

TENSORS = ("y", "d_x", "d_router_weights", "d_w_gate", "d_w_up", "d_w_down")
DIRECTIONS = ("forward", "forward+backward")
LIMIT = "matmul"
# The largest error of a tensor (of one expert's part of it, for the weights' gradients), relative to the
# reference's largest value there. Both round; bfloat16 rounds g, u, h and o on the way. In MXFP8 a value near the
# middle of two may go either way, to an eighth more or less.
BOUNDS = {"float32": 2e-5, "bfloat16": 4e-2, "mxfp8": 1e-1}
DTYPES = ("float32", "bfloat16")
CHECKED_TOKENS = 1024  # on a GPU: the reference would take minutes and all memory for all of them
ROUTINGS = ("uniform", "skewed")  # that can be asked for; "remote" needs several ranks

WARM_SECONDS, BATCH_SECONDS, SAMPLE_SECONDS, FEWEST_SAMPLES = 0.5, 0.02, 2.0, 3


@dataclasses.dataclass(frozen=True)
class Shape:
    """The sizes of one rank's layer."""

    tokens: int
    hidden: int
    intermediate: int
    experts: int
    top_k: int
    dtype: str

    @property
    def rows(self) -> int:
        return self.tokens * self.top_k

    @property
    def forward_flops(self) -> int:
        return 6 * self.rows * self.hidden * self.intermediate


# Those that other MoE kernels are measured at: tokens, hidden, intermediate, experts, top_k.
SHAPES = {
    "S1": Shape(8192, 7168, 2048, 32, 8, "bfloat16"),
    "S2": Shape(32768, 4096, 2048, 64, 4, "bfloat16"),
    "S3": Shape(32768, 4096, 1024, 128, 8, "bfloat16"),
    "S4": Shape(16384, 2048, 768, 128, 8, "bfloat16"),
}


def _choosable(shape: Shape, routing: str, ranks: int) -> np.ndarray:
    """Whether tokens may choose an expert: bool [tokens, experts], or [1, experts] where it is the same for all."""
    experts = np.arange(shape.experts)
    if routing == "skewed":
        return ((experts % 10 != 0) & (experts != 1))[None]
    if routing == "remote":
        return (np.arange(shape.tokens) * ranks // shape.tokens)[:, None] != experts * ranks // shape.experts
    return np.ones((1, shape.experts), bool)


def route_refusal(shape: Shape, routing: str, ranks: int = 1) -> str | None:
    """Why `route` cannot do that, or None."""
    left = _choosable(shape, routing, ranks).sum(axis=1).min()
    if left >= shape.top_k:
        return None
    return f"{routing} routing needs more experts: top_k {shape.top_k}, but only {left} are left"


def route(shape: Shape, routing: str = "uniform", ranks: int = 1, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Softmax top-k of normal logits: expert ids int32 and weights float32, both [tokens, top_k].

    "skewed": every tenth expert is idle, and a quarter of all routes, drawn at random, goes to expert 1. A token
    may then name that expert in several slots: with top_k 8 no distinct choice gives it a quarter of the rows.
    "remote": all routes leave their rank, more than leave it of uniform routing over any number of ranks.
    """
    if refusal := route_refusal(shape, routing, ranks):
        raise ValueError(refusal)
    rng = np.random.default_rng(seed)
    logits = rng.standard_normal((shape.tokens, shape.experts), np.float32)
    logits = np.where(_choosable(shape, routing, ranks), logits, -np.inf)
    ids = np.argpartition(-logits, shape.top_k - 1, axis=1)[:, : shape.top_k].astype(np.int32)
    scores = np.exp(logits)
    weights = np.take_along_axis(scores / scores.sum(axis=1, keepdims=True), ids, axis=1)
    if routing == "skewed":
        ids.reshape(-1)[rng.permutation(shape.rows)[: shape.rows // 4]] = 1
    return ids, weights


def busiest(ids: np.ndarray, experts: int, ranks: int) -> float:
    """Rows of the rank that has the most, by the mean over ranks. experts: of all ranks."""
    return float(np.bincount(ids.reshape(-1) * ranks // experts, minlength=ranks).max() * ranks / ids.size)


# ---- time ----


def steady(queue: Callable[[int], Any], wait: Callable[[Any], Any], clock: Callable[[], float] = time.perf_counter):
    """Milliseconds a call at steady power: samples of batches of at least 20 ms for 2 s, after 0.5 s of the same.

    A GPU throttles within a tenth of a second of work, so cold figures flatter, and times were seen to swing about once
    a second, of the layer by up to 2 % to either side (two H200s): 2 s are two swings. The next batch is queued before
    the host waits for the present one: between the first warm call and the last sample the GPU is never idle, and a
    sample is the time from the end of one batch to the end of the next. At least three, however slow the call.

    Args:
      queue: queues so many calls, already compiled, and returns something to wait for.
      wait: returns when what `queue` returned is done.
    """
    wait(queue(1))
    calls = 1
    for _ in range(2):  # the second time a batch: one call may meet a hiccup of the host
        began = clock()
        wait(queue(calls))
        once = max((clock() - began) / calls, 1e-6)
        calls = math.ceil(BATCH_SECONDS / once)
    pending, ends = queue(math.ceil(WARM_SECONDS / once)), []
    while len(ends) < FEWEST_SAMPLES or ends[-1] - ends[0] < SAMPLE_SECONDS:
        following = queue(calls)
        wait(pending)
        ends.append(clock())
        pending = following
    wait(pending)
    ends.append(clock())
    return [(end - start) / calls * 1e3 for start, end in itertools.pairwise(ends)]


def both_orders(sample: dict[str, Callable[[], list[float]]]) -> dict[str, dict[str, Any]]:
    """Samples every contender A..Z, then Z..A; the two medians are averaged, against drift over the run.

    A first round does not count: it compiles, and where a load begins after a pause, a GPU's power limiter overshoots
    for half a second, to a third of the speed (H200, 0.8 s after the first call).
    """
    names = list(sample)
    for name in names:
        sample[name]()
    times: dict[str, list[list[float]]] = {name: [] for name in names}
    for name in names + names[::-1]:
        times[name].append(sample[name]())
    return {
        name: {"median_ms": statistics.mean(map(statistics.median, runs)), "ms": runs} for name, runs in times.items()
    }

"""Times the MoE layer, forward and forward+backward, against its rivals in one run, and its memory against T.

    python benchmarks/bench_layer.py                                   # the default shape, a few minutes on two cores
    python benchmarks/bench_layer.py --tokens 512 --dtype bfloat16 --contenders host,ragged_dot
    python benchmarks/bench_layer.py --json out/layer.json --png out/layer.png
    python benchmarks/bench_layer.py --help

Every contender gets the same random normal tokens, the same experts and the same softmax top-k routing.
Before anything is timed, its y and gradients must agree with the package's reference. Contenders take
turns (A..Z, then Z..A) and medians are compared. "matmul" is the limit: three plain matmuls of the
layer's FLOPs and, backward, their six, without routing or activation. Memory is the growth of the
resident set in one forward+backward, each T in a process of its own.
"""

import argparse
import concurrent.futures
import ctypes
import dataclasses
import datetime
import functools
import itertools
import json
import multiprocessing
import os
import pathlib
import platform
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import mok_jax
from mok_jax.moe import IMPLEMENTATIONS, why_not

TENSORS = ("y", "d_x", "d_router_weights", "d_w_gate", "d_w_up", "d_w_down")
# The largest error of a tensor (of one expert's part of it, for the weights' gradients), relative to the
# reference's largest value there. Both round; bfloat16 rounds g, u, h and o on the way.
BOUNDS = {"float32": 2e-5, "bfloat16": 4e-2}
LINEAR = 1.25  # growing linearly: no more bytes a token over the last interval of T than this, times the first's


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
    def forward_flops(self) -> int:
        return 6 * self.tokens * self.top_k * self.hidden * self.intermediate


@dataclasses.dataclass(frozen=True)
class Problem:
    """What is measured: function(ids, *arguments) -> y, and y's cotangent."""

    function: Callable[..., Any]
    ids: jax.Array
    arguments: tuple[jax.Array, ...]
    d_y: Any


# ---- the contenders ----


def ragged_dot_layer(ids, x, router_weights, w_gate, w_up, w_down):
    """The layer as a JAX user writes it: sort by expert, three ragged_dots, unsort, weighted sum."""
    tokens, top_k = ids.shape
    order = jnp.argsort(ids.reshape(-1))
    counts = jnp.bincount(ids.reshape(-1), length=w_gate.shape[0]).astype(jnp.int32)
    rows = x[order // top_k]
    h = jax.nn.silu(lax.ragged_dot(rows, w_gate, counts)) * lax.ragged_dot(rows, w_up, counts)
    out = lax.ragged_dot(h, w_down, counts)[jnp.argsort(order)].reshape(tokens, top_k, -1)
    return jnp.einsum("tkh,tk->th", out, router_weights, preferred_element_type=jnp.float32).astype(x.dtype)


def dense_layer(ids, x, router_weights, w_gate, w_up, w_down):
    """Every token through every expert, then a one-hot weighted sum: experts / top_k times the FLOPs."""
    combine = jnp.einsum("tk,tke->te", router_weights, jax.nn.one_hot(ids, w_gate.shape[0], dtype=router_weights.dtype))
    h = jax.nn.silu(jnp.einsum("th,ehi->eti", x, w_gate)) * jnp.einsum("th,ehi->eti", x, w_up)
    weighted = (h * combine.T[:, :, None]).astype(x.dtype)
    return jnp.einsum("eti,eih->th", weighted, w_down)


def matmuls(ids, rows, h, w_gate, w_up, w_down):
    """The limit: nothing but the layer's matmuls, all rows through one expert."""
    del ids
    return rows @ w_gate, rows @ w_up, h @ w_down


def _package(implementation, config):
    def layer(ids, x, router_weights, *experts):
        return mok_jax.moe(x, ids, router_weights, *experts, implementation=implementation, config=config)

    return layer


CONTENDERS: dict[str, Callable[[mok_jax.MoKConfig], Callable[..., Any]]] = {
    "matmul": lambda config: matmuls,
    "cuda": functools.partial(_package, "cuda"),
    "host": functools.partial(_package, "host"),
    "xla": functools.partial(_package, "xla"),
    "ragged_dot": lambda config: ragged_dot_layer,
    "dense": lambda config: dense_layer,
}
LIMIT = "matmul"  # measured like a layer, but computes none: it is not checked
COLORS = {"cuda": "tab:red", "host": "tab:orange", LIMIT: "0.5", "xla": "tab:green", "dense": "tab:purple"}
MEMORY_CONTENDERS = "host,ragged_dot"


def make_problem(name: str, shape: Shape, config: mok_jax.MoKConfig, seed: int = 0) -> Problem:
    """The same random layer for every contender: N(0, 1) tokens, 1/sqrt(fan-in) weights."""
    tokens, hidden, width, experts = shape.tokens, shape.hidden, shape.intermediate, shape.experts
    keys = iter(jax.random.split(jax.random.key(seed), 8))

    def normal(*sizes, scale=1.0):
        return (jax.random.normal(next(keys), sizes) * scale).astype(shape.dtype)

    function = _package(name, config) if name not in CONTENDERS else CONTENDERS[name](config)
    if name == LIMIT:
        rows = tokens * shape.top_k
        weights = (normal(hidden, width), normal(hidden, width), normal(width, hidden))
        arguments = (normal(rows, hidden), normal(rows, width), *weights)
        d_y = (normal(rows, width), normal(rows, width), normal(rows, hidden))
        return Problem(function, jnp.zeros(()), arguments, d_y)
    x, d_y = normal(tokens, hidden), normal(tokens, hidden)
    scores = jax.nn.softmax(jax.random.normal(next(keys), (tokens, experts), jnp.float32))
    router_weights, ids = lax.top_k(scores, shape.top_k)
    gate, up = (normal(experts, hidden, width, scale=hidden**-0.5) for _ in range(2))
    down = normal(experts, width, hidden, scale=width**-0.5)
    return Problem(function, ids.astype(jnp.int32), (x, router_weights, gate, up, down), d_y)


def make_calls(problem: Problem) -> dict[str, functools.partial]:
    """The two passes as jitted calls without arguments; the second returns y and every gradient."""

    def both(ids, arguments, d_y):
        y, backward = jax.vjp(functools.partial(problem.function, ids), *arguments)
        return y, *backward(d_y)

    return {
        "forward": functools.partial(jax.jit(problem.function), problem.ids, *problem.arguments),
        "forward+backward": functools.partial(jax.jit(both), problem.ids, problem.arguments, problem.d_y),
    }


# ---- agreement ----


def check_agreement(name: str, shape: Shape, results, reference) -> dict[str, float]:
    """Each tensor's largest relative error; raises ValueError beyond the dtype's bound."""
    errors = {}
    for tensor, value, wanted in zip(TENSORS, results, reference, strict=True):
        value, wanted = np.asarray(value, np.float64), np.asarray(wanted, np.float64)
        axes = tuple(range(1, wanted.ndim)) if wanted.ndim == 3 else None  # an expert's gradient by itself
        difference = np.abs(value - wanted).max(axis=axes)
        size = np.abs(wanted).max(axis=axes)
        # An expert without rows has an exactly zero gradient; NaN is never within a bound.
        relative = np.where(difference == 0, 0.0, difference / np.maximum(size, np.finfo(np.float64).tiny))
        errors[tensor] = float(relative.max())
        if not errors[tensor] <= BOUNDS[shape.dtype]:
            raise ValueError(
                f"{name}: {tensor} must be within {BOUNDS[shape.dtype]} of the reference in {shape.dtype}, "
                f"got {errors[tensor]:.2e}"
            )
    return errors


# ---- time ----


def measure(calls: dict[str, functools.partial], repeats: int) -> dict[str, list[float]]:
    """Milliseconds of each call, contenders in turn: A..Z, Z..A, `repeats` times over."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        jax.block_until_ready(call())
    for names in itertools.chain.from_iterable((list(calls), list(calls)[::-1]) for _ in range(repeats)):
        for name in names:
            began = time.perf_counter()
            jax.block_until_ready(calls[name]())
            times[name].append((time.perf_counter() - began) * 1e3)
    return times


# ---- memory ----


def peak_bytes(name: str, shape: Shape, config: mok_jax.MoKConfig) -> tuple[int, int]:
    """Growth of the resident set in one forward+backward, and what XLA planned; in a fresh process."""
    problem = make_problem(name, shape, config)
    call: Any = make_calls(problem)["forward+backward"]
    jax.block_until_ready(problem.arguments)
    compiled = call.func.lower(*call.args).compile()
    planned = compiled.memory_analysis()
    ctypes.CDLL(None).malloc_trim(0)  # what compiling freed must not hide what running takes
    pathlib.Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts again from the present
    before = _status_bytes("VmRSS")
    jax.block_until_ready(compiled(*call.args))
    return _status_bytes("VmHWM") - before, planned.temp_size_in_bytes + planned.output_size_in_bytes


def _status_bytes(field: str) -> int:
    lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def measure_memory(names: list[str], shape: Shape, config: mok_jax.MoKConfig) -> dict[str, dict[str, Any]]:
    """Peak bytes at half, once, twice and four times the tokens, and whether they grow linearly."""
    sizes = [max(1, shape.tokens * factor // 2) for factor in (1, 2, 4, 8)]
    result: dict[str, dict[str, Any]] = {}
    for name in names:
        points = []
        for tokens in sizes:
            spawn = multiprocessing.get_context("spawn")
            with concurrent.futures.ProcessPoolExecutor(1, mp_context=spawn) as pool:
                points.append(pool.submit(peak_bytes, name, dataclasses.replace(shape, tokens=tokens), config).result())
        resident = [point[0] for point in points]
        per_token = [(b - a) / (u - t) for a, b, t, u in zip(resident, resident[1:], sizes, sizes[1:], strict=False)]
        result[name] = {
            "tokens": sizes,
            "resident_bytes": resident,
            "xla_planned_bytes": [point[1] for point in points],
            "bytes_per_further_token": per_token,
            "linear": per_token[-1] <= LINEAR * per_token[0],
        }
    return result


# ---- reports ----


def machine() -> dict[str, Any]:
    """What a measured number must be quoted with."""
    lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())
    return {
        "date": datetime.date.today().isoformat(),
        "cpu": model,
        "cores": len(os.sched_getaffinity(0)),
        "platform": jax.default_backend(),
        "python": platform.python_version(),
        "jax": jax.__version__,
    }


def table(report: dict[str, Any]) -> str:
    """The short table that ends a run."""
    lines = [
        "T {tokens}, H {hidden}, I {intermediate}, E {experts}, K {top_k}, {dtype}; ".format(**report["shape"])
        + "{cores} cores of {cpu}, jax {jax}, {date}".format(**report["machine"])
    ]
    for name, point in report["memory"].items():
        points = zip(point["tokens"], point["resident_bytes"], strict=True)
        sizes = ", ".join(f"{b / 2**20:.0f} at T {t}" for t, b in points)
        slopes = ", ".join(f"{b / 1024:.1f}" for b in point["bytes_per_further_token"])
        verdict = "linearly" if point["linear"] else "FASTER than linearly"
        lines.append(f"memory of {name}, MiB: {sizes}; KiB a further token: {slopes}: grows {verdict} with T")
    names = list(report["forward"])
    rivals = [name for name in (LIMIT, *IMPLEMENTATIONS) if name in names][:2]
    width = max(map(len, names)) + 2
    header = "".join(f"{'/ ' + rival:>12}" for rival in rivals)
    lines.append(f"{'':{width}}" + "".join(f"{title:>18}{header}" for title in ("forward ms", "fwd+bwd ms")))
    for name in names:
        row = f"{name:{width}}"
        for direction in ("forward", "forward+backward"):
            median = report[direction][name]["median_ms"]
            ratios = "".join(f"{median / report[direction][rival]['median_ms']:12.2f}" for rival in rivals)
            row += f"{median:18.2f}{ratios}"
        lines.append(row)
    return "\n".join(lines)


def draw(path: pathlib.Path, report: dict[str, Any]) -> None:
    """Bars of both passes, and memory over T where it was measured."""
    from matplotlib.figure import Figure  # only here: the benchmark itself needs no matplotlib

    panels = 2 + bool(report["memory"])
    figure = Figure(figsize=(4.5 * panels, 3.5), layout="constrained")
    axes = figure.subplots(1, panels)
    for axis, direction in zip(axes, ("forward", "forward+backward"), strict=False):
        names = list(report[direction])[::-1]
        medians = [report[direction][name]["median_ms"] for name in names]
        bars = axis.barh(names, medians, color=[COLORS.get(name, "tab:blue") for name in names])
        axis.bar_label(bars, [f"{median:,.1f}" for median in medians], padding=3)
        axis.margins(x=0.25)
        axis.set(title=direction, xlabel="ms, median")
    for name, point in report["memory"].items():
        mebibytes = [b / 2**20 for b in point["resident_bytes"]]
        axes[-1].plot(point["tokens"], mebibytes, marker="o", label=name, color=COLORS.get(name, "tab:blue"))
    if report["memory"]:
        axes[-1].set(title="peak memory, forward+backward", xlabel="tokens", ylabel="MiB", xlim=0, ylim=0)
        axes[-1].legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


# ---- the command line ----


def parse(arguments: list[str] | None) -> tuple[argparse.Namespace, Shape, mok_jax.MoKConfig]:
    """The command line; wrong values end the program with one line."""
    head = __doc__.splitlines()[0]
    parser = argparse.ArgumentParser(description=head, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    for flag, default in (("tokens", 2048), ("hidden", 512), ("intermediate", 1024), ("experts", 16), ("top-k", 2)):
        parser.add_argument(f"--{flag}", type=int, default=default, metavar="N", help="a size of the layer")
    parser.add_argument("--dtype", choices=tuple(BOUNDS), default="float32", help="of tokens and weights")
    for flag in ("row-tile", "minibatch", "macrobatch", "num-threads"):
        parser.add_argument(f"--{flag}", type=int, metavar="N", help="MoKConfig's field of that name")
    parser.add_argument("--contenders", default=",".join(CONTENDERS), help="those that run, and their order")
    parser.add_argument("--repeats", type=int, default=3, metavar="N", help="rounds, A..Z and Z..A in each")
    parser.add_argument("--memory", default=MEMORY_CONTENDERS, help="contenders whose memory is measured; '' for none")
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE", help="every time and byte goes there too")
    parser.add_argument("--png", type=pathlib.Path, metavar="FILE", help="a picture of the medians goes there")
    options = parser.parse_args(arguments)
    try:
        options.contenders = _names("--contenders", options.contenders)
        options.memory = _names("--memory", options.memory)
        sizes = {field.name: getattr(options, field.name) for field in dataclasses.fields(Shape)}
        for name, size in (*sizes.items(), ("repeats", options.repeats)):
            if isinstance(size, int) and size < 1:
                raise ValueError(f"--{name.replace('_', '-')} must be at least 1, got {size}")
        if options.top_k > options.experts:
            raise ValueError(f"--top-k must be at most --experts {options.experts}, got {options.top_k}")
        config = mok_jax.MoKConfig(
            row_tile=options.row_tile,
            minibatch=options.minibatch,
            macrobatch=options.macrobatch,
            num_threads=options.num_threads,
        )
    except ValueError as error:
        parser.exit(2, f"bench_layer: {error}\n")
    return options, Shape(**sizes), config


def _names(flag: str, text: str) -> list[str]:
    """The named contenders without those that cannot run on these devices, with the reason on stderr."""
    names = [name for name in text.split(",") if name]
    unknown = [name for name in names if name not in CONTENDERS]
    if unknown:
        raise ValueError(f"{flag} must name some of {', '.join(CONTENDERS)}, got {unknown[0]!r}")
    refused = {name: why_not(name) for name in names if name in IMPLEMENTATIONS}
    for name, reason in refused.items():
        if reason is not None:
            print(f"{name} left out: {reason}", file=sys.stderr)
    return [name for name in names if refused.get(name) is None]


def main(arguments: list[str] | None = None) -> None:
    """Checks, times, and reports."""
    options, shape, config = parse(arguments)
    report: dict[str, Any] = {
        "machine": machine(),
        "shape": dataclasses.asdict(shape),
        "forward_flops": shape.forward_flops,
        "config": dataclasses.asdict(config),
        "agreement": {},
        "memory": measure_memory(options.memory, shape, config),
    }
    calls = {name: make_calls(make_problem(name, shape, config)) for name in options.contenders}
    reference = jax.device_get(make_calls(make_problem("reference", shape, config))["forward+backward"]())
    for name in calls:
        if name != LIMIT:
            report["agreement"][name] = check_agreement(name, shape, calls[name]["forward+backward"](), reference)
    worst = ", ".join(f"{name} {max(errors.values()):.1e}" for name, errors in report["agreement"].items())
    print(f"y and gradients agree with the reference within {BOUNDS[shape.dtype]}: {worst}", flush=True)
    for direction in ("forward", "forward+backward"):
        times = measure({name: passes[direction] for name, passes in calls.items()}, options.repeats)
        report[direction] = {name: {"median_ms": statistics.median(ms), "ms": ms} for name, ms in times.items()}
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(report, indent=1) + "\n")
    if options.png:
        draw(options.png, report)
    print(table(report))


if __name__ == "__main__":
    main()

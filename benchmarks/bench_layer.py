"""Times the MoE layer, forward and forward+backward, against its rivals in one run, and its memory.

    python benchmarks/bench_layer.py                                   # the default shape, a few minutes on two cores
    python benchmarks/bench_layer.py --tokens 512 --dtype bfloat16 --contenders host,ragged_dot
    python benchmarks/bench_layer.py --json out/layer.json --png out/layer.png
    python benchmarks/bench_layer.py --shape S1                        # on a GPU, about a minute
    python benchmarks/bench_layer.py --help

Every contender gets random normal tokens, the same routing and experts of the same distribution. Before anything is
timed, its y and gradients must agree with the package's reference, on a GPU for the first 1024 tokens. "matmul" is
the limit: plain matmuls of the layer's FLOPs and, backward, their gradients, without routing or activation.

On a CPU contenders take turns (A..Z, then Z..A) and medians are compared; memory is the growth of the resident set
in one forward+backward, each T in a process of its own. On a GPU they are timed at steady power (protocol.py), JAX
rivals, torch rivals and XLA's ragged_dot each in a process of their own, beside that process's measurement of the
limit; memory is the device's peak in one forward+backward against the README's formula.
"""

import argparse
import dataclasses
import datetime
import functools
import itertools
import json
import os
import pathlib
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from typing import Any

# This process asks what the GPU is while others measure on it.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jax
from memory import measure_growth, measure_peak
from problem import check_agreement, make_calls, make_problem, reference, results_to_check
from protocol import BOUNDS, DIRECTIONS, LIMIT, ROUTINGS, SHAPES, Shape, both_orders, steady
from report import draw, table
from rivals import CONTENDERS

import mok_jax
from mok_jax.moe import IMPLEMENTATIONS, why_not

DEFAULT = Shape(2048, 512, 1024, 16, 2, "float32")
ON_CPU = "matmul,cuda,host,xla,ragged_dot,dense"
ON_GPU = "matmul,cuda,cuda_skewed,pallas_mgpu,tokamax,torch_tuned,torch_compile,ragged_dot"
CONFIG = ("row_tile", "minibatch", "macrobatch", "num_threads")
# On a GPU: the process that measures a contender, and the seconds after which it is ended.
TORCH, SLOW, JAX = "torch", "xla", "jax"
PROCESSES = {TORCH: 180, SLOW: 60, JAX: 240}
DENSEST = 8  # "dense" is left out where it does more than so many times the layer's work


def process_of(name: str) -> str:
    """Where a contender runs on a GPU: what may never finish runs alone."""
    if name.startswith("torch_"):
        return TORCH
    return SLOW if name in ("ragged_dot", "xla", "dense") else JAX


# ---- CPU ----


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


# ---- GPU ----


def sampler(call: functools.partial):
    """One contender for `both_orders`."""

    def queue(calls: int):
        for _ in range(calls):
            results = call()
        return results

    return functools.partial(steady, queue, jax.block_until_ready)


def run_process(process: str, names: list[str], shape: Shape, options: argparse.Namespace) -> dict[str, Any]:
    """The report of a process of its own with these contenders; without times where it failed or took too long."""
    here = pathlib.Path(__file__).parent
    with tempfile.TemporaryDirectory() as folder:
        result = pathlib.Path(folder) / "report.json"
        arguments = ["--contenders", ",".join([LIMIT, *names]), "--routing", options.routing, "--json", str(result)]
        if process == TORCH:
            command = ["torch_layer.py", "--sizes", json.dumps(dataclasses.asdict(shape))]
        else:
            sizes = dataclasses.asdict(shape) | {name: getattr(options, name) for name in CONFIG}
            command = ["bench_layer.py", "--process", process]
            command += [f"--{name.replace('_', '-')}={value}" for name, value in sizes.items() if value is not None]
        child = subprocess.Popen(
            [sys.executable, str(here / command[0]), *command[1:], *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        try:
            output, _ = child.communicate(timeout=PROCESSES[process])
            reason = f"its process ended with {child.returncode}: {(output.strip().splitlines() or [''])[-1]}"
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, signal.SIGKILL)
            output, _ = child.communicate()
            reason = f"did not finish in {PROCESSES[process]} s"
        report = json.loads(result.read_text()) if result.exists() else None
    if report is None or report["left_out"]:
        print(output[-5000:], file=sys.stderr)
    return report or {
        "agreement": {},
        "left_out": dict.fromkeys(names, reason),
        **{direction: {} for direction in DIRECTIONS},
    }


def merge(report: dict[str, Any], process: str, part: dict[str, Any]) -> None:
    """Adds what a process measured; its limit under a name of its own."""
    for key in ("agreement", "left_out"):
        report[key] |= {name: value for name, value in part[key].items() if name != LIMIT}
    report["peak"] = part.get("peak") or report["peak"]
    for direction in DIRECTIONS:
        for name, point in part[direction].items():
            report[direction][f"{LIMIT} in {process}" if name == LIMIT else name] = point


def add_rates(report: dict[str, Any], shape: Shape) -> None:
    """TFLOP/s, and the share of the limit."""
    for direction, flops in zip(DIRECTIONS, (shape.forward_flops, 3 * shape.forward_flops), strict=True):
        limit = report[direction].get(LIMIT)
        for point in report[direction].values():
            point["tflops"] = flops / point["median_ms"] / 1e9
            if limit:
                point["share"] = limit["median_ms"] / point["median_ms"]


# ---- both ----


def prepare(report: dict[str, Any], names: list[str], shape: Shape, config, routing: str):
    """Each contender's two passes, checked. The package must be right; a rival that fails is left out."""
    calls: dict[str, dict[str, functools.partial]] = {}
    wanted: tuple[Any, Any] = (None, None)
    # Nothing may have run on the device before "cuda", whose peak memory counts; what shares a reference follows it.
    for name in sorted(names, key=lambda name: (name != "cuda", CONTENDERS[name].routing is not None)):
        contender = CONTENDERS[name]
        try:
            passes = make_calls(make_problem(name, shape, config, routing))
            if name == "cuda":
                report["peak"] = measure_peak(shape, config, passes[DIRECTIONS[1]])
            if name != LIMIT:
                its_routing = contender.routing or routing
                if wanted[0] != its_routing:
                    wanted = its_routing, reference(shape, config, its_routing)
                results = results_to_check(shape, passes[DIRECTIONS[1]])
                report["agreement"][name] = check_agreement(name, shape, results, wanted[1])
            calls[name] = passes
        except Exception as error:
            if contender.of_package:
                raise
            traceback.print_exc()
            report["left_out"][name] = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
    return {name: calls[name] for name in names if name in calls}


def measure_here(report: dict[str, Any], names: list[str], shape: Shape, config, options: argparse.Namespace) -> None:
    """Checks and times the contenders in this process."""
    calls = prepare(report, names, shape, config, options.routing)
    for direction in DIRECTIONS:
        passes = {name: calls[name][direction] for name in calls}
        if jax.default_backend() == "cpu":
            times = measure(passes, options.repeats)
            report[direction] = {name: {"median_ms": statistics.median(ms), "ms": ms} for name, ms in times.items()}
        else:
            report[direction] = both_orders({name: sampler(call) for name, call in passes.items()})


def machine() -> dict[str, Any]:
    """What a measured number must be quoted with."""
    lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())
    return {
        "date": datetime.date.today().isoformat(),
        "cpu": model,
        "cores": len(os.sched_getaffinity(0)),
        "platform": jax.default_backend(),
        "device": jax.devices()[0].device_kind,
        "python": platform.python_version(),
        "jax": jax.__version__,
    }


# ---- the command line ----


def parse(arguments: list[str] | None) -> tuple[argparse.Namespace, Shape, mok_jax.MoKConfig]:
    """The command line; wrong values end the program with one line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=SHAPES, help="these sizes, unless given below: " + _describe_shapes())
    for field in dataclasses.fields(Shape):
        kind: dict[str, Any] = dict(choices=tuple(BOUNDS)) if field.name == "dtype" else dict(type=int, metavar="N")
        default = getattr(DEFAULT, field.name)
        parser.add_argument(f"--{field.name.replace('_', '-')}", help=f"default without --shape: {default}", **kind)
    for name in CONFIG:
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, metavar="N", help="MoKConfig's field of that name")
    parser.add_argument("--contenders", help=f"those that run, and their order; default: {ON_CPU}; GPU: {ON_GPU}")
    parser.add_argument("--routing", choices=ROUTINGS, default="uniform", help="of all contenders but cuda_skewed")
    parser.add_argument("--repeats", type=int, default=3, metavar="N", help="CPU: rounds, A..Z and Z..A in each")
    parser.add_argument(
        "--memory", default="host,ragged_dot", help="CPU: contenders whose memory is measured; '' for none"
    )
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE", help="every time and byte goes there too")
    parser.add_argument("--png", type=pathlib.Path, metavar="FILE", help="a picture of the medians goes there")
    parser.add_argument("--process", choices=PROCESSES, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    try:
        base = SHAPES[options.shape] if options.shape else DEFAULT
        given = {field.name: getattr(options, field.name) for field in dataclasses.fields(Shape)}
        shape = dataclasses.replace(base, **{name: value for name, value in given.items() if value is not None})
        for name, size in (*dataclasses.asdict(shape).items(), ("repeats", options.repeats)):
            if isinstance(size, int) and size < 1:
                raise ValueError(f"--{name.replace('_', '-')} must be at least 1, got {size}")
        if shape.top_k > shape.experts:
            raise ValueError(f"--top-k must be at most --experts {shape.experts}, got {shape.top_k}")
        config = mok_jax.MoKConfig(**{name: getattr(options, name) for name in CONFIG})
        default = ON_CPU if jax.default_backend() == "cpu" else ON_GPU
        named = _names("--contenders", options.contenders or default, shape)
        options.contenders = [name for name, reason in named.items() if reason is None]
        options.left_out = {name: reason for name, reason in named.items() if reason is not None}
        named = _names("--memory", options.memory, shape)
        on_cpu = jax.default_backend() == "cpu"
        options.memory = [name for name, reason in named.items() if on_cpu and reason is None]
    except ValueError as error:
        parser.exit(2, f"bench_layer: {error}\n")
    return options, shape, config


def _describe_shapes() -> str:
    return "; ".join(f"{name} {', '.join(map(str, dataclasses.astuple(shape)))}" for name, shape in SHAPES.items())


def _names(flag: str, text: str, shape: Shape) -> dict[str, str | None]:
    """The named contenders, each with why it cannot run here, or None where it can."""
    names = [name for name in text.split(",") if name]
    known = [*CONTENDERS, "torch_tuned", "torch_compile"]
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ValueError(f"{flag} must name some of {', '.join(known)}, got {unknown[0]!r}")
    return {name: _why_not(name, shape) for name in names}


def _why_not(name: str, shape: Shape) -> str | None:
    if name == "dense" and shape.experts > DENSEST * shape.top_k:
        return f"it does {shape.experts / shape.top_k:g} times the layer's work, more than {DENSEST} times"
    if name.startswith(("torch_", "pallas_", "tokamax")) and jax.default_backend() == "cpu":
        return "it needs a GPU"
    implementation = name.removesuffix("_skewed")
    return why_not(implementation) if implementation in IMPLEMENTATIONS else None


def main(arguments: list[str] | None = None) -> None:
    """Checks, times, and reports."""
    options, shape, config = parse(arguments)
    report: dict[str, Any] = {
        "machine": machine(),
        "shape": dataclasses.asdict(shape),
        "routing": options.routing,
        "forward_flops": shape.forward_flops,
        "config": dataclasses.asdict(config),
        "agreement": {},
        "left_out": dict(options.left_out),
        "memory": measure_growth(options.memory, shape, config),
        "peak": None,
        **{direction: {} for direction in DIRECTIONS},
    }
    if jax.default_backend() == "cpu" or options.process:
        measure_here(report, options.contenders, shape, config, options)
        add_rates(report, shape)
    else:
        for process in PROCESSES:
            names = [name for name in options.contenders if name != LIMIT and process_of(name) == process]
            if names:
                part = run_process(process, names, shape, options)
                add_rates(part, shape)
                merge(report, process, part)
    worst = ", ".join(f"{name} {max(errors.values()):.1e}" for name, errors in report["agreement"].items())
    print(f"y and gradients agree with the reference within {BOUNDS[shape.dtype]}: {worst}", flush=True)
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(report, indent=1) + "\n")
    if options.png:
        draw(options.png, report)
    print(table(report))
    failed = {"cuda", "cuda_skewed"} & (report["left_out"].keys() - options.left_out.keys())
    if failed:
        sys.exit(f"bench_layer: {', '.join(sorted(failed))} failed")


if __name__ == "__main__":
    main()

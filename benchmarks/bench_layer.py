"""Times the MoE layer, forward and forward+backward, against its rivals in one run, and its memory.

    python benchmarks/bench_layer.py                                   # the default shape, a few minutes on two cores
    python benchmarks/bench_layer.py --tokens 512 --dtype bfloat16 --contenders host,ragged_dot
    python benchmarks/bench_layer.py --json out/layer.json --png out/layer.png
    python benchmarks/bench_layer.py --shape S1                        # on a GPU, some minutes
    python benchmarks/bench_layer.py --shape S1 --gpus 2               # expert-parallel, the shape on each of them
    python benchmarks/bench_layer.py --help

Every contender gets random normal tokens, the same routing and experts of the same distribution. Before anything is
timed, its y and gradients must agree with the package's reference, on a GPU for the first 1024 tokens. "matmul" is
the limit: plain matmuls of the layer's FLOPs and, backward, their gradients, without routing or activation.

On a CPU contenders take turns (A..Z, then Z..A) and medians are compared; memory is the growth of the resident set
in one forward+backward, each T in a process of its own. On a GPU they are timed at steady power (protocol.py), JAX
rivals, torch rivals and XLA's ragged_dot each in a process of their own, beside that process's measurement of the
limit; memory is the device's peak in one forward+backward against the README's formula.

With --gpus the mesh has one axis, of experts, every rank has a layer of the shape (so the work of a GPU stays), and
rates are of one GPU. "matmul" runs on all at once, as does "cuda_alone", in which each has the layer to itself; all
rows of "cuda_remote" leave their rank; rivals exchange rows through NCCL. The reference is compared with on the first
tokens of each rank, 1024 in all.
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
from collections.abc import Callable
from typing import Any

# This process asks what the GPU is while others measure on it.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jax
import numpy as np
from jax.sharding import Mesh
from memory import dims_of, measure_growth, measure_peak, pulled_bytes
from problem import check_agreement, make_calls, make_problem, ranks_of, reference, results_to_check
from protocol import (
    BOUNDS,
    DIRECTIONS,
    DTYPES,
    LIMIT,
    ROUTINGS,
    SHAPES,
    Shape,
    both_orders,
    busiest,
    route_refusal,
    steady,
)
from report import draw, table
from rivals import CONTENDERS, quantize, rows_of_room

import mok_jax
from mok_jax import distributed
from mok_jax.moe import IMPLEMENTATIONS, why_not

DEFAULT = Shape(2048, 512, 1024, 16, 2, "float32")
ON_CPU = "matmul,cuda,host,xla,ragged_dot,dense"
ON_GPU = "matmul,cuda,cuda_mxfp8,cuda_skewed,pallas_mgpu,tokamax,torch_tuned,torch_compile,ragged_dot"
ON_GPUS = "matmul,cuda,cuda_alone,cuda_mxfp8,cuda_skewed,cuda_remote,nccl_dense,nccl_ragged,xla"
GROWING = "host,ragged_dot"
CONFIG = ("row_tile", "minibatch", "macrobatch", "num_threads")
# On a GPU: the process that measures a contender, and the seconds after which it is ended.
TORCH, SLOW, JAX = "torch", "xla", "jax"
PROCESSES = {TORCH: 180, SLOW: 120, JAX: 300, "nccl_dense": 180, "nccl_ragged": 180}
MXFP8_BYTES = "the bytes of cuda_mxfp8"  # in `left_out`
DENSEST = 8  # "dense" is left out where it does more than so many times the layer's work


def process_of(name: str) -> str:
    """Where a contender runs on a GPU: what may never finish runs alone."""
    if name.startswith("torch_"):
        return TORCH
    if name in PROCESSES:
        return name
    return SLOW if name in ("ragged_dot", "xla", "dense") else JAX


def why(error: Exception) -> str:
    """In one line; of XLA's many the one that says which memory there was not."""
    lines = str(error).splitlines() or [""]
    return f"{type(error).__name__}: {next((line for line in lines if 'Out of memory' in line), lines[0])}"


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
            sizes = dataclasses.asdict(shape) | {name: getattr(options, name) for name in ("gpus", *CONFIG)}
            command = ["bench_layer.py", "--process", process]
            command += [f"--{name.replace('_', '-')}={value}" for name, value in sizes.items() if value is not None]
        child = subprocess.Popen(
            [sys.executable, str(here / command[0]), *command[1:], *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            # XLA must not map memory while a GPU waits for another.
            env=os.environ | ({"XLA_PYTHON_CLIENT_PREALLOCATE": "true"} if options.gpus > 1 else {}),
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
    for key in ("peak", "mxfp8", "busiest"):
        report[key] = part.get(key) or report[key]
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


def measure_mxfp8(report: dict[str, Any], shape: Shape, config: mok_jax.MoKConfig, save: Callable[[], None]) -> None:
    """What a step of training does once, quantising the weights, in ms; and bytes that are pulled, by precision.

    However it ends, the times that are in the report stay: they are saved before.
    """
    report["left_out"][MXFP8_BYTES] = "its process ended before they were measured"
    save()
    try:
        call = functools.partial(quantize, make_problem("cuda", shape, config).arguments[2:])
        report["mxfp8"] = {
            "quantize_ms": statistics.median(sampler(call)()),
            "pulled_bytes": {str(precision): pulled_bytes(shape, config, precision) for precision in (None, "mxfp8")},
        }
        del report["left_out"][MXFP8_BYTES]
    except Exception as error:
        traceback.print_exc()
        report["left_out"][MXFP8_BYTES] = why(error)


# ---- both ----


def by_reference(names: list[str]) -> list[str]:
    """In the order of the checks. Nothing may have run on the device before "cuda", whose peak memory counts; what
    shares a reference follows one another, first by what it is compiled for."""

    def key(name: str):
        contender = CONTENDERS[name]
        return name != "cuda", contender.alone, contender.precision is not None, contender.routing is not None

    return sorted(names, key=key)


def prepare(report: dict[str, Any], names: list[str], shape: Shape, config, routing: str, mesh: Mesh | None = None):
    """Each contender's two passes, checked. The package must be right; a rival that fails is left out."""
    calls: dict[str, dict[str, functools.partial]] = {}
    wanted: tuple[Any, Any] = (None, None)
    for name in by_reference(names):
        contender = CONTENDERS[name]
        asked_routing = contender.routing or routing
        try:
            problem = make_problem(name, shape, config, routing, mesh)
            passes = make_calls(problem)
            if asked_routing == "skewed" and name in ("cuda", "cuda_skewed"):
                report["busiest"] = busiest(np.asarray(problem.ids), len(problem.arguments[2]), ranks_of(mesh))
            if name == "cuda" and mesh is None:
                report["peak"] = measure_peak(shape, config, passes[DIRECTIONS[1]])
            if name != LIMIT:
                asked = asked_routing, contender.precision, mesh, contender.alone
                if wanted[0] != asked:
                    wanted = asked, reference(shape, config, *asked)
                results = results_to_check(shape, passes[DIRECTIONS[1]])
                report["agreement"][name] = check_agreement(name, shape, results, wanted[1], contender.precision)
            calls[name] = passes
        except Exception as error:
            if contender.of_package:
                raise
            traceback.print_exc()
            report["left_out"][name] = why(error)
    return {name: calls[name] for name in names if name in calls}


def measure_here(report: dict[str, Any], names: list[str], shape: Shape, config, options: argparse.Namespace) -> None:
    """Checks and times the contenders in this process."""
    mesh = None
    if options.gpus > 1:
        mesh = Mesh(np.array(jax.devices()[: options.gpus]), ("expert",))
        if any(name.startswith("cuda") for name in names):  # their arenas, before anything runs
            sizes = dict(tokens=shape.tokens, hidden=shape.hidden, top_k=shape.top_k, dtype=shape.dtype)
            distributed.initialize(mesh, **sizes)
    calls = prepare(report, names, shape, config, options.routing, mesh)
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
        kind: dict[str, Any] = dict(choices=DTYPES) if field.name == "dtype" else dict(type=int, metavar="N")
        default = getattr(DEFAULT, field.name)
        parser.add_argument(f"--{field.name.replace('_', '-')}", help=f"default without --shape: {default}", **kind)
    for name in CONFIG:
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, metavar="N", help="MoKConfig's field of that name")
    parser.add_argument("--gpus", type=int, default=1, metavar="N", help="ranks of an expert axis, a layer on each")
    text = f"those that run, and their order; default on a CPU: {ON_CPU}; GPU: {ON_GPU}; several: {ON_GPUS}"
    parser.add_argument("--contenders", help=text)
    text = "of all contenders but cuda_skewed and cuda_remote"
    parser.add_argument("--routing", choices=ROUTINGS, default="uniform", help=text)
    parser.add_argument(
        "--repeats", type=int, default=3, metavar="N", help="CPU: rounds, A..Z and Z..A in each; default 3"
    )
    text = f"CPU: contenders whose memory is measured, on one device; '' for none; default: {GROWING}"
    parser.add_argument("--memory", help=text)
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE", help="every time and byte goes there too")
    parser.add_argument("--png", type=pathlib.Path, metavar="FILE", help="a picture of the medians goes there")
    parser.add_argument("--process", choices=PROCESSES, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    try:
        base = SHAPES[options.shape] if options.shape else DEFAULT
        given = {field.name: getattr(options, field.name) for field in dataclasses.fields(Shape)}
        shape = dataclasses.replace(base, **{name: value for name, value in given.items() if value is not None})
        given = dict(repeats=options.repeats, gpus=options.gpus)
        for name, size in (dataclasses.asdict(shape) | given).items():
            if isinstance(size, int) and size < 1:
                raise ValueError(f"--{name.replace('_', '-')} must be at least 1, got {size}")
        if shape.top_k > shape.experts:
            raise ValueError(f"--top-k must be at most --experts {shape.experts}, got {shape.top_k}")
        if options.gpus > jax.device_count():
            raise ValueError(f"--gpus must be at most the {jax.device_count()} devices here, got {options.gpus}")
        config = mok_jax.MoKConfig(**{name: getattr(options, name) for name in CONFIG})
        default = ON_CPU if jax.default_backend() == "cpu" else ON_GPU if options.gpus == 1 else ON_GPUS
        named = _names("--contenders", options.contenders or default, shape, options)
        options.contenders = [name for name, reason in named.items() if reason is None]
        options.left_out = {name: reason for name, reason in named.items() if reason is not None}
        if not options.contenders:
            reasons = "; ".join(f"{name}: {reason}" for name, reason in named.items())
            raise ValueError(f"none of --contenders can run here: {reasons or 'there is none'}")
        for implementation in {"host", "cuda"} & {name.split("_")[0] for name in options.contenders}:
            dims_of(shape, config, implementation).plan()  # what the package says to the sizes, before there are arrays
        measures = jax.default_backend() == "cpu" and options.gpus == 1
        if options.memory and not measures:
            raise ValueError("--memory is of one CPU device; on a GPU the peak is measured anyway")
        grow = _names("--memory", GROWING if options.memory is None else options.memory, shape, options)
        if options.memory and any(grow.values()):
            raise ValueError("--memory: " + "; ".join(f"{name}: {reason}" for name, reason in grow.items() if reason))
        options.memory = [name for name, reason in grow.items() if measures and reason is None]
        for flag, path in (("--json", options.json), ("--png", options.png)):
            _check_writable(flag, path)
    except ValueError as error:
        parser.exit(2, f"bench_layer: {error}\n")
    return options, shape, config


def _check_writable(flag: str, path: pathlib.Path | None) -> None:
    """Before anything is measured. Makes the folder, but not the file: one that is there is a report."""
    if path is None:
        return
    if flag == "--png" and path.suffix != ".png":
        raise ValueError(f"--png must end in .png, got {path}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"{flag}: {path.parent} cannot be made: {error.strerror}") from error
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ValueError(f"{flag}: {path} cannot be written")


def _describe_shapes() -> str:
    return "; ".join(f"{name} {', '.join(map(str, dataclasses.astuple(shape)))}" for name, shape in SHAPES.items())


def _names(flag: str, text: str, shape: Shape, options: argparse.Namespace) -> dict[str, str | None]:
    """The named contenders, each with why it cannot run here, or None where it can."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    known = [*CONTENDERS, "torch_tuned", "torch_compile"]
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ValueError(f"{flag} must name some of {', '.join(known)}, got {unknown[0]!r}")
    return {name: _why_not(name, shape, options) for name in names}


def _why_not(name: str, shape: Shape, options: argparse.Namespace) -> str | None:
    if options.gpus > 1 and not (name in CONTENDERS and CONTENDERS[name].several):
        return "it runs on one GPU; nccl_dense and nccl_ragged are for several"
    contender = CONTENDERS.get(name, CONTENDERS[LIMIT])
    if options.gpus == 1 and (name.startswith("nccl_") or contender.alone or contender.routing == "remote"):
        return "it needs --gpus 2 or more"
    whole = dataclasses.replace(shape, tokens=options.gpus * shape.tokens, experts=options.gpus * shape.experts)
    if name != LIMIT and (refusal := route_refusal(whole, contender.routing or options.routing, options.gpus)):
        return refusal
    if name.startswith("nccl_") and options.routing != "uniform":
        return "it has room for uniform routing only"
    balanced = shape.rows / options.gpus  # rows from a rank to a rank; fewer vary more
    if name.startswith("nccl_") and rows_of_room(shape.rows) // options.gpus < balanced + 5 * balanced**0.5:
        return "so few rows may not fit its room for 17/16 of the balanced load; use more tokens"
    if name == "nccl_ragged" and jax.default_backend() == "cpu":
        return "XLA has no ragged_all_to_all on a CPU"
    if name == "dense" and shape.experts > DENSEST * shape.top_k:
        return f"it does {shape.experts / shape.top_k:g} times the layer's work, more than {DENSEST} times"
    if name.startswith(("torch_", "pallas_", "tokamax")) and jax.default_backend() == "cpu":
        return "it needs a GPU"
    implementation = name.split("_")[0]
    reason = why_not(implementation) if implementation in IMPLEMENTATIONS else None
    if reason is None and name == "cuda_mxfp8" and shape.dtype != "bfloat16":
        return "it needs --dtype bfloat16"
    return reason


def _agreement(agreement: dict[str, dict[str, float]], shape: Shape) -> str:
    """Each contender's worst tensor, and what it may be: a coarse check, tests judge more finely."""
    worst = {name: max(errors.values()) for name, errors in agreement.items()}
    bounds = {name: BOUNDS[(name in CONTENDERS and CONTENDERS[name].precision) or shape.dtype] for name in worst}
    return ", ".join(f"{name} {worst[name]:.1e} (at most {bounds[name]:g})" for name in worst)


def save(report: dict[str, Any], path: pathlib.Path | None) -> None:
    """As JSON, if a file was asked for."""
    if path is not None:
        path.write_text(json.dumps(report, indent=1) + "\n")


def main(arguments: list[str] | None = None) -> None:
    """Checks, times, and reports."""
    options, shape, config = parse(arguments)
    report: dict[str, Any] = {
        "machine": machine(),
        "shape": dataclasses.asdict(shape),
        "gpus": options.gpus,
        "routing": options.routing,
        "forward_flops": shape.forward_flops,
        "config": dataclasses.asdict(config),
        "agreement": {},
        "left_out": dict(options.left_out),
        "memory": measure_growth(options.memory, shape, config),
        "peak": None,
        "mxfp8": None,
        "busiest": None,
        **{direction: {} for direction in DIRECTIONS},
    }
    if jax.default_backend() == "cpu" or options.process:
        measure_here(report, options.contenders, shape, config, options)
        add_rates(report, shape)
        if "cuda_mxfp8" in report[DIRECTIONS[0]] and options.gpus == 1:
            measure_mxfp8(report, shape, config, functools.partial(save, report, options.json))
    else:
        for process in PROCESSES:
            names = [name for name in options.contenders if name != LIMIT and process_of(name) == process]
            if names:
                part = run_process(process, names, shape, options)
                add_rates(part, shape)
                merge(report, process, part)
    if report["agreement"]:
        print(f"y and gradients agree with the reference: {_agreement(report['agreement'], shape)}", flush=True)
    save(report, options.json)
    if options.png:
        draw(options.png, report)
    print(table(report))
    package = {name for name, contender in CONTENDERS.items() if contender.of_package and name.startswith("cuda")}
    failed = (package | {MXFP8_BYTES}) & (report["left_out"].keys() - options.left_out.keys())
    if failed:
        sys.exit(f"bench_layer: {', '.join(sorted(failed))} failed")


if __name__ == "__main__":
    main()

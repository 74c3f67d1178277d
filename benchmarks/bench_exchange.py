"""Times the exchange between GPUs alone: rows pulled, pushed, and both at once, and a barrier.

    python benchmarks/bench_exchange.py                           # shape S1 over 1, 2, 4, ... GPUs of this process
    python benchmarks/bench_exchange.py --shape S4 --gpus 2 --sms 16,32,132 --json out/exchange.json

A GPU moves a row for each of its T K routes, its peers in turn, itself among them: so T K H s (R-1)/R bytes of them
cross its link in each direction that is busy. Pulling is what dispatch and reverse-combine do, pushing what combine and
reverse-dispatch do; in the layer both go on at once. One GPU moves the same rows in its own memory. First, at a small
shape, every row is compared with what should have come.

Times are at steady power, in both orders (protocol.py), and differences: `--repeats` exchanges between two barriers
against none, and 64 barriers more against two. The bytes are those of rows; what a link carries besides is not seen.

At the end the layer's forward pass: on one GPU without arenas, over each number of GPUs through them, and there on the
stream of XLA's collectives (`MoKConfig.collective_stream`).
"""

import argparse
import dataclasses
import datetime
import functools
import json
import math
import pathlib
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from protocol import SHAPES, Shape, both_orders, route, steady

from mok_jax import MoKConfig, distributed, moe

KINDS = {"pull": 1, "push": 2, "both": 3}
MORE_BARRIERS = 64
LINK, MEMORY = 450.0, 4800.0  # GB/s: one direction of an H200's NVLink; its memory, reading and writing
CONTROL = 256  # words of scratch
# What the layer that inspired this one reports of its own kernels on other hardware.
ORIGINAL = (
    "the original: 256 x 256 bfloat16 (131.1 KB) cross a link as 159.6 KB pushed, 172.0 KB pulled; completion over up "
    "to 71 peers takes 103 us pushed, 18 us pulled"
)


# ---- arithmetic ----


@dataclasses.dataclass(frozen=True)
class Rate:
    """One kind of traffic. bytes: that cross the link in each busy direction; on one rank, that memory moves."""

    milliseconds: float
    bytes: int
    gigabytes_per_second: float
    share: float  # of the link, or of memory


def crossing_bytes(shape: Shape, ranks: int) -> int:
    """T K H s (R-1)/R: of one rank's rows, those that another rank holds."""
    return shape.rows * shape.hidden * jnp.dtype(shape.dtype).itemsize * (ranks - 1) // ranks


def rate(shape: Shape, ranks: int, kind: str, milliseconds: float, link: float = LINK, memory: float = MEMORY) -> Rate:
    """What `milliseconds` for one exchange mean. On several ranks each direction of the link carries the crossing
    bytes, whatever the kind, as every rank does the same; both kinds at once carry them twice."""
    directions = 2 if kind == "both" else 1
    if ranks > 1:
        size, limit = directions * crossing_bytes(shape, ranks), link
    else:  # read and written
        size, limit = directions * 2 * shape.rows * shape.hidden * jnp.dtype(shape.dtype).itemsize, memory
    achieved = size / milliseconds / 1e6 if milliseconds > 0 else math.nan
    return Rate(milliseconds, size, achieved, achieved / limit)


def differences(medians: dict[str, float], repeats: int) -> tuple[dict[str, float], float]:
    """Milliseconds of one exchange of each kind, and microseconds of a barrier, from medians by name."""
    exchanges = {kind: (medians[kind] - medians["none"]) / repeats for kind in KINDS}
    return exchanges, (medians["barriers"] - medians["none"]) / MORE_BARRIERS * 1e3


def table(report: dict[str, Any]) -> str:
    """The short table that ends a run."""
    shape, machine = report["shape"], report["machine"]
    lines = [
        "T {tokens}, H {hidden}, K {top_k}, {dtype}; ".format(**shape)
        + "{device}, jax {jax}, {date}; link {link:g} GB/s a direction, memory {memory:g} GB/s".format(**machine),
        f"{'GPUs':>4} {'SMs':>4} {'':6}{'ms':>9}{'MB':>10}{'GB/s':>9}{'of limit':>10}{'barrier us':>12}",
    ]
    for run in report["runs"]:
        for kind, point in run["rates"].items():
            lines.append(
                f"{run['gpus']:4} {run['sms']:4} {kind:6}{point['milliseconds']:9.3f}{point['bytes'] / 1e6:10.1f}"
                f"{point['gigabytes_per_second']:9.0f}{point['share']:10.3f}"
                + (f"{run['barrier_us']:12.1f}" if kind == "pull" else "")
            )
    for gpus, times in report["layer"].items():
        parts = ", ".join(f"{name} {ms:.3f} ms" for name, ms in times.items())
        lines.append(f"layer forward on {gpus} GPU(s): {parts}")
    return "\n".join([*lines, ORIGINAL])


# ---- on GPUs ----


class Exchange:
    """Calls of mok_traffic over a table's ranks."""

    def __init__(self, mesh: Mesh, table: distributed.Table, shape: Shape):
        self.mesh, self.table, self.shape = mesh, table, shape
        ranks, rows, hidden = mesh.size, shape.rows, shape.hidden
        sharding = NamedSharding(mesh, P("expert"))

        def numbered(count: int, seed: int):
            make = jax.jit(
                lambda: jax.random.normal(jax.random.key(seed), (ranks * count, hidden), shape.dtype),
                out_shardings=sharding,
            )
            return make()

        self.x, self.pushed = numbered(shape.tokens, 0), numbered(rows, 1)

    def call(self, kind: str, *, repeats: int, barriers: int = 2, sms: int, returns: bool = False) -> Callable:
        """() -> pulled [R T K, H], and the return windows where they are asked for."""
        shape, dtype = self.shape, jnp.dtype(self.shape.dtype)
        results = [
            jax.ShapeDtypeStruct((shape.rows, shape.hidden), dtype),
            jax.ShapeDtypeStruct((shape.rows if returns else 0, shape.hidden), dtype),
            jax.ShapeDtypeStruct((CONTROL,), jnp.int32),
        ]
        run = jax.ffi.ffi_call("mok_traffic", results)
        integers = dict(
            table=self.table.id, traffic=KINDS.get(kind, 0), repeats=repeats, barriers=barriers, sms=sms // 2 * 2
        )
        attributes = {name: np.int64(value) for name, value in integers.items()} | {"barrier_timeout": np.float64(60)}

        def local(x, pushed):
            place = jnp.stack([jax.lax.axis_index("expert"), 0]).astype(jnp.int32)
            return tuple(run(place, x, pushed, **attributes)[:2])

        spread = jax.shard_map(local, mesh=self.mesh, in_specs=P("expert"), out_specs=P("expert"), check_vma=False)
        return functools.partial(jax.jit(spread), self.x, self.pushed)

    def check(self, sms: int) -> None:
        """Every row pulled, and every slot of the return windows, against where it should be from."""
        ranks, rows = self.mesh.size, self.shape.rows
        pulled, returned = map(np.asarray, self.call("both", repeats=1, sms=sms, returns=True)())
        x, pushed = (np.asarray(a).reshape(ranks, -1, self.shape.hidden) for a in (self.x, self.pushed))
        row = np.arange(rows)
        for rank in range(ranks):
            peers = (rank + 1 + row) % ranks
            np.testing.assert_array_equal(pulled.reshape(ranks, rows, -1)[rank], x[peers, row % self.shape.tokens])
            slots = row // ranks * ranks + rank
            np.testing.assert_array_equal(returned.reshape(ranks, rows, -1)[peers, slots], pushed[rank])


def sampler(call: Callable) -> Callable[[], list[float]]:
    def queue(calls: int):
        for _ in range(calls):
            results = call()
        return results

    return functools.partial(steady, queue, jax.block_until_ready)


def measure(
    shape: Shape, gpus: int, all_sms: list[int], repeats: int, link: float, memory: float
) -> list[dict[str, Any]]:
    """The runs over so many GPUs of this process."""
    mesh = Mesh(np.array(jax.devices("cuda")[:gpus]), ("expert",))
    for small in (dataclasses.replace(shape, tokens=min(shape.tokens, 16 * gpus)), shape):
        made = distributed.initialize(
            mesh, tokens=small.tokens, hidden=small.hidden, top_k=small.top_k, dtype=small.dtype
        )
        exchange = Exchange(mesh, made, small)
        if small != shape or shape.tokens <= 16 * gpus:
            exchange.check(all_sms[0])
    runs = []
    for sms in all_sms:
        calls = {kind: exchange.call(kind, repeats=repeats, sms=sms) for kind in KINDS}
        calls["none"] = exchange.call("none", repeats=0, sms=sms)
        calls["barriers"] = exchange.call("none", repeats=0, barriers=2 + MORE_BARRIERS, sms=sms)
        points = both_orders({name: sampler(call) for name, call in calls.items()})
        exchanges, barrier = differences({name: point["median_ms"] for name, point in points.items()}, repeats)
        rates = {kind: dataclasses.asdict(rate(shape, gpus, kind, ms, link, memory)) for kind, ms in exchanges.items()}
        runs.append({"gpus": gpus, "sms": sms, "rates": rates, "barrier_us": barrier, "points": points})
    return runs


def layer(shape: Shape, gpus: int) -> dict[str, float]:
    """Milliseconds of a forward pass, by how it is run."""
    mesh = Mesh(np.array(jax.devices("cuda")[:gpus]), ("expert",))
    sharding = NamedSharding(mesh, P("expert"))
    ids, weights = route(dataclasses.replace(shape, tokens=shape.tokens * gpus))
    x = jax.random.normal(jax.random.key(0), (shape.tokens * gpus, shape.hidden), shape.dtype)
    keys, sizes = jax.random.split(jax.random.key(1), 3), (shape.experts, shape.hidden, shape.intermediate)
    experts = [
        jax.random.normal(key, size, shape.dtype) / size[1] ** 0.5
        for key, size in zip(keys, [sizes, sizes, (sizes[0], sizes[2], sizes[1])], strict=True)
    ]
    arguments = jax.device_put((x, ids, weights, *experts), sharding)
    ways = {"arenas": dict(mesh=mesh), "collective stream": dict(mesh=mesh, config=MoKConfig(collective_stream=True))}
    calls = {name: jax.jit(functools.partial(moe, implementation="cuda", **how)) for name, how in ways.items()}
    samples = {name: sampler(functools.partial(call, *arguments)) for name, call in calls.items()}
    if gpus == 1:  # without a mesh there is no table
        alone = jax.jit(functools.partial(moe, implementation="cuda"))
        samples["no arena"] = sampler(functools.partial(alone, *jax.device_put(arguments, jax.devices("cuda")[0])))
    return {name: point["median_ms"] for name, point in both_orders(samples).items()}


def parse(arguments: list[str] | None = None) -> tuple[argparse.Namespace, Shape]:
    def numbers(least: int, text: str) -> list[int]:
        try:
            found = [int(part) for part in text.split(",")]
        except ValueError:
            found = [least - 1]
        if min(found) < least:
            raise argparse.ArgumentTypeError(f"must be numbers of at least {least} with commas between, got {text}")
        return found

    def speed(text: str) -> float:
        if not 0 < (found := float(text)) < math.inf:
            raise argparse.ArgumentTypeError(f"must be more than 0, got {text}")
        return found

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=SHAPES, default="S1")
    for name in ("tokens", "hidden", "top-k"):
        parser.add_argument(f"--{name}", type=int, help="instead of the shape's")
    of_gpus, of_sms = (functools.partial(numbers, least) for least in (1, 2))
    parser.add_argument("--gpus", type=of_gpus, metavar="N,...", help="default: 1,2,4,... as many as there are")
    text = "multiprocessors that move rows; default 32,132"
    parser.add_argument("--sms", type=of_sms, default=[32, 132], metavar="N,...", help=text)
    parser.add_argument("--repeats", type=int, default=4, help="exchanges between two barriers; default 4")
    parser.add_argument("--link", type=speed, default=LINK, help=f"its GB/s in one direction; default {LINK:g}")
    parser.add_argument("--memory", type=speed, default=MEMORY, help=f"GB/s read and written; default {MEMORY:g}")
    parser.add_argument("--json", type=pathlib.Path, help="a file for every time")
    options = parser.parse_args(arguments)
    sizes = {name: value for name in ("tokens", "hidden", "top_k") if (value := getattr(options, name)) is not None}
    shape = dataclasses.replace(SHAPES[options.shape], **sizes)
    for name in ("tokens", "hidden", "top_k"):
        if getattr(shape, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1, got {getattr(shape, name)}")
    if options.repeats < 1:
        parser.error(f"--repeats must be at least 1, got {options.repeats}")
    if shape.hidden * jnp.dtype(shape.dtype).itemsize % 16:
        parser.error(f"--hidden must make rows of whole 16 bytes, got {shape.hidden}")
    if shape.top_k > shape.experts:
        parser.error(f"--top-k must be at most the shape's {shape.experts} experts, got {shape.top_k}")
    for gpus in options.gpus or []:
        refuse_remainders(shape, gpus, parser.error)
    return options, shape


def refuse_remainders(shape: Shape, gpus: int, refuse: Callable[[str], Any]) -> None:
    """Rows go to all ranks alike, and the layer's experts too."""
    for name, size in (("--tokens times --top-k", shape.rows), ("the shape's experts", shape.experts)):
        if size % gpus:
            refuse(f"{name} must be divisible by each number of GPUs, got {size} and {gpus}")


def main() -> None:
    options, shape = parse()
    try:
        devices = jax.devices("cuda")
    except RuntimeError as error:
        raise SystemExit(f"bench_exchange: it needs CUDA devices: {error}") from error
    counts = options.gpus or [2**i for i in range(len(devices).bit_length())]
    if max(counts) > len(devices):
        raise SystemExit(f"bench_exchange: --gpus must be at most the {len(devices)} there are, got {max(counts)}")
    runs, layers = [], {}
    for gpus in counts:
        refuse_remainders(shape, gpus, lambda text: sys.exit(f"bench_exchange: {text}"))
    for gpus in counts:
        runs += measure(shape, gpus, options.sms, options.repeats, options.link, options.memory)
        layers[gpus] = layer(shape, gpus)
        distributed.finalize()
    report = {
        "shape": dataclasses.asdict(shape),
        "machine": {
            "device": devices[0].device_kind,
            "jax": jax.__version__,
            "date": datetime.date.today().isoformat(),
            "link": options.link,
            "memory": options.memory,
        },
        "runs": runs,
        "layer": layers,
    }
    print(table(report))
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()

"""`python -m mok_jax`: what is installed, what it runs on, which implementation `moe` picks there, and how its GPUs
would reach each other, with the size of an arena for the shape that its options give."""

import argparse
import importlib.metadata
import os
import pathlib
import platform
from collections.abc import Iterator

import jax
import numpy as np
from jax.sharding import Mesh

from mok_jax import distributed, ops
from mok_jax.config import TIMEOUT_VARIABLE, MoKConfig
from mok_jax.moe import IMPLEMENTATIONS, choose_implementation, why_not

PACKAGES = ("jax", "jaxlib", "numpy", "flax")
VARIABLES = ("XLA_FLAGS", "JAX_PLATFORMS", "JAX_NUM_CPU_DEVICES")


def lines(tokens: int, hidden: int, top_k: int, dtype: str) -> Iterator[tuple[str, str]]:
    """The report: what a line is about, and what it says. The sizes are of the arena that it reckons."""
    yield "mok_jax", f"{_version('mok_jax')}, from {pathlib.Path(__file__).parent}"
    for package in PACKAGES:
        yield package, _version(package)
    yield "python", f"{platform.python_version()} ({platform.python_implementation()})"
    yield "platform", platform.platform()
    try:
        devices = jax.devices()
    except (RuntimeError, AssertionError) as error:  # what JAX_PLATFORMS names is not there
        yield "devices", f"none: JAX cannot start its backend: {str(error) or repr(error)}"
    else:
        yield from _choice(devices)
    yield from _arena(tokens, hidden, top_k, dtype)
    yield from _peers()
    yield from ops.describe().items()
    yield TIMEOUT_VARIABLE, _timeout()
    for variable in VARIABLES:
        yield variable, os.environ.get(variable, "not set")


def _choice(devices: list[jax.Device]) -> Iterator[tuple[str, str]]:
    """The devices, and what runs on them."""
    kinds = sorted({device.device_kind for device in devices})
    yield "devices", f"{len(devices)} {jax.default_backend()} ({', '.join(kinds)}), {jax.process_count()} process(es)"
    for name in IMPLEMENTATIONS:
        reason = why_not(name)
        yield f'"{name}"', "yes" if reason is None else f"no: {reason}"
    yield "chosen", f'"{choose_implementation()}"'
    if len(devices) > 1:
        mesh = Mesh(np.array(devices), ("expert",))
        chosen = choose_implementation(None, mesh, len(devices))
        better = [(name, why_not(name, mesh, len(devices))) for name in IMPLEMENTATIONS]
        reasons = [f'not "{name}": {reason}' for name, reason in better[: IMPLEMENTATIONS.index(chosen)]]
        yield f"over {len(devices)} devices", "; ".join([f'"{chosen}"', *reasons])


def _arena(tokens: int, hidden: int, top_k: int, dtype: str) -> Iterator[tuple[str, str]]:
    """What peers take."""
    yield "arena", f"{distributed.FORMULA}, for T tokens of a device, hidden H, top_k K"
    shape = f"T {tokens} H {hidden} K {top_k} {dtype}"
    try:
        size = distributed.arena_bytes(tokens, hidden, top_k, dtype)
        yield shape, f"{size} bytes, {size / 2**20:.1f} MiB"
    except ValueError as error:
        yield shape, str(error)


def _peers() -> Iterator[tuple[str, str]]:
    """How GPUs would reach each other."""
    try:
        jax.local_devices(backend="cuda")
        ways = distributed.probe()
    except ImportError as error:
        yield "peers", str(error)
        return
    except (RuntimeError, AssertionError):
        yield "peers", "there is no CUDA device here"
        return
    for way, reason in ways.items():
        yield f"peers by {way}", "yes" if reason is None else f"no: {reason}"
    for table in distributed.tables():
        yield f"table {table.id}", f"{table.way} over {dict(table.shape)}, arenas of {table.bytes} bytes"


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _timeout() -> str:
    try:
        seconds = MoKConfig().timeout_seconds()
    except ValueError as error:
        return str(error)
    return f"{os.environ.get(TIMEOUT_VARIABLE) or 'not set'}, so {seconds:g} s"


def _parser() -> argparse.ArgumentParser:
    def positive(text: str) -> int:
        if not text.isdecimal() or int(text) < 1:
            raise argparse.ArgumentTypeError(f"must be an integer of at least 1, got {text}")
        return int(text)

    parser = argparse.ArgumentParser(
        "mok_jax",
        description="What runs here, and the size of an arena.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--tokens", type=positive, default=8192, help="that a device passes to a call")
    parser.add_argument("--hidden", type=positive, default=4096, help="values of a token")
    parser.add_argument("--top-k", type=positive, default=8, help="experts of a token")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="of a token")
    return parser


def main() -> None:
    """Prints the report."""
    report = list(lines(**vars(_parser().parse_args())))
    width = max(len(name) for name, _ in report)
    for name, text in report:
        print(f"{name:{width}}  {text}")


if __name__ == "__main__":
    main()

"""`python -m mok_jax`: what is installed, what it runs on, and which implementation `moe` picks there."""

import importlib.metadata
import os
import pathlib
import platform
from collections.abc import Iterator

import jax

from mok_jax import ops
from mok_jax.config import TIMEOUT_VARIABLE, MoKConfig
from mok_jax.moe import IMPLEMENTATIONS, choose_implementation, why_not

PACKAGES = ("jax", "jaxlib", "numpy", "flax")
VARIABLES = ("XLA_FLAGS", "JAX_PLATFORMS", "JAX_NUM_CPU_DEVICES")


def lines() -> Iterator[tuple[str, str]]:
    """The report: what a line is about, and what it says."""
    yield "mok_jax", f"{_version('mok_jax')}, from {pathlib.Path(__file__).parent}"
    for package in PACKAGES:
        yield package, _version(package)
    yield "python", f"{platform.python_version()} ({platform.python_implementation()})"
    yield "platform", platform.platform()
    devices = jax.devices()
    kinds = sorted({device.device_kind for device in devices})
    yield "devices", f"{len(devices)} {jax.default_backend()} ({', '.join(kinds)}), {jax.process_count()} process(es)"
    yield from ops.describe().items()
    for name in IMPLEMENTATIONS:
        reason = why_not(name)
        yield f'"{name}"', "yes" if reason is None else f"no: {reason}"
    yield "chosen", f'"{choose_implementation()}"'
    yield TIMEOUT_VARIABLE, _timeout()
    for variable in VARIABLES:
        yield variable, os.environ.get(variable, "not set")


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


def main() -> None:
    """Prints the report."""
    report = list(lines())
    width = max(len(name) for name, _ in report)
    for name, text in report:
        print(f"{name:{width}}  {text}")


if __name__ == "__main__":
    main()

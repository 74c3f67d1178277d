"""Memory of one forward+backward: on a CPU its growth with T, on a GPU its peak against the package's formula."""

import concurrent.futures
import ctypes
import dataclasses
import functools
import multiprocessing
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
from problem import make_calls, make_problem
from protocol import DIRECTIONS, Shape

import mok_jax
from mok_jax import ops

LINEAR = 1.25  # growing linearly: no more bytes a token over the last interval of T than this, times the first's


# ---- CPU ----


def resident_bytes(name: str, shape: Shape, config: mok_jax.MoKConfig) -> tuple[int, int]:
    """Growth of the resident set in one forward+backward, and what XLA planned; in a fresh process."""
    problem = make_problem(name, shape, config)
    call: Any = make_calls(problem)[DIRECTIONS[1]]
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


def measure_growth(names: list[str], shape: Shape, config: mok_jax.MoKConfig) -> dict[str, dict[str, Any]]:
    """Peak bytes at half, once, twice and four times the tokens, and whether they grow linearly."""
    sizes = [max(1, shape.tokens * factor // 2) for factor in (1, 2, 4, 8)]
    result: dict[str, dict[str, Any]] = {}
    for name in names:
        points = []
        for tokens in sizes:
            spawn = multiprocessing.get_context("spawn")
            with concurrent.futures.ProcessPoolExecutor(1, mp_context=spawn) as pool:
                resized = dataclasses.replace(shape, tokens=tokens)
                points.append(pool.submit(resident_bytes, name, resized, config).result())
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


# ---- GPU ----


def formula_bytes(shape: Shape, config: mok_jax.MoKConfig, implementation: str = "cuda") -> dict[str, int]:
    """The README's formula for one forward+backward on one rank, by part, from the package's own sizes.

    "ring" is the larger of the two calls' scratch: ring, return buffer, carry and counters.
    """
    dims = dims_of(shape, config, implementation)
    tokens, hidden, width, experts, top_k, _ = dataclasses.astuple(shape)

    def array(*sizes, dtype=dims.dtype):
        return jax.ShapeDtypeStruct(sizes, dtype)

    x, ids = array(tokens, hidden), array(tokens, top_k, dtype=jnp.int32)
    router_weights = array(tokens, top_k, dtype=jnp.float32)
    weights = [array(experts, hidden, width)] * 2 + [array(experts, width, hidden)]
    shared = [array(hidden, 0)] * 2 + [array(0, hidden)]
    context = config.save_context
    place = array(2, dtype=jnp.int32)

    def forward(*arguments):
        return ops.forward(dims, *arguments, context=context)[:2]

    _, residuals = jax.eval_shape(forward, place, x, ids, router_weights, [*weights, *shared])
    gradients = ops.GATE_UP | ops.DOWN
    return {
        "weights": _bytes(weights),
        "gradients": _bytes(weights),
        "tokens": _bytes([x, ids, router_weights, x]) + _bytes([x, x, router_weights]),  # x, ids, w, dy; y, dx, dw
        "schedule": _bytes(residuals[:3]),
        "context": _bytes(residuals[3:]),
        "ring": max(dims.workspace_bytes(False, context, 0), dims.workspace_bytes(True, context, gradients)),
    }


def pulled_bytes(shape: Shape, config: mok_jax.MoKConfig, precision: str | None, ranks: int = 2) -> list[int]:
    """Bytes of x and dy that moved to where they are multiplied, forward and backward, as the kernels counted them on
    so many virtual ranks."""
    config = dataclasses.replace(config, precision=precision, virtual_ranks=ranks)
    _, ids, arguments, d_y = make_problem("cuda", shape, config)
    dims = dims_of(shape, config, "cuda")
    words = jax.device_get(jax.jit(functools.partial(_pulled_words, dims))(ids, arguments, d_y))
    return [sum(int(low) + (int(high) << 32) for low, high in of_ranks) for of_ranks in words]


def _pulled_words(dims: ops.Dims, ids, arguments, d_y) -> list[jax.Array]:
    """Both calls' counters. Careful: an array that is no argument becomes part of the program, gigabytes of it."""
    *_, forward, backward = both_calls(dims, ids, arguments, d_y)
    context, gradients = dims.config.save_context, ops.GATE_UP | ops.DOWN
    return [dims.pulled_bytes(forward, False, context, 0), dims.pulled_bytes(backward, True, context, gradients)]


def both_calls(dims: ops.Dims, ids, arguments, d_y):
    """y, dx and the workspaces of a forward and a backward call. In MXFP8 of weights as they are, not quantised: what
    is moved does not depend on them."""
    x, router_weights, *weights = arguments
    shared = [jnp.zeros((dims.hidden, 0), x.dtype)] * 2 + [jnp.zeros((0, dims.hidden), x.dtype)]
    tokens, place, context = (x, ids, router_weights), jnp.zeros(2, jnp.int32), dims.config.save_context
    y, residuals, forward = ops.forward(dims, place, *tokens, [*weights, *shared], context=context)
    operands = [*weights, *shared, *(weights if dims.mxfp8 else [])]
    options = dict(context=context, gradients=ops.GATE_UP | ops.DOWN, dtypes=[x.dtype] * 6)
    d_x, *_, backward = ops.backward(dims, place, d_y, *tokens, operands, residuals, **options)
    return y, d_x, forward, backward


def dims_of(shape: Shape, config: mok_jax.MoKConfig, implementation: str) -> ops.Dims:
    """The sizes of the layer on one rank, as "host" or "cuda" plans it."""
    gpu = None
    if implementation == "cuda":
        major, minor = jax.devices("cuda")[0].compute_capability.split(".")
        gpu = ops.Gpu((int(major), int(minor)), None)
    tokens, hidden, width, experts, top_k, _ = dataclasses.astuple(shape)
    return ops.Dims(tokens, hidden, width, 0, experts, 1, top_k, jnp.dtype(shape.dtype), config, implementation, gpu)


def _bytes(arrays) -> int:
    return sum(array.size * array.dtype.itemsize for array in arrays)


def measure_peak(shape: Shape, config: mok_jax.MoKConfig, call) -> dict[str, Any]:
    """The device's peak over this process, whose first work on it this must be, against the formula."""
    jax.block_until_ready(call())
    parts = formula_bytes(shape, config)
    peak = jax.devices()[0].memory_stats()["peak_bytes_in_use"]
    return {"peak_bytes": peak, "formula_bytes": sum(parts.values()), "parts": parts}

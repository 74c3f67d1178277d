"""One contender's arrays and its two jitted passes, and whether its results are right. Called by bench_layer.py."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from protocol import BOUNDS, CHECKED_TOKENS, DIRECTIONS, LIMIT, TENSORS, Shape, route
from rivals import CONTENDERS, on_each, quantize

import mok_jax


class Problem(NamedTuple):
    """What is measured: function(ids, *arguments) -> y, and y's cotangent. MXFP8: (ids, quantised weights)."""

    function: Callable[..., Any]
    ids: Any
    arguments: tuple[jax.Array, ...]
    d_y: Any


# Over a mesh every rank has a layer of the shape: `ranks` times the tokens and experts, split along the first axis.


def ranks_of(mesh: Mesh | None) -> int:
    return 1 if mesh is None else mesh.size


@functools.partial(jax.jit, static_argnums=(1, 2, 3, 4))
def _normal(key, sizes, scale, dtype, mesh=None):
    """A row block (an expert, a token) at a time, lest its float32 be the peak of the process's memory. The numbers do
    not depend on the mesh."""
    batch = max(1, min(sizes[0] // ranks_of(mesh), 2**24 // math.prod(sizes[1:])))

    def rows(keys):
        return jax.lax.map(
            lambda key: (jax.random.normal(key, sizes[1:], jnp.float32) * scale).astype(dtype), keys, batch_size=batch
        )

    return on_each(mesh, rows)(jax.random.split(key, sizes[0]))


@functools.lru_cache(maxsize=1)
def _tensors(shape: Shape, mesh: Mesh | None) -> list[jax.Array]:
    """x, dy, gate, up and down, the same ones for every contender: N(0, 1) tokens, 1/sqrt(fan-in) weights."""
    tokens, experts = ranks_of(mesh) * shape.tokens, ranks_of(mesh) * shape.experts
    hidden, width = shape.hidden, shape.intermediate
    keys = jax.random.split(jax.random.key(0), 5)
    sizes = [(tokens, hidden)] * 2 + [(experts, hidden, width)] * 2 + [(experts, width, hidden)]
    scales = [1.0, 1.0, hidden**-0.5, hidden**-0.5, width**-0.5]
    return [_normal(*each, shape.dtype, mesh) for each in zip(keys, sizes, scales, strict=True)]


@functools.lru_cache(maxsize=1)
def _gate_up(shape: Shape, mesh: Mesh | None) -> jax.Array:
    return jnp.concatenate(_tensors(shape, mesh)[2:4], axis=2)


def make_problem(
    name: str, shape: Shape, config: mok_jax.MoKConfig, routing: str = "uniform", mesh: Mesh | None = None
) -> Problem:
    """The contender on the random layer that all of them get; over a mesh each rank has one of the shape."""
    contender, devices = CONTENDERS[name], ranks_of(mesh)
    function = contender.make(config, mesh)
    if name == LIMIT:
        return Problem(function, spread(jnp.zeros(devices), mesh), *_limit(shape, mesh))
    ranks = 1 if contender.alone else devices
    whole = dataclasses.replace(shape, tokens=ranks * shape.tokens, experts=ranks * shape.experts)
    routes = route(whole, contender.routing or routing, ranks)
    ids, router_weights = (spread(jnp.concatenate([a] * (devices // ranks)), mesh) for a in routes)
    x, d_y, gate, up, down = _tensors(shape, mesh)
    weights = (_gate_up(shape, mesh), down) if contender.gate_up else (gate, up, down)
    fixed = ids if contender.precision is None else (ids, quantize(weights))
    return Problem(function, fixed, (x, router_weights, *weights), d_y)


def spread(array, mesh: Mesh | None):
    """Split over the mesh along the first axis."""
    return array if mesh is None else jax.device_put(array, NamedSharding(mesh, P(mesh.axis_names)))


def _limit(shape: Shape, mesh: Mesh | None) -> tuple[tuple[jax.Array, ...], tuple[jax.Array, ...]]:
    """Arguments and cotangents of `matmuls`; on a GPU gate and up are one product, which is the faster."""
    rows, hidden, width = shape.rows, shape.hidden, shape.intermediate
    firsts = [width, width] if jax.default_backend() == "cpu" else [2 * width]
    sizes = [(rows, hidden), (rows, width), *((hidden, n) for n in firsts), (width, hidden)]
    cotangents = [*((rows, n) for n in firsts), (rows, hidden)]
    keys = jax.random.split(jax.random.key(1), len(sizes) + len(cotangents))
    arrays = [
        _normal(key, (ranks_of(mesh) * size[0], size[1]), 1.0, shape.dtype, mesh)
        for key, size in zip(keys, sizes + cotangents, strict=True)
    ]
    return tuple(arrays[: len(sizes)]), tuple(arrays[len(sizes) :])


def _both(function):
    """(ids, arguments, dy) -> y and every gradient."""

    def both(ids, arguments, d_y):
        y, backward = jax.vjp(functools.partial(function, ids), *arguments)
        return y, *backward(d_y)

    return both


def make_calls(problem: Problem) -> dict[str, functools.partial]:
    """The two passes as jitted calls without arguments; the second returns y and every gradient."""
    calls = (
        functools.partial(jax.jit(problem.function), problem.ids, *problem.arguments),
        functools.partial(jax.jit(_both(problem.function)), problem.ids, problem.arguments, problem.d_y),
    )
    return dict(zip(DIRECTIONS, calls, strict=True))


# ---- agreement ----


def checked_tokens(shape: Shape, ranks: int = 1) -> int:
    """How many tokens of each rank the reference computes: on a GPU it would take too long and too much memory for
    all."""
    return shape.tokens if jax.default_backend() == "cpu" else min(shape.tokens, CHECKED_TOKENS // ranks)


@functools.lru_cache(maxsize=1)
def _reference(name: str, config: mok_jax.MoKConfig, mesh: Mesh | None):
    """Compiled once, for all routings."""
    return jax.jit(_both(CONTENDERS[name].make(config, mesh)))


@functools.partial(jax.jit, static_argnums=(1, 2))
def _firsts(array, ranks, few):
    """The first `few` of each rank's tokens."""
    return array.reshape(ranks, -1, *array.shape[1:])[:, :few].reshape(ranks * few, *array.shape[1:])


def reference(
    shape: Shape,
    config: mok_jax.MoKConfig,
    routing: str,
    precision: str | None = None,
    mesh: Mesh | None = None,
    alone: bool = False,
) -> tuple[jax.Array, ...]:
    """y and all gradients of the package's reference for the first of each rank's tokens."""
    config, ranks = dataclasses.replace(config, precision=precision), ranks_of(mesh)
    name = "reference_alone" if alone else "reference"
    _, ids, (x, router_weights, *weights), d_y = make_problem(name, shape, config, routing, mesh)
    few = checked_tokens(shape, ranks)
    ids, x, router_weights, d_y = (spread(_firsts(a, ranks, few), mesh) for a in (ids, x, router_weights, d_y))
    return _reference(name, config, mesh)(ids, (x, router_weights, *weights), d_y)


def results_to_check(shape: Shape, call: functools.partial) -> list[jax.Array]:
    """What the very program that is timed returns, with dy of the other tokens zero: they give no gradient."""
    ids, arguments, d_y = call.args
    ranks = len(d_y) // shape.tokens
    checked = jnp.arange(len(d_y)) % shape.tokens < checked_tokens(shape, ranks)
    d_few = jax.device_put(jnp.where(checked[:, None], d_y, 0).astype(d_y.dtype), d_y.sharding)
    y, d_x, d_router, *d_weights = call.func(ids, arguments, d_few)
    if len(d_weights) == 2:
        d_weights[:1] = jnp.split(d_weights[0], 2, axis=2)
    return [y, d_x, d_router, *d_weights]


@functools.partial(jax.jit, static_argnums=2)
def _relative_error(value, wanted, ranks):
    finite = jnp.isfinite(value).all()  # of all tokens; XLA's maximum may overlook a NaN
    if wanted.ndim == 2:  # of tokens
        value = _firsts(value, ranks, len(wanted) // ranks)
    value, wanted = value.astype(jnp.float32), wanted.astype(jnp.float32)
    axes = tuple(range(1, wanted.ndim)) if wanted.ndim == 3 else None  # an expert's gradient by itself
    difference = jnp.abs(value - wanted).max(axis=axes)
    size = jnp.abs(wanted).max(axis=axes)
    # An expert without rows has an exactly zero gradient.
    relative = jnp.where(difference == 0, 0.0, difference / jnp.maximum(size, jnp.finfo(jnp.float32).tiny))
    return jnp.where(finite, relative.max(), jnp.nan)


def check_agreement(name: str, shape: Shape, results, wanted, precision: str | None = None) -> dict[str, float]:
    """Each tensor's largest relative error; raises ValueError beyond the bound of the precision (None: the dtype),
    where NaN always is."""
    errors, precision = {}, precision or shape.dtype
    for tensor, value, exact in zip(TENSORS, results, wanted, strict=True):
        errors[tensor] = float(_relative_error(value, exact, len(results[0]) // shape.tokens))
        if not errors[tensor] <= BOUNDS[precision]:
            raise ValueError(
                f"{name}: {tensor} must be within {BOUNDS[precision]} of the reference in {precision}, "
                f"got {errors[tensor]:.2e}"
            )
    return errors

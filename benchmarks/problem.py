"""One contender's arrays and its two jitted passes, and whether its results are right. Called by bench_layer.py."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from protocol import BOUNDS, CHECKED_TOKENS, DIRECTIONS, LIMIT, TENSORS, Shape, route
from rivals import CONTENDERS, quantize

import mok_jax


class Problem(NamedTuple):
    """What is measured: function(ids, *arguments) -> y, and y's cotangent. MXFP8: (ids, quantised weights)."""

    function: Callable[..., Any]
    ids: Any
    arguments: tuple[jax.Array, ...]
    d_y: Any


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def _normal(key, sizes, scale, dtype):
    """A row block (an expert, a token) at a time, lest its float32 be the peak of the process's memory."""
    keys = jax.random.split(key, sizes[0])
    return jax.lax.map(
        lambda key: (jax.random.normal(key, sizes[1:], jnp.float32) * scale).astype(dtype),
        keys,
        batch_size=max(1, min(sizes[0], 2**24 // math.prod(sizes[1:]))),
    )


@functools.lru_cache(maxsize=1)
def _tensors(shape: Shape) -> list[jax.Array]:
    """x, dy, gate, up and down, the same ones for every contender: N(0, 1) tokens, 1/sqrt(fan-in) weights."""
    tokens, hidden, width, experts = shape.tokens, shape.hidden, shape.intermediate, shape.experts
    keys = jax.random.split(jax.random.key(0), 5)
    sizes = [(tokens, hidden)] * 2 + [(experts, hidden, width)] * 2 + [(experts, width, hidden)]
    scales = [1.0, 1.0, hidden**-0.5, hidden**-0.5, width**-0.5]
    return [_normal(*each, shape.dtype) for each in zip(keys, sizes, scales, strict=True)]


@functools.lru_cache(maxsize=1)
def _gate_up(shape: Shape) -> jax.Array:
    return jnp.concatenate(_tensors(shape)[2:4], axis=2)


def make_problem(name: str, shape: Shape, config: mok_jax.MoKConfig, routing: str = "uniform") -> Problem:
    """The contender on the random layer that all of them get."""
    contender = CONTENDERS[name]
    function = contender.make(config)
    if name == LIMIT:
        return Problem(function, jnp.zeros(()), *_limit(shape))
    ids, router_weights = route(shape, contender.routing or routing)
    x, d_y, gate, up, down = _tensors(shape)
    weights = (_gate_up(shape), down) if contender.gate_up else (gate, up, down)
    fixed = jnp.asarray(ids)
    if contender.precision is not None:
        fixed = fixed, quantize(weights)
    return Problem(function, fixed, (x, jnp.asarray(router_weights), *weights), d_y)


def _limit(shape: Shape) -> tuple[tuple[jax.Array, ...], tuple[jax.Array, ...]]:
    """Arguments and cotangents of `matmuls`; on a GPU gate and up are one product, which is the faster."""
    rows, hidden, width = shape.rows, shape.hidden, shape.intermediate
    firsts = [width, width] if jax.default_backend() == "cpu" else [2 * width]
    sizes = [(rows, hidden), (rows, width), *((hidden, n) for n in firsts), (width, hidden)]
    cotangents = [*((rows, n) for n in firsts), (rows, hidden)]
    keys = jax.random.split(jax.random.key(1), len(sizes) + len(cotangents))
    arrays = [_normal(key, size, 1.0, shape.dtype) for key, size in zip(keys, sizes + cotangents, strict=True)]
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


def checked_tokens(shape: Shape) -> int:
    """How many tokens the reference computes: on a GPU it would take too long and too much memory for all."""
    return shape.tokens if jax.default_backend() == "cpu" else min(shape.tokens, CHECKED_TOKENS)


@functools.lru_cache(maxsize=1)
def _reference(config: mok_jax.MoKConfig):
    """Compiled once, for both routings."""
    return jax.jit(_both(CONTENDERS["reference"].make(config)))


def reference(
    shape: Shape, config: mok_jax.MoKConfig, routing: str, precision: str | None = None
) -> tuple[jax.Array, ...]:
    """y and all gradients of the package's reference for the first of the tokens."""
    config = dataclasses.replace(config, precision=precision)
    few = checked_tokens(shape)
    _, ids, (x, router_weights, *weights), d_y = make_problem("reference", shape, config, routing)
    return _reference(config)(ids[:few], (x[:few], router_weights[:few], *weights), d_y[:few])


def results_to_check(shape: Shape, call: functools.partial) -> list[jax.Array]:
    """What the very program that is timed returns, with dy of the other tokens zero: they give no gradient."""
    ids, arguments, d_y = call.args
    d_few = jnp.where(jnp.arange(shape.tokens)[:, None] < checked_tokens(shape), d_y, 0).astype(d_y.dtype)
    y, d_x, d_router, *d_weights = call.func(ids, arguments, d_few)
    if len(d_weights) == 2:
        d_weights[:1] = jnp.split(d_weights[0], 2, axis=2)
    return [y, d_x, d_router, *d_weights]


@jax.jit
def _relative_error(value, wanted):
    finite = jnp.isfinite(value).all()  # of all tokens; XLA's maximum may overlook a NaN
    value, wanted = value[: wanted.shape[0]].astype(jnp.float32), wanted.astype(jnp.float32)
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
        errors[tensor] = float(_relative_error(value, exact))
        if not errors[tensor] <= BOUNDS[precision]:
            raise ValueError(
                f"{name}: {tensor} must be within {BOUNDS[precision]} of the reference in {precision}, "
                f"got {errors[tensor]:.2e}"
            )
    return errors

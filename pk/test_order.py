"""No gradient depends on which gradients the process took before: JAX caches what an earlier one traced."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import make_case

import mok_jax

ARGUMENTS = ("x", "router_weights", "w_gate", "w_down")
PAIRS = list(itertools.permutations(ARGUMENTS, 2))
WAYS = ("plain", "jit", "remat", "policy", "scan", "late")


def gradient(case, name, way):
    """d sum(y) / d name, taken in one of several ways. The layer's own caches stay as they are."""

    def layer(value):
        return mok_jax.moe(*case._replace(**{name: value})[:6], implementation="host").sum()

    value = getattr(case, name)
    if way == "late":  # pulled after another forward pass was traced
        _, pull = jax.vjp(layer, value)
        other = "w_up" if name != "w_up" else "x"
        jax.grad(lambda v: mok_jax.moe(*case._replace(**{other: v})[:6], implementation="host").sum())(
            getattr(case, other)
        )
        return pull(jnp.ones((), case.x.dtype))[0]
    if way == "remat":
        layer = jax.checkpoint(layer)
    elif way == "policy":
        layer = jax.checkpoint(layer, policy=mok_jax.save_moe_residuals)
    elif way == "scan":
        step = jax.checkpoint(layer)
        layer = lambda v: jax.lax.scan(lambda c, _: (c + step(v), None), jnp.zeros((), v.dtype), None, length=1)[0]  # noqa: E731
    return (jax.jit(jax.grad(layer)) if way == "jit" else jax.grad(layer))(value)


@functools.cache
def fresh(name, tokens):
    """The right one: "reference" has no such cache."""
    case = make_case("f64", tokens=tokens, hidden=5, intermediate=7, experts=4, top_k=2)
    layer = lambda v: mok_jax.moe(*case._replace(**{name: v})[:6], implementation="reference").sum()  # noqa: E731
    return jax.grad(layer)(getattr(case, name))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("first, second", PAIRS, ids=["-".join(pair) for pair in PAIRS])
def test_a_gradient_after_two_others(first, second, way):
    # Sizes of its own for each test: the first trace of a shape is what matters.
    tokens = 8 + WAYS.index(way) * 12 + PAIRS.index((first, second))
    case = make_case("f64", tokens=tokens, hidden=5, intermediate=7, experts=4, top_k=2)
    for name in (first, second):
        gradient(case, name, "plain")
    np.testing.assert_allclose(gradient(case, first, way), fresh(first, tokens), atol=1e-12)

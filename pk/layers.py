"""What the tests of both modules share: parameters, one way to call either, and the same by hand."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import IMPLEMENTATIONS
from flax import nnx
from jax.nn.initializers import lecun_normal, zeros

import mok_jax
import mok_jax.linen
from mok_jax.nnx import SelectionBias
from mok_jax.routing import route

HIDDEN = 24
SIZES = dict(intermediate=40, num_experts=6, top_k=3)
SHARED = 56
RANDOM = dict(kernel_init=lecun_normal(), router_init=lecun_normal())
LOSSES = ("load_balance_loss", "router_z_loss")
RECORDED = (*LOSSES, "tokens_per_expert")

FRAMEWORKS = ("nnx", "linen")
frameworks = pytest.mark.parametrize("framework", FRAMEWORKS)
implementations = pytest.mark.parametrize("implementation", IMPLEMENTATIONS)


def module_of(framework, **options):
    # Zeros where a test brings its own values or needs none: random numbers take long to compile.
    options = SIZES | dict(kernel_init=zeros, router_init=zeros) | options
    if framework == "nnx":
        return mok_jax.MoKMoE(HIDDEN, rngs=nnx.Rngs(0), **options)
    return mok_jax.linen.MoKMoE(hidden=HIDDEN, **options)


def layer_of(framework, bias=None, **options):
    """(parameters, x, token_mask) -> y and what the call records, each once."""
    options |= dict(use_selection_bias=bias is not None)

    def through_nnx(parameters, x, token_mask=None):
        module = module_of("nnx", **{"shared_intermediate": SHARED} | options)
        for name, value in parameters.items():
            setattr(module, name, nnx.Param(value))
        if bias is not None:
            module.selection_bias = SelectionBias(bias)
        y, recorded = nnx.capture(module, nnx.Intermediate)(x, token_mask)
        return y, {name: recorded[name] for name in RECORDED}

    def through_linen(parameters, x, token_mask=None):
        module = module_of("linen", **{"shared_intermediate": SHARED} | options)
        state = {} if bias is None else {"router_state": {"selection_bias": bias}}
        y, recorded = module.apply({"params": parameters} | state, x, token_mask, mutable=["losses", "intermediates"])
        return y, recorded["losses"] | recorded["intermediates"]

    def layer(*arguments):
        y, recorded = {"nnx": through_nnx, "linen": through_linen}[framework](*arguments)
        once = {name: values for name, (values,) in ((name, tuple(recorded[name])) for name in RECORDED)}
        return y, once

    return layer


def parameters_of(dtype="float64", experts=6, seed=0):
    rng = np.random.default_rng(seed)
    width = SIZES["intermediate"]
    shapes = dict(
        router=(HIDDEN, experts),
        w_gate=(experts, HIDDEN, width),
        w_up=(experts, HIDDEN, width),
        w_down=(experts, width, HIDDEN),
        shared_gate=(HIDDEN, SHARED),
        shared_up=(HIDDEN, SHARED),
        shared_down=(SHARED, HIDDEN),
    )
    router = "float64" if dtype == "float64" else "float32"
    return {
        name: jnp.asarray(rng.normal(size=shape) / np.sqrt(shape[-2]), router if name == "router" else dtype)
        for name, shape in shapes.items()
    }


def x_of(*leading, dtype="float64", seed=1):
    return jnp.asarray(np.random.default_rng(seed).normal(size=(*leading, HIDDEN)), dtype)


def sharpest_of(implementation):
    return "float32" if implementation == "cuda" else "float64"


def by_hand(parameters, x, token_mask=None, bias=None, **options):
    """The same from `route` and the definition of `moe`."""
    p, tokens = parameters, x.reshape(-1, HIDDEN)
    mask = None if token_mask is None else token_mask.reshape(-1)
    routing = route(tokens @ p["router"], 3, selection_bias=bias, token_mask=mask, **options)
    shared = (p["shared_gate"], p["shared_up"], p["shared_down"])
    experts = (p["w_gate"], p["w_up"], p["w_down"])
    y = mok_jax.moe(tokens, *routing[:2], *experts, shared=shared, implementation="reference")
    y = y.reshape(x.shape)
    y = y if token_mask is None else y * token_mask[..., None]
    return y, {name: getattr(routing, name) for name in RECORDED}


def results_of(layer, parameters, x, *mask, coefficient=0.3):
    """y, what was recorded and every gradient, by name, of a loss of y and both auxiliary losses."""

    def loss(parameters, x):
        y, recorded = layer(parameters, x, *mask)
        total = (jnp.sin(y.astype(jnp.float32)) if y.dtype == jnp.bfloat16 else jnp.sin(y)).sum()
        return total + coefficient * recorded["load_balance_loss"] + 0.1 * recorded["router_z_loss"], (y, recorded)

    (d_parameters, d_x), (y, recorded) = jax.grad(loss, argnums=(0, 1), has_aux=True)(parameters, x)
    return {"y": y, "d_x": d_x} | recorded | {f"d_{name}": d for name, d in d_parameters.items()}


def run(layer, *arguments, **options):
    return jax.device_get(jax.jit(functools.partial(results_of, layer, **options))(*arguments))


@functools.cache
def expected_of(leading=(37,), experts=6, bias=False, **options):
    layer = functools.partial(by_hand, bias=bias_of() if bias else None, **options)
    return run(layer, parameters_of(experts=experts), x_of(*leading))


def bias_of():
    return jnp.asarray([0.5, -0.5, 0.25, 0.0, 0.125, -0.125])

"""Both modules: values, gradients and what they record, on one device, over meshes and under transformations."""

import functools
import pickle
import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import IMPLEMENTATIONS, TINY, assert_near, assert_same_bits
from flax import nnx
from jax.nn.initializers import zeros
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import mok_jax
import mok_jax.linen
from mok_jax import ops
from mok_jax.nnx import SelectionBias
from mok_jax.routing import route

HIDDEN = 24
SIZES = dict(intermediate=40, num_experts=6, top_k=3)
SHARED = 56
LOSSES = ("load_balance_loss", "router_z_loss")
RECORDED = (*LOSSES, "tokens_per_expert")

FRAMEWORKS = ("nnx", "linen")
frameworks = pytest.mark.parametrize("framework", FRAMEWORKS)
implementations = pytest.mark.parametrize("implementation", IMPLEMENTATIONS)


# ---- one way to call both ----


def module_of(framework, seed=0, **options):
    options = SIZES | options
    if framework == "nnx":
        return mok_jax.MoKMoE(HIDDEN, rngs=nnx.Rngs(seed), **options)
    return mok_jax.linen.MoKMoE(hidden=HIDDEN, **options)


def layer_of(framework, bias=None, **options):
    """(parameters, x, token_mask) -> y and what the call records, each once."""
    options |= dict(use_selection_bias=bias is not None, kernel_init=zeros, router_init=zeros)

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


# ---- values and gradients on one device ----


@frameworks
@implementations
def test_layer_is_routing_and_moe(framework, implementation):
    layer = layer_of(framework, implementation=implementation, config=TINY)
    assert_near(run(layer, parameters_of(), x_of(37)), expected_of(), 1e-12)


OPTIONS = {
    "sigmoid": dict(scores="sigmoid", renormalize=False, scaling=2.5),
    "bias": dict(bias=True),
}


@frameworks
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_options_reach_the_router(framework, options):
    layer = layer_of(framework, implementation="reference", **options | ({"bias": bias_of()} if "bias" in options else {}))
    assert_near(run(layer, parameters_of(), x_of(37)), expected_of(**options), 1e-12)


@frameworks
@pytest.mark.parametrize("leading", [(), (5,), (3, 4, 2), (0,), (2, 0)], ids=str)
def test_leading_axes(framework, leading):
    layer = jax.jit(layer_of(framework, implementation="reference"))
    x = x_of(*leading)
    (y, recorded), (expected, _) = layer(parameters_of(), x), layer(parameters_of(), x.reshape(-1, HIDDEN))
    assert y.shape == x.shape and recorded["tokens_per_expert"].sum() == 3 * (x.size // HIDDEN)
    assert_same_bits(y, expected.reshape(x.shape))


def test_one_expert_renormalized_learns_from_the_losses_only():
    def d_router(coefficient, **options):
        layer = layer_of("nnx", implementation="reference", top_k=1, **options)

        def loss(router):
            y, recorded = layer(parameters_of() | {"router": router}, x_of(37))
            return (y**2).sum() + coefficient * recorded["load_balance_loss"]

        return jax.jit(jax.grad(loss))(parameters_of()["router"])

    assert (d_router(0.0) == 0).all()
    assert (d_router(0.1) != 0).any() and (d_router(0.0, renormalize=False) != 0).any()


# ---- dtypes ----

# (x, dtype, param_dtype), and the parameters in another dtype: Wg bfloat16 beside a float32 Wd.
DTYPES = {
    "bf16-f32": ("bfloat16", None, "float32", {}),
    "f32-bf16-f32": ("float32", "bfloat16", "float32", {}),
    "bf16": ("bfloat16", None, "bfloat16", {}),
    "f32-bf16": ("float32", None, "bfloat16", {}),
    "bf16-f64": ("bfloat16", None, "float64", {}),
    "mixed": ("bfloat16", None, "float32", {"w_gate": "bfloat16", "shared_up": "bfloat16"}),
}


@frameworks
@pytest.mark.parametrize(("x_dtype", "dtype", "param_dtype", "other"), DTYPES.values(), ids=DTYPES)
def test_each_gradient_has_its_parameters_dtype(framework, x_dtype, dtype, param_dtype, other):
    parameters = parameters_of(param_dtype)
    parameters |= {name: parameters[name].astype(kind) for name, kind in other.items()}
    layer = layer_of(framework, implementation="xla", dtype=dtype, param_dtype=param_dtype)
    results = run(layer, parameters, x_of(37, dtype=x_dtype))
    assert results["y"].dtype == jnp.dtype(dtype or x_dtype) and results["d_x"].dtype == x_dtype
    assert {name: results[f"d_{name}"].dtype for name in parameters} == {n: p.dtype for n, p in parameters.items()}
    assert all((results[f"d_{name}"] != 0).any() for name in parameters)


@frameworks
@implementations
def test_weight_gradients_are_not_rounded_to_the_compute_dtype(framework, implementation):
    # h is 1 in every place, and the two rows of dy add 256 and 1: 257 is no bfloat16.
    gate = jnp.zeros((1, HIDDEN, 40), jnp.float32).at[:, 0].set(64.0)
    parameters = parameters_of("float32", experts=1) | dict(w_gate=gate, w_up=gate / 4096, w_down=jnp.ones((1, 40, HIDDEN)))
    parameters = {name: p.astype(jnp.float32) for name, p in parameters.items() if "shared" not in name}
    sizes = dict(num_experts=1, top_k=1, shared_intermediate=None)
    layer = layer_of(framework, implementation=implementation, dtype=jnp.bfloat16, **sizes)
    x, d_y = jnp.zeros((2, HIDDEN)).at[:, 0].set(1.0), jnp.asarray([[256.0], [1.0]])

    @jax.jit
    def gradient(w_down):
        return jax.grad(lambda w: (layer(parameters | {"w_down": w}, x)[0].astype(jnp.float32) * d_y).sum())(w_down)

    d_w_down = gradient(parameters["w_down"])
    assert d_w_down.dtype == jnp.float32 and (d_w_down == 257).all()


@frameworks
def test_router_logits_are_in_float32(framework):
    # Two columns closer than bfloat16 can tell; the choice is the exact one.
    rng = np.random.default_rng(0)
    router = np.asarray(rng.normal(size=(HIDDEN, 384)), np.float32)
    router[:, 200] = router[:, 100] * (1 + 2**-11)
    x = jnp.asarray(rng.normal(size=(37, HIDDEN)), jnp.bfloat16)
    sizes = dict(num_experts=384, top_k=384, shared_intermediate=None, implementation="reference")
    parameters = {name: p for name, p in parameters_of("float32").items() if "shared" not in name}
    parameters = {name: jnp.zeros((384, *p.shape[1:]), p.dtype) for name, p in parameters.items()} | {"router": router}
    layer = layer_of(framework, **sizes)
    logits = np.asarray(x, np.float64) @ router.astype(np.float64)
    exact = np.square(np.log(np.exp(logits).sum(axis=1))).mean()
    jaxpr = jax.make_jaxpr(layer)(parameters, x)
    assert f"f32[37,{HIDDEN}] f32[{HIDDEN},384]" or jaxpr
    _, recorded = jax.jit(layer)(parameters, x)
    assert abs(recorded["router_z_loss"] - exact) < 1e-6 * exact

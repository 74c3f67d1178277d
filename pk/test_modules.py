"""Both modules on one device: values, gradients, dtypes and what a call records."""

import pickle
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import assert_near, assert_same_bits, bound, refuse, tiny
from flax import nnx
from layers import (
    HIDDEN,
    LOSSES,
    RANDOM,
    RECORDED,
    SHARED,
    bias_of,
    expected_of,
    frameworks,
    implementations,
    layer_of,
    module_of,
    parameters_of,
    run,
    sharpest_of,
    x_of,
)

# ---- values and gradients on one device ----


@frameworks
@implementations
def test_layer_is_routing_and_moe(framework, implementation):
    layer = layer_of(framework, implementation=implementation, config=tiny(implementation))
    dtype = sharpest_of(implementation)
    assert_near(run(layer, parameters_of(dtype), x_of(37, dtype=dtype)), expected_of(), bound(implementation, 1e-12))


@frameworks
def test_options_reach_the_router(framework):
    options = dict(scores="sigmoid", renormalize=False, scaling=2.5)
    layer = layer_of(framework, implementation="reference", bias=bias_of(), **options)
    assert_near(run(layer, parameters_of(), x_of(37)), expected_of(bias=True, **options), 1e-12)


@pytest.mark.parametrize("leading", [(), (5,), (3, 4, 2), (0,), (2, 0)], ids=str)
def test_leading_axes(leading):
    layer = jax.jit(layer_of("nnx", implementation="reference"))
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


# (framework, x, dtype, param_dtype), and the parameters in another dtype: Wg bfloat16 beside a float32 Wd.
DTYPES = {
    "nnx-bf16-f32": ("nnx", "bfloat16", None, "float32", {}),
    "linen-f32-bf16-f32": ("linen", "float32", "bfloat16", "float32", {}),
    "linen-bf16": ("linen", "bfloat16", None, "bfloat16", {}),
    "nnx-f32-bf16": ("nnx", "float32", None, "bfloat16", {}),
    "nnx-bf16-f64": ("nnx", "bfloat16", None, "float64", {}),
    "nnx-mixed": ("nnx", "bfloat16", None, "float32", {"w_gate": "bfloat16", "shared_up": "bfloat16"}),
}


@pytest.mark.parametrize(("framework", "x_dtype", "dtype", "param_dtype", "other"), DTYPES.values(), ids=DTYPES)
def test_each_gradient_has_its_parameters_dtype(framework, x_dtype, dtype, param_dtype, other):
    parameters = parameters_of(param_dtype)
    parameters |= {name: parameters[name].astype(kind) for name, kind in other.items()}
    layer = layer_of(framework, implementation="xla", dtype=dtype, param_dtype=param_dtype)
    results = run(layer, parameters, x_of(37, dtype=x_dtype))
    assert results["y"].dtype == jnp.dtype(dtype or x_dtype) and results["d_x"].dtype == x_dtype
    assert {name: results[f"d_{name}"].dtype for name in parameters} == {n: p.dtype for n, p in parameters.items()}
    assert all((results[f"d_{name}"] != 0).any() for name in parameters)


@implementations
def test_weight_gradients_are_not_rounded_to_the_compute_dtype(implementation):
    # h is 1 in every place, and the two rows of dy add 256 and 1: 257 is no bfloat16.
    gate = jnp.zeros((1, HIDDEN, 40), jnp.float32).at[:, 0].set(64.0)
    parameters = parameters_of("float32", experts=1) | dict(
        w_gate=gate, w_up=gate / 4096, w_down=jnp.ones((1, 40, HIDDEN))
    )
    parameters = {name: p.astype(jnp.float32) for name, p in parameters.items() if "shared" not in name}
    sizes = dict(num_experts=1, top_k=1, shared_intermediate=None)
    layer = layer_of("nnx", implementation=implementation, dtype=jnp.bfloat16, **sizes)
    x, d_y = jnp.zeros((2, HIDDEN)).at[:, 0].set(1.0), jnp.asarray([[256.0], [1.0]])

    @jax.jit
    def gradient(w_down):
        return jax.grad(lambda w: (layer(parameters | {"w_down": w}, x)[0].astype(jnp.float32) * d_y).sum())(w_down)

    d_w_down = gradient(parameters["w_down"])
    assert d_w_down.dtype == jnp.float32 and (d_w_down == 257).all()


def test_router_logits_are_in_float32():
    # The columns of each two of 384 experts are nearer to each other than bfloat16 can tell.
    x = x_of(192, dtype="bfloat16")
    pairs = np.asarray(x, np.float64).T[:, :, None]
    larger = 1 + 2.0**-11 * np.array([1, -1]) * np.where(np.arange(192) % 2, 1, -1)[:, None]
    router = jnp.asarray((pairs * larger).reshape(HIDDEN, 384), "float32")
    choice = (np.asarray(x, np.float64) @ np.asarray(router, np.float64)).argmax(axis=1)
    layer = layer_of("nnx", implementation="xla", num_experts=384, top_k=1)
    parameters = parameters_of("float32", experts=384) | {"router": router}
    _, recorded = jax.jit(layer)(parameters, x)
    assert (recorded["tokens_per_expert"] == np.bincount(choice, minlength=384)).all()
    assert 0 < (choice % 2).sum() < 192  # neither the first nor the second of each pair
    text = str(jax.make_jaxpr(layer)(parameters, x))
    (dot,) = re.findall(r"f32\[192,384\] = dot_general\[(.*?)\n\s*\]", text, re.DOTALL)
    assert "precision=(Precision.HIGHEST, Precision.HIGHEST)" in dot


@frameworks
def test_router_stays_float32(framework):
    module = module_of(framework, param_dtype=jnp.bfloat16)
    parameters = (
        nnx.state(module, nnx.Param) if framework == "nnx" else module.init(jax.random.key(0), x_of(2))["params"]
    )
    dtypes = {name: parameters[name].dtype.name for name in ("router", "w_gate", "w_up", "w_down")}
    assert dtypes == dict(router="float32", w_gate="bfloat16", w_up="bfloat16", w_down="bfloat16")


@frameworks
def test_a_router_that_was_cast_is_refused(framework):
    cast = {name: p.astype(jnp.bfloat16) for name, p in parameters_of().items()}
    text = (
        "MoKMoE: router must be float32 or float64[hidden, experts], got bfloat16[24, 6]; "
        "leave it out when parameters are cast: a small error changes the choice of experts"
    )
    refuse(TypeError, text, layer_of(framework, implementation="reference"), cast, x_of(2, dtype=jnp.bfloat16))


def test_pickle():
    module = module_of("nnx", use_selection_bias=True, shared_intermediate=SHARED, param_dtype=jnp.bfloat16, **RANDOM)
    graph, state = nnx.split(module)
    restored = nnx.merge(*pickle.loads(pickle.dumps((graph, jax.device_get(state)))))
    assert_same_bits(nnx.to_pure_dict(nnx.state(restored)), nnx.to_pure_dict(state))
    assert restored.options == module.options


# ---- what a call records ----


def test_nnx_records_within_a_capture_only():
    module = module_of("nnx", implementation="reference")
    before = jax.tree.structure(nnx.split(module))
    module(x_of(5, dtype=jnp.float32))
    assert jax.tree.structure(nnx.split(module)) == before
    _, recorded = nnx.capture(module, nnx.Intermediate)(x_of(5, dtype=jnp.float32))
    assert set(recorded) == set(RECORDED) and all(len(recorded[name]) == 1 for name in RECORDED)
    assert not nnx.capture(module, nnx.Perturbation)(x_of(5, dtype=jnp.float32))[1]
    assert jax.tree.structure(nnx.split(module)) == before


def test_linen_records_what_is_mutable_only():
    module, x = module_of("linen", implementation="reference"), x_of(5, dtype=jnp.float32)
    variables = module.init(jax.random.key(0), x)
    assert variables.keys() == {"params"}  # else the first step would count twice
    y, recorded = module.apply(variables, x, mutable=["losses", "intermediates"])
    assert_same_bits(module.apply(variables, x), y)
    assert set(recorded["losses"]) == set(LOSSES) and set(recorded["intermediates"]) == {"tokens_per_expert"}
    assert all(len(values) == 1 for collection in recorded.values() for values in collection.values())

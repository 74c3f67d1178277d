"""Both modules as layers of a scan, with and without remat, and under the other transformations."""

import functools
import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from cases import TINY, assert_near, assert_same_bits, bound, mesh_of, numbered
from flax import nnx
from layers import (
    HIDDEN,
    LOSSES,
    RANDOM,
    RECORDED,
    SHARED,
    SIZES,
    by_hand,
    expected_of,
    frameworks,
    implementations,
    layer_of,
    module_of,
    parameters_of,
    results_of,
    run,
    sharpest_of,
    x_of,
)

import mok_jax
import mok_jax.linen
from mok_jax import ops

# ---- layers in a scan, with and without remat ----


LAYERS = 3


def stacked():
    layers = [parameters_of(seed=seed) for seed in range(LAYERS)]
    return {name: jnp.stack([layer[name] for layer in layers]) for name in layers[0]}


def scan_nnx(remat, implementation):
    def model(parameters, x):
        @nnx.vmap(in_axes=0, out_axes=0)
        def make(rngs):
            del rngs
            return module_of("nnx", implementation=implementation, config=TINY, shared_intermediate=SHARED)

        layers = make(nnx.Rngs(0).split(LAYERS))
        for name, value in parameters.items():
            setattr(layers, name, nnx.Param(value))

        def body(x, layer):
            return x + layer(x)

        scan = nnx.scan(remat_nnx(body) if remat else body, in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        y, recorded = nnx.capture(lambda layers, x: scan(x, layers), nnx.Intermediate)(layers, x)
        return y, {name: recorded[name][0] for name in RECORDED}

    return model


def remat_nnx(body):
    return nnx.remat(body, policy=mok_jax.save_moe_residuals)


def scan_linen(remat, implementation):
    class Block(nn.Module):
        @nn.compact
        def __call__(self, x):
            kind = nn.remat(mok_jax.linen.MoKMoE, policy=mok_jax.save_moe_residuals) if remat else mok_jax.linen.MoKMoE
            moe = kind(implementation=implementation, config=TINY, shared_intermediate=SHARED, name="moe", **SIZES)
            return x + moe(x), None

    axes = {"params": 0, "losses": 0, "intermediates": 0}
    layers = nn.scan(Block, variable_axes=axes, split_rngs={"params": True}, length=LAYERS)()

    def model(parameters, x):
        variables = {"params": {"moe": parameters}}
        (y, _), recorded = layers.apply(variables, x, mutable=["losses", "intermediates"])
        return y, {name: value for kind in recorded.values() for name, (value,) in kind["moe"].items()}

    return model


def unrolled(parameters, x):
    recorded = []
    for index in range(LAYERS):
        y, one = by_hand({name: value[index] for name, value in parameters.items()}, x)
        x = x + y
        recorded.append(one)
    return x, jax.tree.map(lambda *values: jnp.stack(values), *recorded)


def summed(model):
    """For `results_of`: the losses of all layers together, and each by itself."""

    def layer(parameters, x):
        y, recorded = model(parameters, x)
        assert recorded["load_balance_loss"].shape == (LAYERS,)
        totals = {name: recorded[name].sum() for name in LOSSES}
        return y, totals | {f"each_{name}": value for name, value in recorded.items()}

    return layer


@functools.cache
def expected_of_a_scan():
    return run(summed(unrolled), stacked(), x_of(37))


SCANS = {"nnx": scan_nnx, "linen": scan_linen}


@frameworks
@pytest.mark.parametrize("remat", [False, True], ids=["plain", "remat"])
def test_scan_over_layers(framework, remat):
    result = run(summed(SCANS[framework](remat, "xla")), stacked(), x_of(37))
    assert (result["each_tokens_per_expert"].sum(axis=1) == 37 * 3).all()
    assert_near(result, expected_of_a_scan(), 1e-12)


def test_layers_stacked_under_a_mesh():
    # As the README has it: flax must be told that the layers' axis is no mesh axis.
    metadata = {nnx.PARTITION_NAME: None}

    @nnx.vmap(in_axes=0, out_axes=0, transform_metadata=metadata)
    def make(key):
        return mok_jax.MoKMoE(8, 12, num_experts=4, top_k=2, implementation="host", rngs=nnx.Rngs(key))

    @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry, transform_metadata=metadata)
    def apply(layer, x):
        return layer(x)

    @nnx.jit
    def step(layers, x):
        return nnx.value_and_grad(lambda layers: jnp.square(apply(layers, x)).sum())(layers)

    keys, x = jax.random.split(jax.random.key(0), 3), jnp.asarray(np.random.default_rng(0).normal(size=(16, 8)))
    one = numbered(jax.device_get(step(make(keys), x)))
    with jax.set_mesh(mesh_of()):
        layers = make(keys)
        optimizer = nnx.Optimizer(layers, optax.adam(1e-3), wrt=nnx.Param)  # goes by the metadata
        stacked = [a for a in jax.tree.leaves(nnx.state((layers, optimizer))) if a.shape == (3, 4, 8, 12)]
        assert len(stacked) == 6  # w_gate and w_up, each with two moments
        assert all(a.sharding.shard_shape(a.shape) == (3, 1, 8, 12) for a in stacked)
        assert_near(numbered(jax.device_get(step(layers, x))), one, 1e-5)


@frameworks
def test_remat_with_the_policy_routes_and_calls_once(framework):
    layers = summed(SCANS[framework](True, "host"))
    text = jax.jit(functools.partial(results_of, layers)).lower(stacked(), x_of(37)).compile().as_text()
    assert sorted(re.findall(r'custom_call_target="(mok_\w+)"', text)) == ["mok_backward", "mok_forward"]
    assert len(re.findall(r" sort\(|TopK", text)) == 1


def test_remat_of_ties_changes_no_bit():
    parameters = parameters_of("float32") | {"router": jnp.zeros((HIDDEN, 6), jnp.float32)}
    layer = layer_of("nnx", implementation="host", config=TINY, dtype=jnp.bfloat16)
    again = jax.checkpoint(layer, policy=jax.checkpoint_policies.nothing_saveable)
    plain, remat = (run(f, parameters, x_of(37, dtype=jnp.bfloat16)) for f in (layer, again))
    assert_same_bits(remat, plain)


def test_router_gradient_is_linear_in_the_coefficient():
    layer = layer_of("nnx", implementation="reference")
    step = jax.jit(lambda c: results_of(layer, parameters_of(), x_of(37), coefficient=c)["d_router"])
    without, once, twice = (step(c) for c in (0.0, 1.0, 2.0))
    assert (once != without).any()
    assert_near({"d": twice - once}, {"d": once - without}, 1e-12)


def test_micro_batches_have_the_counts_of_the_whole_batch():
    layer = jax.jit(layer_of("nnx", implementation="reference"))
    x = x_of(36)
    _, whole = layer(parameters_of(), x)
    parts = [layer(parameters_of(), part)[1] for part in x.reshape(4, 9, HIDDEN)]
    assert (sum(part["tokens_per_expert"] for part in parts) == whole["tokens_per_expert"]).all()
    assert_near({"z": sum(part["router_z_loss"] for part in parts) / 4}, {"z": whole["router_z_loss"]}, 1e-14)


# ---- transformations ----


def test_nnx_training_step_with_donation():
    module = module_of("nnx", implementation="host", shared_intermediate=SHARED, **RANDOM)
    graph, state = nnx.split(module)

    def step(state, x):
        def loss(module):
            y, recorded = nnx.capture(module, nnx.Intermediate)(x)
            return ((y - x) ** 2).mean() + 0.01 * recorded["load_balance_loss"][0]

        value, gradients = nnx.value_and_grad(loss)(nnx.merge(graph, state))
        return value, jax.tree.map(lambda p, d: p - 0.1 * d, state, gradients)

    step = jax.jit(step, donate_argnums=0)
    x = x_of(37, dtype=jnp.float32)
    first, trained = jax.block_until_ready(step(state, x))
    second, _ = jax.block_until_ready(step(trained, x))
    assert second < first and state["w_gate"][...].is_deleted()


@pytest.mark.parametrize(("framework", "implementation"), [("nnx", "xla"), ("nnx", "host"), ("linen", "reference")])
def test_export(framework, implementation):
    layer = layer_of(framework, implementation=implementation, config=TINY)
    function = jax.jit(lambda parameters, x: layer(parameters, x)[0])
    checks = [jax.export.DisabledSafetyCheck.custom_call(target) for target in ops.TARGETS]
    exported = jax.export.export(function, disabled_checks=checks if implementation == "host" else ())
    arguments = parameters_of(), x_of(37)
    y = jax.jit(exported(*arguments).call)(*arguments)
    assert_near({"y": y}, {"y": expected_of()["y"]}, 1e-12)


@implementations
def test_vmap_is_a_loop(implementation):
    layer = layer_of("nnx", implementation=implementation)
    dtype = sharpest_of(implementation)
    mapped, recorded = jax.jit(jax.vmap(layer, in_axes=(None, 0)))(parameters_of(dtype), x_of(2, 37, dtype=dtype))
    single = jax.jit(layer_of("nnx", implementation="reference"))
    each = [single(parameters_of(), x) for x in x_of(2, 37)]
    together = jax.tree.map(lambda *values: jnp.stack(values), *each)
    assert_near({"y": mapped} | recorded, {"y": together[0]} | together[1], bound(implementation, 1e-13))

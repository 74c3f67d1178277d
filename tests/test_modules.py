"""Both modules: values, gradients and what they record, on one device, over meshes and under transformations."""

import contextlib
import functools
import pickle
import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from cases import (
    IMPLEMENTATIONS,
    TINY,
    assert_near,
    assert_same_bits,
    bound,
    kinds,
    mesh_of,
    numbered,
    refuse,
    tiny,
)
from flax import nnx
from jax.nn.initializers import lecun_normal, zeros
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
RANDOM = dict(kernel_init=lecun_normal(), router_init=lecun_normal())
LOSSES = ("load_balance_loss", "router_z_loss")
RECORDED = (*LOSSES, "tokens_per_expert")

FRAMEWORKS = ("nnx", "linen")
frameworks = pytest.mark.parametrize("framework", FRAMEWORKS)
implementations = pytest.mark.parametrize("implementation", IMPLEMENTATIONS)


# ---- one way to call both ----


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


# ---- masked tokens ----


MASK = np.random.default_rng(3).random((4, 9)) < 0.6


@functools.cache
def expected_of_the_unmasked():
    return run(by_hand, parameters_of(), x_of(4, 9)[MASK])


@implementations
def test_masked_tokens_take_no_part(implementation):
    # The masked rows hold NaN, and so does their cotangent.
    dtype = sharpest_of(implementation)
    parameters, x = parameters_of(dtype), jnp.where(MASK[..., None], x_of(4, 9, dtype=dtype), jnp.nan)
    layer = layer_of("nnx", implementation=implementation, config=tiny(implementation))

    def with_bad_cotangents(parameters, x, mask):
        y, recorded = layer(parameters, x, mask)
        return y * jnp.where(mask[..., None], 1, jnp.nan), recorded

    actual = run(with_bad_cotangents, parameters, x, jnp.asarray(MASK))
    expected = expected_of_the_unmasked()
    y, d_x = (actual.pop(name) for name in ("y", "d_x"))
    short = {"y": y[MASK], "d_x": d_x[MASK]}
    assert_near(actual | short, expected, bound(implementation, 1e-12))
    assert (d_x[~MASK] == 0).all()
    clean, _ = jax.jit(layer)(parameters, x, jnp.asarray(MASK))
    assert (np.asarray(clean)[~MASK] == 0).all()


# ---- the selection bias ----


@frameworks
def test_selection_bias_is_no_parameter(framework):
    module = module_of(framework, use_selection_bias=True)
    if framework == "nnx":
        names = set(nnx.to_pure_dict(nnx.state(module, nnx.Param)))
        bias = nnx.state(module, SelectionBias)["selection_bias"]
    else:
        variables = module.init(jax.random.key(0), x_of(2, dtype=jnp.float32))
        assert variables.keys() == {"params", "router_state"}
        names, bias = set(variables["params"]), variables["router_state"]["selection_bias"]
    assert bias.shape == (6,) and bias.dtype == jnp.float32
    assert {"router", "w_gate", "w_up", "w_down"} <= names and "selection_bias" not in names


def test_selection_bias_is_updated_by_the_trainer():
    module = module_of("nnx", use_selection_bias=True, implementation="reference", dtype=jnp.float32, **RANDOM)
    optimizer = nnx.Optimizer(module, optax.adamw(1e-3, weight_decay=0.1), wrt=nnx.Param)

    @nnx.jit
    def step(module, optimizer, x):
        def loss(module):
            y, recorded = nnx.capture(module, nnx.Intermediate)(x)
            return (y**2).mean(), recorded["tokens_per_expert"][0]

        gradients, counts = nnx.grad(loss, has_aux=True)(module)
        module.selection_bias[...] += 100.0 * (counts == counts.min())
        optimizer.update(module, gradients)
        return gradients, counts

    router = module.router[...]
    gradients, before = step(module, optimizer, x_of(37, dtype=jnp.float32))
    assert "selection_bias" not in gradients and (module.router[...] != router).all()
    assert_same_bits(module.selection_bias[...], 100 * np.float32(before == before.min()))
    _, after = step(module, optimizer, x_of(37, dtype=jnp.float32))
    assert before.min() < 37 and after[before.argmin()] == 37


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


# ---- over meshes ----

OTHERWISE = {  # as FSDP leaves them
    "router": P("data"),
    "w_gate": P("expert", "data"),
    "w_up": P("data"),
    "w_down": P(None, None, "expert"),
    "shared_gate": P("data", "expert"),
    "shared_up": P(None, "data"),
    "shared_down": P("expert"),
}


def placed(mesh, spec, x, specs=None):
    """The parameters as the modules make them or as in `specs`, and x as in `spec`."""
    specs = specs or {name: P("expert") if name.startswith("w_") else P() for name in OTHERWISE}
    parameters = {
        name: jax.device_put(value, NamedSharding(mesh, specs[name]))
        for name, value in parameters_of(experts=8).items()
    }
    return parameters, jax.device_put(x, NamedSharding(mesh, spec))


def residual_of(layer):
    def residual(parameters, x, mask):
        y, recorded = layer(parameters, x, mask)
        return x + y, recorded  # under Explicit axes y must have x's sharding

    return residual


EVERY = ("data", "expert")
# Both losses and all gradients on each mesh and kind of axes; frameworks, implementations, x's sharding and
# the ways to name the mesh are spread over them.
MATRIX = [
    ("nnx", "xla", "e8", "auto", P("expert"), "named"),
    ("linen", "host", "e8", "explicit", P("expert"), "ambient"),
    ("nnx", "host", "d2_e4", "auto", P("data"), "ambient"),
    ("linen", "xla", "d2_e4", "auto", P(EVERY), "arguments"),
    ("nnx", "reference", "d2_e4", "explicit", P("data", "expert"), "ambient"),
    ("nnx", "xla", "d2_e4", "explicit", P(None, EVERY), "named"),
    ("linen", "host", "d2_e4", "explicit", P(EVERY), "ambient"),
    ("nnx", "host", "d2_e4", "explicit", P("data", None, "expert"), "ambient"),
    ("linen", "reference", "d4_e2", "auto", P("data", "expert"), "named"),
    ("nnx", "host", "d4_e2", "explicit", P(), "ambient"),
]


def name_of_row(framework, implementation, mesh, kind, spec, how):
    axes = "_".join("".join(part if isinstance(part, str) else "".join(part or "-")) for part in spec) or "replicated"
    return "-".join([framework, implementation, mesh, kind, axes, how])


@pytest.mark.parametrize(
    ("framework", "implementation", "name", "kind", "spec", "how"), MATRIX, ids=[name_of_row(*row) for row in MATRIX]
)
def test_mesh_is_one_device(framework, implementation, name, kind, spec, how):
    mesh, x, mask = mesh_of(name, kind), x_of(8, 16), mask_of(8, 16)
    named = dict(mesh=mesh) if how == "named" else {}
    layer = layer_of(framework, implementation=implementation, config=TINY, num_experts=8, **named)
    with jax.set_mesh(mesh) if how == "ambient" else contextlib.nullcontext():
        results = run(residual_of(layer), *placed(mesh, spec, x), mask)
    assert_near(results, expected_on_a_mesh(), 1e-12)


@kinds
def test_parameters_sharded_otherwise(kind):
    layer = layer_of("nnx", implementation="host", config=TINY, num_experts=8)
    mesh = mesh_of(kind=kind)
    results = run(residual_of(layer), *placed(mesh, P("data", None, "expert"), x_of(8, 16), OTHERWISE), mask_of(8, 16))
    assert_near(results, expected_on_a_mesh(), 1e-12)


@pytest.mark.parametrize("token_axes", [["expert", "data"], "expert"], ids=["list", "name"])
def test_token_axes_as_moe_takes_them(token_axes):
    mesh = mesh_of()
    layer = layer_of("nnx", implementation="host", num_experts=8, mesh=mesh, token_axes=token_axes)
    y, _ = jax.jit(residual_of(layer))(parameters_of(experts=8), x_of(8, 16), mask_of(8, 16))
    assert_near({"y": y}, {"y": expected_on_a_mesh()["y"]}, 1e-12)


def test_steps_on_two_ranks_are_those_of_one_device():
    def trained(mesh):
        layer = layer_of("nnx", implementation="host", config=TINY, num_experts=8, mesh=mesh)

        def step(parameters, _):
            results = results_of(layer, parameters, x_of(8, 16), mask_of(8, 16))
            return {name: p - 0.01 * results[f"d_{name}"] for name, p in parameters.items()}, results["y"]

        return jax.device_get(jax.jit(lambda p: jax.lax.scan(step, p, None, 3))(parameters_of(experts=8)))

    devices = jax.devices()[:2]
    (one, y), (two, y_of_two) = trained(None), trained(jax.make_mesh((2,), ("expert",), devices=devices))
    assert_near(two | {"y": y_of_two}, one | {"y": y}, 1e-12)
    assert all(np.abs(one[name] - value).max() > 1e-3 for name, value in parameters_of(experts=8).items())


def mask_of(*leading):
    return jnp.asarray(np.random.default_rng(3).random(leading) < 0.8)


@functools.cache
def expected_on_a_mesh():
    return run(residual_of(by_hand), parameters_of(experts=8), x_of(8, 16), mask_of(8, 16))


# (framework, manual axes, those that split the tokens, check_vma)
MANUAL = {
    "nnx-all-vma": ("nnx", EVERY, EVERY, True),
    "linen-all-no_vma": ("linen", EVERY, EVERY, False),
    "nnx-all-replicated_over_data": ("nnx", EVERY, ("expert",), True),
    "nnx-data-no_vma": ("nnx", ("data",), ("data",), False),
    "linen-data-vma": ("linen", ("data",), ("data",), True),
    "linen-expert-vma": ("linen", ("expert",), ("expert",), True),
}


@pytest.mark.parametrize(("framework", "manual", "split", "check_vma"), MANUAL.values(), ids=MANUAL)
def test_inside_a_shard_map(framework, manual, split, check_vma):
    mesh = mesh_of()
    layer = layer_of(framework, implementation="xla", num_experts=8)
    tokens, by_expert = P(split), P("expert" if "expert" in manual else None)
    specs = {name: by_expert if name.startswith("w_") else P() for name in parameters_of()}
    inside = jax.shard_map(
        layer,
        mesh=mesh,
        in_specs=(specs, tokens, tokens),
        out_specs=(tokens, {name: P() for name in RECORDED}),
        axis_names=set(manual),
        check_vma=check_vma,
    )

    with jax.set_mesh(mesh):
        results = run(residual_of(inside), parameters_of(experts=8), x_of(8, 16), mask_of(8, 16))
    assert_near(results, expected_on_a_mesh(), 1e-12)


@kinds
def test_no_device_reads_the_scores_of_others(kind):
    # XLA cannot split a top-k: by itself it gathers all scores on every device.
    mesh = mesh_of(kind=kind)
    layer = layer_of("nnx", implementation="xla", num_experts=8)
    x = jax.device_put(x_of(8, 16, dtype=jnp.float32), NamedSharding(mesh, P(EVERY)))
    parameters = {name: value.astype(jnp.float32) for name, value in parameters_of(experts=8).items()}
    with jax.set_mesh(mesh):
        text = jax.jit(lambda x: layer(parameters, x)[0]).lower(x).compile().as_text()
    assert "all-to-all" in text and "all-gather" not in text


# ---- construction ----


def expert_specs(framework, module):
    """Each parameter's PartitionSpec as the framework tells it."""
    if framework == "nnx":
        specs = nnx.to_pure_dict(nnx.get_partition_spec(nnx.state(module, nnx.Param)))
    else:
        variables = jax.eval_shape(module.init, jax.random.key(0), x_of(8, dtype=jnp.float32))
        specs = nn.get_partition_spec(variables)["params"]
    return specs


def other_mesh():
    return jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))


def mixed_mesh():
    return jax.make_mesh((2, 4), ("data", "expert"), axis_types=(AxisType.Auto, AxisType.Explicit))


PLACES = {
    "none": (None, "none", False),
    "lacking-given": (other_mesh, "given", False),
    "lacking-ambient": (other_mesh, "ambient", False),
    "auto-given": (mesh_of, "given", True),
    "auto-ambient": (mesh_of, "ambient", True),
    "explicit-given": (functools.partial(mesh_of, kind="explicit"), "given", True),
    "explicit-ambient": (functools.partial(mesh_of, kind="explicit"), "ambient", True),
    "mixed-given": (mixed_mesh, "given", True),
    "mixed-ambient": (mixed_mesh, "ambient", True),
}


@frameworks
@pytest.mark.parametrize(("make", "how", "has_axis"), PLACES.values(), ids=PLACES)
def test_construction(framework, make, how, has_axis):
    mesh = make() if make else None
    with jax.set_mesh(mesh) if how == "ambient" else contextlib.nullcontext():
        given = dict(mesh=mesh) if how == "given" else {}
        module = module_of(framework, num_experts=8, shared_intermediate=SHARED, implementation="reference", **given)
        specs = expert_specs(framework, module)
    experts = P("expert", None, None) if has_axis else P()
    assert specs == {name: experts if name.startswith("w_") else P() for name in parameters_of()}


@kinds
def test_nnx_makes_the_experts_sharded(kind):
    with jax.set_mesh(mesh_of(kind=kind)):
        module = module_of("nnx", num_experts=8)
        layers = nnx.vmap(lambda rngs: module_of("nnx", num_experts=8))(nnx.Rngs(0).split(3))
    assert module.w_down[...].sharding.shard_shape((8, 40, HIDDEN)) == (2, 40, HIDDEN)
    assert layers.w_down[...].sharding.shard_shape((3, 8, 40, HIDDEN)) == (3, 2, 40, HIDDEN)


@kinds
def test_linen_parameters_may_stay_boxed(kind):
    mesh = mesh_of(kind=kind)
    with jax.set_mesh(mesh):
        module, x = module_of("linen", num_experts=8, implementation="xla", **RANDOM), x_of(8, dtype=jnp.float32)
        variables = jax.jit(module.init)(jax.random.key(0), x)
        assert isinstance(variables["params"]["w_gate"], nn.Partitioned)
        # nn.unbox would constrain the sharding, which Explicit axes refuse where it differs.
        unboxed = {name: getattr(box, "value", box) for name, box in variables["params"].items()}
        boxed, plain = (jax.jit(module.apply)({"params": v}, x) for v in (variables["params"], unboxed))
    assert_same_bits(boxed, plain)


def test_each_expert_has_its_own_fan_in_and_key():
    module = mok_jax.MoKMoE(96, 160, 6, 3, shared_intermediate=224, rngs=nnx.Rngs(0))  # with the defaults
    values = {name: np.asarray(value) for name, value in nnx.to_pure_dict(nnx.state(module, nnx.Param)).items()}
    for name, fan_in in dict(
        router=96, w_gate=96, w_up=96, w_down=160, shared_gate=96, shared_up=96, shared_down=224
    ).items():
        assert abs(values[name].std() * np.sqrt(fan_in) - 1) < 0.1, name
    assert len({expert.tobytes() for name in ("w_gate", "w_up", "w_down") for expert in values[name]}) == 18


def test_linen_makes_what_nnx_makes():
    initializers = dict(kernel_init=jax.nn.initializers.normal(0.5), router_init=jax.nn.initializers.ones)
    options = dict(shared_intermediate=SHARED, param_dtype=jnp.bfloat16, **initializers)
    variables = module_of("linen", **options).init(jax.random.key(0), x_of(2, dtype=jnp.float32))
    parameters = nnx.to_pure_dict(nnx.state(module_of("nnx", **options), nnx.Param))
    described = (jax.tree.map(lambda p: (p.shape, p.dtype), tree) for tree in (variables["params"], parameters))
    assert dict(next(described)) == next(described)
    assert (variables["params"]["router"] == 1).all() and (parameters["router"] == 1).all()


def test_linen_tabulates():
    table = module_of("linen", implementation="reference").tabulate(jax.random.key(0), x_of(5, dtype=jnp.float32))
    assert "w_gate" in table and "MoKMoE" in table


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


# ---- errors ----


DTYPE_NAMES = "('float32', 'float64', 'bfloat16')"
INDIVISIBLE = (
    "MoKMoE: num_experts must be divisible by the expert axis 'expert' of size 4, got 6; use 8 experts or another mesh"
)

# name: (options, error, text)
WRONG = {
    "expert_axis": (
        dict(expert_axis=["expert"]),
        TypeError,
        "MoKMoE: expert_axis must be the name of a mesh axis, got list ['expert']",
    ),
    "intermediate": (dict(intermediate=0), ValueError, "MoKMoE: intermediate must be an integer >= 1, got 0"),
    "num_experts": (dict(num_experts=2.0), TypeError, "MoKMoE: num_experts must be an integer >= 1, got float 2.0"),
    "top_k": (dict(top_k=7), ValueError, "MoKMoE: top_k must be an integer from 1 to num_experts 6, got 7"),
    "shared": (
        dict(shared_intermediate=0),
        ValueError,
        "MoKMoE: shared_intermediate must be an integer >= 1 or None, got 0",
    ),
    "scores": (dict(scores="relu"), ValueError, "MoKMoE: scores must be one of ('softmax', 'sigmoid'), got 'relu'"),
    "renormalize": (dict(renormalize=None), TypeError, "MoKMoE: renormalize must be True or False, got NoneType None"),
    "scaling": (dict(scaling=float("nan")), ValueError, "MoKMoE: scaling must be a finite number, got nan"),
    "bias": (dict(use_selection_bias=1), TypeError, "MoKMoE: use_selection_bias must be True or False, got int 1"),
    "dtype": (
        dict(dtype=jnp.float16),
        TypeError,
        f"MoKMoE: dtype must be one of {DTYPE_NAMES} or None, got float16",
    ),
    "param_dtype": (
        dict(param_dtype="half a float"),
        TypeError,
        f"MoKMoE: param_dtype must be one of {DTYPE_NAMES}, got 'half a float'",
    ),
    "config": (dict(config=3), TypeError, "MoKMoE: config must be a MoKConfig, got int 3"),
    "implementation": (
        dict(implementation="best"),
        ValueError,
        "moe: implementation must be one of ('cuda', 'host', 'xla', 'reference') or None, got 'best'",
    ),
    "token_axes": (dict(token_axes=3), TypeError, "MoKMoE: token_axes must be names of mesh axes or None, got int 3"),
    "mesh": (dict(mesh="d2_e4"), TypeError, "MoKMoE: mesh must be a jax.sharding.Mesh or None, got str 'd2_e4'"),
    "indivisible": (dict(mesh=AbstractMesh((2, 4), ("data", "expert"))), ValueError, INDIVISIBLE),
}


@frameworks
@pytest.mark.parametrize(("options", "error", "text"), WRONG.values(), ids=WRONG)
def test_options_are_refused_at_construction(framework, options, error, text):
    refuse(error, text, module_of, framework, **options)


@frameworks
def test_experts_that_the_ambient_mesh_cannot_divide(framework):
    with jax.set_mesh(mesh_of()):
        refuse(ValueError, INDIVISIBLE, module_of, framework)


@frameworks
def test_tokens_that_the_mesh_does_not_divide(framework):
    layer = layer_of(framework, num_experts=8, mesh=mesh_of())
    text = (
        "MoKMoE: tokens must be divisible by the mesh axes ('data', 'expert') of size 8, got 36 in "
        "x float64[4, 9, 24]; pad x and set token_mask to False there, or name fewer token_axes"
    )
    refuse(ValueError, text, layer, parameters_of(experts=8), x_of(4, 9))


X_DTYPES = "float32 or float64 or bfloat16"
WRONG_CALLS = {
    "x_dtype": (
        (jnp.zeros((5, HIDDEN), jnp.int32),),
        TypeError,
        f"MoKMoE: x must be {X_DTYPES}[..., hidden=24], got int32[5, 24]; cast x",
    ),
    "x_width": (
        (jnp.zeros((5, 23)),),
        ValueError,
        "MoKMoE: x must be float64[..., hidden=24], got float64[5, 23]; make the layer for x's width",
    ),
    "x_rank": (
        (jnp.zeros(()),),
        ValueError,
        "MoKMoE: x must be float64[..., hidden=24], got float64[]; make the layer for x's width",
    ),
    "mask_dtype": (
        (jnp.zeros((5, 2, HIDDEN)), jnp.zeros((5, 2))),
        TypeError,
        "MoKMoE: token_mask must be bool[5, 2], got float64[5, 2]; True keeps a token",
    ),
    "mask_shape": (
        (jnp.zeros((5, 2, HIDDEN)), jnp.zeros(10, bool)),
        ValueError,
        "MoKMoE: token_mask must be bool[5, 2], got bool[10]; give each token a value",
    ),
}


@frameworks
@pytest.mark.parametrize(("arguments", "error", "text"), WRONG_CALLS.values(), ids=WRONG_CALLS)
def test_arguments_are_refused(framework, arguments, error, text):
    refuse(error, text, layer_of(framework), parameters_of(), *arguments)

"""MoKMoE for nnx and for linen: one set of tests, through an adapter that makes each a function of its parameters."""

import contextlib
import functools
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from cases import assert_near, assert_same_bits, cotangent_of
from flax import linen as nn
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import mok_jax
import mok_jax.linen
from mok_jax import ops

BATCH, SEQUENCE, HIDDEN = 8, 8, 12
SIZES = dict(intermediate=20, num_experts=8, top_k=3, shared_intermediate=28)
DOUBLE = dict(dtype=jnp.float64, param_dtype=jnp.float64)
BIAS = np.linspace(0.3, -0.3, SIZES["num_experts"])
COLLECTIONS = ["losses", "intermediates"]

# The default, compiled as a whole: eagerly, and anew for each mesh, it costs seconds.
LECUN = jax.jit(jax.nn.initializers.lecun_normal(), static_argnums=(1, 2))
INIT = dict(kernel_init=LECUN, router_init=LECUN)
ZEROS = dict(kernel_init=jax.nn.initializers.zeros, router_init=jax.nn.initializers.zeros)


class Layer(NamedTuple):
    """apply(parameters, x, token_mask=None) -> y, what one call sowed by name; the framework's own parameters."""

    apply: Callable[..., Any]
    parameters: Any


def nnx_layer(x, bias=None, **options) -> Layer:
    layer = mok_jax.MoKMoE(x.shape[-1], rngs=nnx.Rngs(0), use_selection_bias=bias is not None, **options)
    if bias is not None:
        layer.selection_bias[...] = bias
    graph, parameters, rest = nnx.split(layer, nnx.Param, ...)

    def apply(parameters, x, token_mask=None):
        y, sown = nnx.capture(nnx.merge(graph, parameters, rest), nnx.Intermediate)(x, token_mask)
        return y, {name: value for name, (value,) in nnx.to_pure_dict(sown).items()}

    return Layer(apply, parameters)


def linen_layer(x, bias=None, **options) -> Layer:
    layer = mok_jax.linen.MoKMoE(use_selection_bias=bias is not None, **options)
    variables = layer.init(jax.random.key(0), x)
    state = {} if bias is None else {"router_state": {"selection_bias": jnp.asarray(bias)}}

    def apply(parameters, x, token_mask=None):
        y, sown = layer.apply({"params": parameters} | state, x, token_mask, mutable=COLLECTIONS)
        return y, {name: value for collection in sown.values() for name, (value,) in collection.items()}

    return Layer(apply, variables["params"])


FRAMEWORKS = {"nnx": nnx_layer, "linen": linen_layer}
frameworks = pytest.mark.parametrize("framework", FRAMEWORKS)


@functools.cache
def x_of(*shape, dtype="float64"):
    return jnp.asarray(np.random.default_rng(1).normal(size=shape), dtype)


X = x_of(BATCH, SEQUENCE, HIDDEN)
MASK = np.random.default_rng(2).random((BATCH, SEQUENCE)) < 0.7


def layer_of(framework, x=X, **options) -> Layer:
    return FRAMEWORKS[framework](x, **SIZES | DOUBLE | INIT | options)


def by_name(parameters) -> dict[str, Any]:
    return {path[0].key: leaf for path, leaf in jax.tree.leaves_with_path(parameters)}


def results_of(apply, parameters, x, mask=None, dy=None):
    """y, what was sown, and the gradient of x and of every parameter, by name; both losses count."""

    def loss(parameters, x):
        y, sown = apply(parameters, x) if mask is None else apply(parameters, x, mask)
        losses = sown["load_balance_loss"] + sown["router_z_loss"]
        d_y = (cotangent_of(y) if dy is None else dy).astype(losses.dtype)
        return (y * d_y).sum() + losses, (y, sown)

    (d_parameters, d_x), (y, sown) = jax.grad(loss, argnums=(0, 1), has_aux=True)(parameters, x)
    return {"y": y, "d_x": d_x} | sown | {f"d_{name}": d for name, d in by_name(d_parameters).items()}


jitted = jax.jit(results_of, static_argnums=0)


def run(layer: Layer, x, *mask_and_dy, parameters=None) -> dict[str, np.ndarray]:
    return jax.device_get(jitted(layer.apply, layer.parameters if parameters is None else parameters, x, *mask_and_dy))


@functools.cache
def on_one_device(framework):
    """The layer, and its results for X and MASK."""
    layer = layer_of(framework)
    return layer, run(layer, X, MASK)


def mesh_of(shape=(2, 4), axes=("data", "expert"), kind=AxisType.Auto):
    devices = jax.devices()[: int(np.prod(shape))]
    return jax.make_mesh(shape, axes, axis_types=(kind,) * len(axes), devices=devices)


kinds = pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])


# ---- what it computes ----


def by_hand(parameters, x, mask=None, *, scores="softmax", renormalize=True, scaling=1.0, bias=None):
    p = by_name(parameters)
    tokens = x.reshape(-1, HIDDEN)
    options = dict(scores=scores, renormalize=renormalize, scaling=scaling, selection_bias=bias)
    mask = None if mask is None else jnp.ravel(mask)
    routing = mok_jax.route(tokens @ p["router"], SIZES["top_k"], token_mask=mask, **options)
    shared = tuple(p[f"shared_{name}"] for name in ("gate", "up", "down"))
    weights = (p["w_gate"], p["w_up"], p["w_down"])
    y = mok_jax.moe(tokens, *routing[:2], *weights, shared=shared, implementation="reference")
    y = y if mask is None else jnp.where(mask[:, None], y, 0)
    return y.reshape(x.shape), routing._asdict() | {"expert_ids": None, "router_weights": None}


@frameworks
@pytest.mark.parametrize(
    ("options", "mask"),
    [({}, ()), (dict(scores="sigmoid", renormalize=False, scaling=2.5, bias=BIAS), (MASK,))],
    ids=["default", "all_options"],
)
def test_is_route_and_moe(framework, options, mask):
    layer = layer_of(framework, **options) if options else on_one_device(framework)[0]
    expected = jax.device_get(jitted(functools.partial(by_hand, **options), layer.parameters, X, *mask))
    expected = {name: value for name, value in expected.items() if value is not None}
    assert_near(run(layer, X, *mask), expected, 1e-13)


@frameworks
@pytest.mark.parametrize("shape", [(HIDDEN,), (5, HIDDEN), (2, 3, 4, HIDDEN)], ids=["h", "th", "2_3_4_h"])
def test_x_of_any_rank(framework, shape):
    layer, _ = on_one_device(framework)
    apply = jax.jit(layer.apply)
    flat = x_of(*shape).reshape(-1, HIDDEN)
    (y, sown), (expected, sown_flat) = apply(layer.parameters, x_of(*shape)), apply(layer.parameters, flat)
    assert y.shape == shape
    assert_same_bits((y.reshape(-1, HIDDEN), sown), (expected, sown_flat))


@frameworks
def test_a_masked_token_is_as_absent(framework):
    layer, _ = on_one_device(framework)
    masked = jnp.where(MASK[..., None], X, jnp.nan)
    dy = np.asarray(cotangent_of(X))
    results = run(layer, masked, MASK, np.where(MASK[..., None], dy, np.nan))
    short = run(layer, X[MASK], None, dy[MASK])
    assert not results["y"][~MASK].any() and not results["d_x"][~MASK].any()
    assert_near(results | {"y": results["y"][MASK], "d_x": results["d_x"][MASK]}, short, 1e-13)


# ---- parameters and dtypes ----


@frameworks
@pytest.mark.parametrize("param_dtype", ["float32", "bfloat16", "float64"])
def test_parameters(framework, param_dtype):
    parameters = by_name(layer_of(framework, param_dtype=param_dtype, **ZEROS).parameters)
    shapes = {name: (value.shape, value.dtype.name) for name, value in parameters.items()}
    wide = "float64" if param_dtype == "float64" else "float32"
    assert shapes == {
        "router": ((12, 8), wide),
        "w_gate": ((8, 12, 20), param_dtype),
        "w_up": ((8, 12, 20), param_dtype),
        "w_down": ((8, 20, 12), param_dtype),
        "shared_gate": ((12, 28), param_dtype),
        "shared_up": ((12, 28), param_dtype),
        "shared_down": ((28, 12), param_dtype),
    }


@frameworks
def test_each_expert_is_initialised_by_its_own_fan_in(framework):
    sizes = dict(intermediate=128, num_experts=5, shared_intermediate=96)
    parameters = by_name(FRAMEWORKS[framework](x_of(1, 64), **SIZES | sizes).parameters)
    fan_in = {name: value.shape[-2] for name, value in parameters.items()}
    spread = {name: np.std(value, axis=(-2, -1)) * np.sqrt(fan_in[name]) for name, value in parameters.items()}
    jax.tree.map(lambda s: np.testing.assert_allclose(s, 1, rtol=0.15), spread)
    experts = np.asarray(parameters["w_gate"])
    assert (
        np.abs(experts[1:] - experts[:-1]).max(axis=(1, 2)).all() and (parameters["w_gate"] != parameters["w_up"]).all()
    )


@frameworks
def test_initialisers_are_the_callers(framework):
    kernel, router = jax.nn.initializers.constant(0.5), jax.nn.initializers.zeros
    parameters = by_name(layer_of(framework, kernel_init=kernel, router_init=router).parameters)
    assert not parameters.pop("router").any()
    jax.tree.map(lambda value: np.testing.assert_array_equal(value, 0.5), parameters)


@pytest.mark.parametrize(("framework", "x_dtype"), [("nnx", "float32"), ("linen", "bfloat16")], ids=FRAMEWORKS)
def test_float32_parameters_under_bfloat16(framework, x_dtype):
    layer = layer_of(framework, dtype="bfloat16", param_dtype="float32")
    results = run(layer, X.astype(x_dtype))
    assert results["y"].dtype == jnp.bfloat16 and results["d_x"].dtype == x_dtype
    assert {results[name].dtype.name for name in ("load_balance_loss", "router_z_loss")} == {"float32"}
    gradients = {f"d_{name}": results[f"d_{name}"] for name in by_name(layer.parameters)}
    assert {gradient.dtype.name for gradient in gradients.values()} == {"float32"}
    rounded = {name: g.astype(jnp.bfloat16).astype("float32") for name, g in gradients.items()}
    assert all((g != rounded[name]).mean() > 0.9 for name, g in gradients.items())
    exact = run(layer_of(framework, dtype="float64", param_dtype="float32"), X.astype(jnp.bfloat16).astype("float64"))
    assert_near(gradients, {name: exact[name] for name in gradients}, 3e-2)


@frameworks
def test_near_ties_are_decided_in_float32(framework):
    # Two columns for each of 192 tokens, 2^-11 apart, the larger one first or second; no token sees another's.
    x = x_of(192, 64, dtype="bfloat16")
    pairs = np.asarray(x, np.float64).T / 8
    larger = 1 + 2.0**-11 * np.array([1, -1]) * np.where(np.arange(192) % 2, 1, -1)[:, None]
    router = jnp.asarray((pairs[:, :, None] * larger).reshape(64, 384), "float32")
    choice = (np.asarray(x, np.float64) @ np.asarray(router, np.float64)).argmax(axis=1)
    options = dict(num_experts=384, top_k=1, intermediate=1, shared_intermediate=None)
    layer = layer_of(framework, x, **options, dtype="bfloat16", param_dtype="bfloat16", router_init=lambda *_: router)
    _, sown = layer.apply(layer.parameters, x)
    np.testing.assert_array_equal(sown["tokens_per_expert"], np.bincount(choice, minlength=384))
    assert 0 < (choice % 2).sum() < 192


# ---- construction, with and without a mesh ----


def annotation_of(parameter):
    if isinstance(parameter, nn.Partitioned):
        return parameter.names
    return parameter.get_metadata().get("out_sharding") if isinstance(parameter, nnx.Variable) else None


def boxed(framework, **options):
    """w_gate with its metadata, and the router."""
    parameters = layer_of(framework, **ZEROS, **options).parameters
    return parameters["w_gate"], by_name(parameters)["router"]


@contextlib.contextmanager
def given_or_ambient(mesh, how):
    with jax.set_mesh(mesh) if how == "ambient" else contextlib.nullcontext():
        yield {} if how == "ambient" else dict(mesh=mesh)


hows = pytest.mark.parametrize("how", ["ambient", "given"])


@frameworks
def test_without_a_mesh(framework):
    gate, router = boxed(framework)
    assert annotation_of(gate) is None
    assert jax.tree.leaves(gate)[0].sharding == router.sharding == jax.sharding.SingleDeviceSharding(jax.devices()[0])


@frameworks
@pytest.mark.parametrize(
    ("how", "kind"), [("ambient", AxisType.Explicit), ("given", AxisType.Auto)], ids=["ambient_explicit", "given_auto"]
)
def test_a_mesh_without_the_expert_axis(framework, how, kind):
    with given_or_ambient(mesh_of((8,), ("data",), kind), how) as options:
        assert annotation_of(boxed(framework, **options)[0]) is None


@hows
@kinds
def test_a_mesh_with_the_expert_axis_nnx(how, kind):
    mesh = mesh_of(kind=kind)
    with given_or_ambient(mesh, how) as options:
        gate, router = boxed("nnx", **options)
    assert annotation_of(gate) == ("expert", None, None)
    assert gate.get_value().sharding.is_equivalent_to(NamedSharding(mesh, P("expert")), 3)
    assert router.sharding.is_fully_replicated


@hows
@kinds
def test_a_mesh_with_the_expert_axis_linen(how, kind):
    mesh = mesh_of(kind=kind)
    with given_or_ambient(mesh, how) as options:
        layer = mok_jax.linen.MoKMoE(**SIZES | ZEROS | options)
        init = functools.partial(layer.init, jax.random.key(0), X)
        shardings = nn.get_sharding(jax.eval_shape(init), mesh)
        parameters = jax.jit(init, out_shardings=shardings)()["params"]
    assert annotation_of(parameters["w_gate"]) == ("expert", None, None)
    assert parameters["w_gate"].value.sharding.is_equivalent_to(NamedSharding(mesh, P("expert")), 3)
    assert parameters["router"].sharding.is_fully_replicated


@frameworks
@hows
def test_experts_that_the_mesh_does_not_divide(framework, how):
    with given_or_ambient(mesh_of(), how) as options, pytest.raises(ValueError) as caught:
        make(framework, num_experts=6, **options)
    assert str(caught.value) == (
        "MoKMoE: num_experts must be divisible by the expert axis 'expert' of size 4, got 6; "
        "use 8 experts or another mesh"
    )


def make(framework, hidden=HIDDEN, **options):
    """Construction alone."""
    options = SIZES | options
    if framework == "linen":
        return mok_jax.linen.MoKMoE(hidden=hidden, **options)
    return mok_jax.MoKMoE(hidden, rngs=nnx.Rngs(0), **options)


DTYPES = "('float32', 'float64', 'bfloat16')"
OPTIONS = {
    "hidden": (dict(hidden=0), ValueError, "hidden must be an integer >= 1, got 0"),
    "intermediate": (dict(intermediate=2.0), TypeError, "intermediate must be an integer >= 1, got float 2.0"),
    "num_experts": (dict(num_experts=0), ValueError, "num_experts must be an integer >= 1, got 0"),
    "top_k": (dict(top_k=9), ValueError, "top_k must be an integer from 1 to num_experts 8, got 9"),
    "shared": (
        dict(shared_intermediate=0),
        ValueError,
        "shared_intermediate must be an integer >= 1 or None, got 0",
    ),
    "scores": (dict(scores="tanh"), ValueError, "scores must be one of ('softmax', 'sigmoid'), got 'tanh'"),
    "renormalize": (dict(renormalize=1), TypeError, "renormalize must be True or False, got int 1"),
    "scaling": (dict(scaling=None), TypeError, "scaling must be a finite number, got NoneType None"),
    "bias": (dict(use_selection_bias=None), TypeError, "use_selection_bias must be True or False, got NoneType None"),
    "param_dtype": (dict(param_dtype="int8"), TypeError, f"param_dtype must be one of {DTYPES}, got int8"),
    "dtype": (dict(dtype=jnp.float16), TypeError, f"dtype must be one of {DTYPES} or None, got float16"),
    "config": (dict(config=None), TypeError, "config must be a MoKConfig, got NoneType None"),
    "expert_axis": (
        dict(expert_axis=["expert"]),
        TypeError,
        "expert_axis must be the name of a mesh axis, got list ['expert']",
    ),
    "mesh": (dict(mesh=8), TypeError, "mesh must be a jax.sharding.Mesh or None, got int 8"),
}


@frameworks
@pytest.mark.parametrize(("options", "kind", "message"), OPTIONS.values(), ids=OPTIONS)
def test_option_refused_at_construction(framework, options, kind, message):
    with pytest.raises(kind) as caught:
        make(framework, **options)
    assert str(caught.value) == f"MoKMoE: {message}"


ARGUMENTS = {
    "x_dtype": (
        (X.astype(int),),
        TypeError,
        "x must be float32 or float64 or bfloat16[..., hidden=12], got int64[8, 8, 12]; cast x",
    ),
    "x_width": ((X[..., 1:],), ValueError, "x must be float64[..., hidden=12], got float64[8, 8, 11]"),
    "x_scalar": ((X[0, 0, 0],), ValueError, "x must be float64[..., hidden=12], got float64[]"),
    "mask_dtype": (
        (X, MASK.astype(int)),
        TypeError,
        "token_mask must be bool[8, 8], got int64[8, 8]; True keeps a token",
    ),
    "mask_shape": (
        (X, MASK[0]),
        ValueError,
        "token_mask must be bool[8, 8], got bool[8]; give each token a value",
    ),
}


@frameworks
@pytest.mark.parametrize(("arguments", "kind", "message"), ARGUMENTS.values(), ids=ARGUMENTS)
def test_argument_refused(framework, arguments, kind, message):
    layer = layer_of(framework, **ZEROS, **dict(hidden=HIDDEN) if framework == "linen" else {})
    with pytest.raises(kind) as caught:
        layer.apply(layer.parameters, *arguments)
    assert str(caught.value) == f"MoKMoE: {message}"


@frameworks
def test_a_router_cast_down_is_refused(framework):
    layer, _ = on_one_device(framework)
    with pytest.raises(TypeError) as caught:
        layer.apply(jax.tree.map(lambda value: value.astype(jnp.bfloat16), layer.parameters), X)
    assert str(caught.value) == (
        "MoKMoE: router must be float32 or float64[hidden, experts], got bfloat16[12, 8]; "
        "leave it out when parameters are cast: a small error changes the choice of experts"
    )


# ---- over a mesh: the results of one device ----

SPECS = {"batch": P("data"), "both": P(("data", "expert")), "grid": P("data", "expert"), "sequence": P(None, "expert")}
MATRIX = [  # linen has every second row
    ("e8", "auto", "sequence", "ambient"),
    ("e8", "explicit", "sequence", "given"),
    ("d2_e4", "auto", "batch", "given"),
    ("d2_e4", "auto", "grid", "built_before"),
    ("d2_e4", "explicit", "batch", "built_before"),
    ("d2_e4", "explicit", "grid", "ambient"),
    ("d2_e4", "explicit", "sequence", "arguments"),
    ("d4_e2", "auto", "both", "arguments"),
    ("d4_e2", "explicit", "both", "given"),
]
SHAPES = {"e8": ((8,), ("expert",)), "d2_e4": ((2, 4), ("data", "expert")), "d4_e2": ((4, 2), ("data", "expert"))}


ROWS = [("nnx", *row) for row in MATRIX] + [("linen", *row) for row in MATRIX[1::2]]


@pytest.mark.parametrize(("framework", "name", "kind", "spec", "how"), ROWS, ids=["-".join(row) for row in ROWS])
def test_matrix(framework, name, kind, spec, how):
    before, expected = on_one_device(framework)
    mesh = mesh_of(*SHAPES[name], {"auto": AxisType.Auto, "explicit": AxisType.Explicit}[kind])
    x = jax.device_put(X, NamedSharding(mesh, SPECS[spec]))
    built = how in ("ambient", "given")
    with jax.set_mesh(mesh) if how in ("ambient", "built_before") else contextlib.nullcontext():
        layer = layer_of(framework, **ZEROS, **dict(mesh=mesh) if how == "given" else {}) if built else before
        # In place of the zeros the values of one device, on the mesh where the layer put them there.
        values = [
            jax.device_put(value, made.sharding) if isinstance(made.sharding, NamedSharding) else value
            for value, made in zip(*map(jax.tree.leaves, (before.parameters, layer.parameters)), strict=True)
        ]
        parameters = jax.tree.unflatten(jax.tree.structure(layer.parameters), values)
        results = jitted(layer.apply, parameters, x, MASK)
        assert kind == "auto" or results["y"].sharding.is_equivalent_to(x.sharding, 3)
        results = jax.device_get(results)
    assert_near(results, expected, 1e-12)
    np.testing.assert_array_equal(results["tokens_per_expert"], expected["tokens_per_expert"])


@pytest.mark.parametrize(("framework", "kind"), [("nnx", AxisType.Explicit), ("linen", AxisType.Auto)], ids=FRAMEWORKS)
def test_a_layer_built_before_a_mesh_without_the_expert_axis(framework, kind):
    layer, expected = on_one_device(framework)
    mesh = mesh_of((8,), ("data",), kind)
    with jax.set_mesh(mesh):
        parameters = jax.device_put(layer.parameters, NamedSharding(mesh, P()))
        results = run(layer, jax.device_put(X, NamedSharding(mesh, P("data"))), MASK, parameters=parameters)
    assert_near(results, expected, 1e-12)


@kinds
def test_parameters_sharded_otherwise(kind):
    layer, expected = on_one_device("nnx")
    mesh = mesh_of(kind=kind)
    specs = {"router": P("data"), "w_gate": P("expert", "data"), "w_up": P("data"), "w_down": P(None, None, "expert")}
    specs |= {"shared_gate": P("data", "expert"), "shared_up": P(None, "data"), "shared_down": P("expert")}
    parameters = jax.tree.map_with_path(
        lambda path, value: jax.device_put(value, NamedSharding(mesh, specs[path[0].key])), layer.parameters
    )
    x = jax.device_put(X, NamedSharding(mesh, P("data", None, "expert")))
    assert_near(run(layer, x, MASK, parameters=parameters), expected, 1e-12)


BOTH = ("data", "expert")
SHARD_MAPS = {
    "nnx-manual": ("nnx", BOTH, BOTH, True),
    "nnx-manual-no_vma": ("nnx", BOTH, BOTH, False),
    "nnx-replicated_over_data": ("nnx", ("expert",), BOTH, True),
    "nnx-partly_manual": ("nnx", ("data",), ("data",), True),
    "linen-manual": ("linen", BOTH, BOTH, True),
    "linen-partly_manual": ("linen", ("expert",), ("expert",), True),
}


@pytest.mark.parametrize(("framework", "tokens", "manual", "check_vma"), SHARD_MAPS.values(), ids=SHARD_MAPS)
def test_inside_the_callers_shard_map(framework, tokens, manual, check_vma):
    layer, expected = on_one_device(framework)
    experts = P("expert" if "expert" in manual else None)
    specs = jax.tree.map(lambda value: experts if value.ndim == 3 else P(), layer.parameters)
    apply = jax.shard_map(
        layer.apply,
        mesh=mesh_of(),
        in_specs=(specs, P(tokens), P(tokens)),
        out_specs=(P(tokens), P()),
        axis_names=set(manual),
        check_vma=check_vma,
    )
    assert_near(run(layer._replace(apply=apply), X, jnp.asarray(MASK)), expected, 1e-12)


@pytest.mark.parametrize("token_axes", [["expert", "data"], "expert"], ids=["list", "name"])
def test_token_axes_as_moe_takes_them(token_axes):
    before, expected = on_one_device("nnx")
    layer = layer_of("nnx", **ZEROS, mesh=mesh_of(), token_axes=token_axes)
    y, _ = jax.jit(layer.apply)(before.parameters, X, MASK)
    assert_near({"y": y}, {"y": expected["y"]}, 1e-12)


# ---- layers in a row ----

LAYERS = 3
SMALL = SIZES | DOUBLE | dict(shared_intermediate=None) | INIT


class Block(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        return x + mok_jax.linen.MoKMoE(**SMALL, name="moe")(x), None


class Stack(nn.Module):
    wrap: Callable = lambda block: block

    @nn.compact
    def __call__(self, x):
        axes = {"params": 0, "losses": 0, "intermediates": 0}
        scan = nn.scan(self.wrap(Block), variable_axes=axes, split_rngs={"params": True}, length=LAYERS)
        return scan(name="layers")(x, None)[0]


def linen_remat(block):
    return nn.remat(block, policy=mok_jax.save_moe_residuals, prevent_cse=False)


@functools.cache
def nnx_stack():
    """Graph and parameters of three layers made by nnx.vmap."""
    make = nnx.vmap(lambda rngs: mok_jax.MoKMoE(HIDDEN, **SMALL, rngs=rngs))
    return nnx.split(make(nnx.Rngs(0).split(LAYERS)))


def nnx_block(x, layer):
    y, sown = nnx.capture(layer, nnx.Intermediate)(x)
    return x + y, sown


def through_nnx_scan(wrap, parameters, x):
    scan = nnx.scan(wrap(nnx_block), in_axes=(nnx.Carry, 0), out_axes=(nnx.Carry, 0))
    x, sown = scan(x, nnx.merge(nnx_stack()[0], parameters))
    return x, {name: value for name, (value,) in nnx.to_pure_dict(sown).items()}


def through_lax_scan(wrap, parameters, x):
    def block(x, parameters):
        x, sown = nnx_block(x, nnx.merge(nnx_stack()[0], parameters))
        return x, {name: value for name, (value,) in nnx.to_pure_dict(sown).items()}

    return jax.lax.scan(wrap(block), x, parameters)


def through_linen_scan(wrap, parameters, x):
    x, sown = Stack(wrap).apply({"params": {"layers": {"moe": parameters}}}, x, mutable=COLLECTIONS)
    return x, {name: value for collection in sown.values() for name, (value,) in collection["layers"]["moe"].items()}


def unrolled(parameters, x):
    """One layer after the other, each by nnx."""
    apply = nnx_layer(X, **SMALL).apply
    sown = []
    for index in range(LAYERS):
        y, of_layer = apply(nnx.State({name: nnx.Param(p[index]) for name, p in by_name(parameters).items()}), x)
        x, sown = x + y, [*sown, of_layer]
    return x, jax.tree.map(lambda *values: jnp.stack(values), *sown)


def nnx_remat(function):
    return nnx.remat(function, policy=mok_jax.save_moe_residuals)


SCANS = {
    "nnx_scan-remat": (through_nnx_scan, nnx_remat),
    "lax_scan": (through_lax_scan, lambda block: block),
    "linen_scan-remat": (through_linen_scan, linen_remat),
}


def results_of_layers(apply, parameters, x):
    """As `results_of`, each layer's losses having a coefficient of their own."""

    def loss(parameters, x):
        y, sown = apply(parameters, x)
        assert {name: value.shape for name, value in sown.items()} == {
            "load_balance_loss": (LAYERS,),
            "router_z_loss": (LAYERS,),
            "tokens_per_expert": (LAYERS, SIZES["num_experts"]),
        }
        coefficients = jnp.arange(1.0, LAYERS + 1)
        losses = sown["load_balance_loss"] + sown["router_z_loss"]
        return (y * cotangent_of(y)).sum() + (coefficients * losses).sum(), (y, sown)

    (d_parameters, d_x), (y, sown) = jax.grad(loss, argnums=(0, 1), has_aux=True)(parameters, x)
    return {"y": y, "d_x": d_x} | sown | {f"d_{name}": d for name, d in by_name(d_parameters).items()}


@functools.cache
def expected_of_layers():
    _, parameters = nnx_stack()
    return parameters, jax.jit(functools.partial(results_of_layers, unrolled))(parameters, X)


@pytest.mark.parametrize(("scan", "wrap"), SCANS.values(), ids=SCANS)
def test_scan_over_layers(scan, wrap):
    parameters, expected = expected_of_layers()
    parameters = by_name(parameters) if scan is through_linen_scan else parameters
    results = jax.jit(functools.partial(results_of_layers, functools.partial(scan, wrap)))(parameters, X)
    assert_near(results, expected, 1e-12)
    np.testing.assert_array_equal(
        results["tokens_per_expert"].sum(axis=1), [BATCH * SEQUENCE * SIZES["top_k"]] * LAYERS
    )


# ---- checkpoint ----


def calls_in(text):
    return sorted(re.findall(r'custom_call_target="(mok_\w+)"', text)), len(re.findall(r"TopK|topk\(| sort\(", text))


@frameworks
@pytest.mark.parametrize(
    ("policy", "forwards"), [(mok_jax.save_moe_residuals, 1), (None, 2)], ids=["residuals", "none"]
)
def test_checkpoint_with_ties(framework, policy, forwards):
    layer, _ = on_one_device(framework)
    ties = jax.tree.map_with_path(lambda path, p: p * (path[0].key != "router"), layer.parameters)
    wrapped = jax.checkpoint(layer.apply, policy=policy)
    compiled = jitted.lower(wrapped, ties, X).compile()
    calls, choices = calls_in(compiled.as_text())
    assert calls == ["mok_backward"] + ["mok_forward"] * forwards and choices == forwards
    results = compiled(ties, X)
    assert_same_bits(results, run(layer, X, parameters=ties))
    np.testing.assert_array_equal(results["tokens_per_expert"], [BATCH * SEQUENCE] * 3 + [0] * 5)


# ---- donation, export, vmap ----


@frameworks
def test_donated_parameters_in_a_training_step(framework):
    layer, _ = on_one_device(framework)

    def step(parameters, x):
        d_parameters = jax.grad(lambda p: (layer.apply(p, x)[0] ** 2).sum())(parameters)
        return jax.tree.map(lambda p, d: p - 0.1 * d, parameters, d_parameters)

    expected = jax.jit(step)(layer.parameters, X)
    donated = jax.tree.map(jnp.copy, layer.parameters)
    assert_same_bits(jax.jit(step, donate_argnums=0)(donated, X), expected)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(donated))


@frameworks
def test_export(framework):
    layer, expected = on_one_device(framework)
    checks = [jax.export.DisabledSafetyCheck.custom_call(target) for target in ops.TARGETS]
    leaves, tree = jax.tree.flatten(layer.parameters)  # without flax's containers, unknown to jax.export

    def function(leaves, x, mask):
        return results_of(layer.apply, jax.tree.unflatten(tree, leaves), x, mask)

    exported = jax.export.export(jax.jit(function), disabled_checks=checks)(leaves, X, MASK)
    assert_near(jax.jit(exported.call)(leaves, X, MASK), expected, 1e-12)


@frameworks
def test_vmap_on_one_rank(framework):
    layer, _ = on_one_device(framework)
    apply = jax.jit(layer.apply)
    y, sown = jax.jit(jax.vmap(layer.apply, in_axes=(None, 0)))(layer.parameters, X[:2])
    expected = [apply(layer.parameters, x) for x in X[:2]]
    expected = jax.tree.map(lambda *values: jnp.stack(values), *expected)
    assert_near({"y": y} | sown, {"y": expected[0]} | expected[1], 1e-13)


@frameworks
def test_vmap_across_ranks_is_refused(framework):
    layer = layer_of(framework, **ZEROS, mesh=mesh_of())
    with pytest.raises(NotImplementedError) as caught:
        jax.eval_shape(jax.vmap(layer.apply, in_axes=(None, 0)), layer.parameters, X)
    assert str(caught.value) == (
        'moe: vmap across the ranks of an expert axis is not supported by implementation "host"; '
        'vmap inside the shard or use "xla"'
    )


# ---- training ----


@frameworks
def test_the_router_learns_from_losses_in_proportion(framework):
    layer, _ = on_one_device(framework)

    @jax.jit
    def d_router(coefficient):
        def loss(parameters):
            y, sown = layer.apply(parameters, X)
            return (y**2).sum() + coefficient * (sown["load_balance_loss"] + sown["router_z_loss"])

        return by_name(jax.grad(loss)(layer.parameters))["router"]

    none, once, twice = (np.asarray(d_router(c)) for c in (0.0, 1.0, 2.0))
    assert np.abs(once - none).min() > 0
    assert_near({"d": twice - none}, {"d": 2 * (once - none)}, 1e-12)


def test_three_steps_on_two_ranks():
    def train(mesh):
        with jax.set_mesh(mesh) if mesh else contextlib.nullcontext():
            layer = layer_of("nnx")

            def loss(parameters):
                y, sown = layer.apply(parameters, X)
                return (y**2).mean() + sown["load_balance_loss"] + sown["router_z_loss"]

            def step(parameters, _):
                return jax.tree.map(lambda p, d: p - 0.5 * d, parameters, jax.grad(loss)(parameters)), None

            trained = jax.jit(lambda p: jax.lax.scan(step, p, None, 3)[0])(layer.parameters)
            return jax.device_get(by_name(trained)), jax.device_get(by_name(layer.parameters))

    trained, initial = train(mesh_of((2,), ("expert",)))
    assert_near(trained, train(None)[0], 1e-12)
    ranks = trained["w_gate"].reshape(2, -1)
    assert np.abs(ranks[0] - ranks[1]).max() > 0.1
    assert all(np.abs(trained[name] - initial[name]).max() > 1e-4 for name in initial)


def nnx_model(**options):
    return mok_jax.MoKMoE(HIDDEN, **SIZES | DOUBLE | INIT | options, rngs=nnx.Rngs(0))


def square(model, x):
    return (model(x) ** 2).sum()


def test_nnx_jit_and_value_and_grad():
    model = nnx_model()
    graph, parameters = nnx.split(model)
    want = jax.jit(jax.value_and_grad(lambda p: square(nnx.merge(graph, p), X)))(parameters)
    value, gradients = nnx.jit(nnx.value_and_grad(square))(model, X)
    assert_same_bits((value, by_name(gradients)), (want[0], by_name(want[1])))
    assert_same_bits(by_name(nnx.jit(nnx.grad(square))(model, X)), by_name(gradients))


def test_selection_bias_is_left_to_the_trainer():
    model = nnx_model(use_selection_bias=True)
    model.selection_bias[...] = BIAS
    before = jax.device_get(by_name(nnx.state(model)))
    optimizer = nnx.Optimizer(model, optax.adamw(0.1, weight_decay=0.1), wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer):
        gradients = nnx.grad(square)(model, X)
        assert "selection_bias" not in gradients
        optimizer.update(model, gradients)

    step(model, optimizer)
    after = jax.device_get(by_name(nnx.state(model)))
    assert_same_bits(after.pop("selection_bias"), before.pop("selection_bias"))
    assert all((after[name] != before[name]).any() for name in before)


def test_selection_bias_of_linen_has_a_collection_of_its_own():
    layer = mok_jax.linen.MoKMoE(**SIZES | DOUBLE | INIT, use_selection_bias=True)
    variables = layer.init(jax.random.key(0), X)
    assert "selection_bias" not in variables["params"]
    assert_same_bits(variables["router_state"], {"selection_bias": np.zeros(8)})
    gradient = jax.jit(jax.grad(lambda variables: layer.apply(variables, X).sum()))(variables)
    assert not gradient["router_state"]["selection_bias"].any()


# ---- state ----


def test_nnx_state_round_trip():
    model = nnx_model(use_selection_bias=True)
    other = nnx_model(use_selection_bias=True, kernel_init=nnx.initializers.zeros)
    model.selection_bias[...] = BIAS
    graph, state = nnx.split(model)
    assert_same_bits(nnx.merge(graph, state)(X), model(X))
    nnx.update(other, jax.tree.map(np.asarray, state))
    assert_same_bits(other(X), model(X))


def test_nnx_evaluation_leaves_the_state_as_it_was():
    model = nnx_model()
    graph, state = nnx.split(model)
    before = jax.device_get(state)
    model(X)
    nnx.jit(lambda model, x: model(x))(model, X)
    nnx.capture(model, nnx.Intermediate)(X)
    nnx.capture(model, nnx.Perturbation)(X)  # of another type: nothing is recorded, nothing fails
    assert nnx.graphdef(model) == graph
    assert_same_bits(nnx.state(model), before)


def test_linen_evaluation_returns_y_alone():
    layer = mok_jax.linen.MoKMoE(**SIZES | DOUBLE)
    variables = layer.init(jax.random.key(0), X)
    assert set(variables) == {"params"}
    y, sown = layer.apply(variables, X, mutable=COLLECTIONS)
    assert set(sown) == set(COLLECTIONS)
    assert_same_bits(layer.apply(variables, X), y)

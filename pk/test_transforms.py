"""moe() under JAX's transformations: jit, scan, checkpoint, donation, export, vmap, jvp."""

import functools
import re

import jax
import jax.numpy as jnp
import pytest
from cases import (
    GPU,
    IMPLEMENTATIONS,
    Case,
    assert_near,
    assert_same_bits,
    bound,
    call,
    cotangent_of,
    make_case,
    mesh_of,
    numbered,
    on_device,
    refuse,
    run,
    sharpest,
    tiny,
    value_and_gradients,
)
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import mok_jax
from mok_jax import ops

implementations = pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
COMPILED = ("host", "cuda") if GPU else ("host",)

SIZES = dict(tokens=8, hidden=6, intermediate=10, shared=14, experts=4, top_k=2)


def case_of(implementation="reference", routing="duplicates", seed=0):
    return make_case(sharpest(implementation), routing, seed, **SIZES)


# ---- layers in a row ----

LAYERS = 3


def stacked(implementation="reference"):
    """x, ids and router weights of one case, and the weights of three layers."""
    layers = [case_of(implementation, seed=seed)[3:] for seed in range(LAYERS)]
    return case_of(implementation), jax.tree.map(lambda *w: jnp.stack(w), *layers)


def with_residual(case, x, weights, implementation, **options):
    """One layer of a model: x + moe(x)."""
    return x + call(Case(x, *case[1:3], *weights), implementation, **options)


def through_scan(case, layers, implementation, wrap=lambda f: f, **options):
    @wrap
    def layer(x, weights):
        return with_residual(case, x, weights, implementation, **options)

    return jax.lax.scan(lambda x, weights: (layer(x, weights), None), case.x, layers)[0]


def unrolled(case, layers, implementation):
    x = case.x
    for index in range(LAYERS):
        weights = jax.tree.map(lambda w, i=index: w[i], layers)
        x = with_residual(case, x, weights, implementation)
    return x


def gradients(layers_to_x, case, layers):
    """The last x and the gradient in the first one and in every weight, by name."""

    def loss(x, layers):
        y = layers_to_x(case._replace(x=x), layers)
        return (y * cotangent_of(y)).sum(), y

    (d_x, d_layers), y = jax.grad(loss, argnums=(0, 1), has_aux=True)(case.x, layers)
    return {"y": y, "d_x": d_x} | numbered(d_layers)


jitted_gradients = jax.jit(gradients, static_argnums=0)

# A function's identity is its key in jit's cache: one for each implementation, for the whole file.
SCANS = {name: lambda c, w, n=name: through_scan(c, w, n, config=tiny(n)) for name in IMPLEMENTATIONS}


@functools.cache
def expected_of_three_layers():
    with on_device("reference"):
        return jax.device_get(jitted_gradients(lambda c, w: unrolled(c, w, "reference"), *stacked()))


@implementations
def test_scan_over_layers(implementation):
    result = jitted_gradients(SCANS[implementation], *stacked(implementation))
    assert_near(result, expected_of_three_layers(), bound(implementation, 1e-12))


@pytest.mark.parametrize("implementation", ["xla", "host"])
def test_scan_over_layers_on_a_mesh(implementation):
    case, layers = jax.device_put(stacked(), NamedSharding(mesh_of(), P()))
    result = jitted_gradients(lambda c, w: through_scan(c, w, implementation, mesh=mesh_of()), case, layers)
    assert_near(jax.device_get(result), expected_of_three_layers(), 1e-12)


POLICIES = {
    "nothing": jax.checkpoint_policies.nothing_saveable,
    "residuals": mok_jax.save_moe_residuals,
}


def scan_with(policy, implementation, **options):
    def wrap(layer):
        return jax.checkpoint(layer, policy=POLICIES[policy])

    return lambda c, w: through_scan(c, w, implementation, wrap, config=tiny(implementation), **options)


@implementations
@pytest.mark.parametrize("policy", POLICIES)
def test_checkpoint_changes_no_gradient(implementation, policy):
    result = jitted_gradients(scan_with(policy, implementation), *stacked(implementation))
    plain = jitted_gradients(SCANS[implementation], *stacked(implementation))
    assert_near(result, plain, bound(implementation, 1e-14))


PLACES = {"one_device": ("host", None), "mesh": ("host", mesh_of())} | ({"cuda": ("cuda", None)} if GPU else {})


@pytest.mark.parametrize(("implementation", "mesh"), PLACES.values(), ids=PLACES)
@pytest.mark.parametrize(("policy", "forwards"), [("residuals", 1), ("nothing", 2)])
def test_calls_under_checkpoint(policy, forwards, implementation, mesh):
    layers = scan_with(policy, implementation, mesh=mesh)
    text = jitted_gradients.lower(layers, *stacked(implementation)).compile().as_text()
    calls = re.findall(r'custom_call_target="(mok_\w+)"', text)
    assert sorted(calls) == ["mok_backward"] + ["mok_forward"] * forwards


# ---- donation and export ----


@implementations
def test_donated_x(implementation):
    case = make_case(sharpest(implementation), **SIZES | dict(top_k=1))
    layer = jax.jit(lambda x, rest: call(rest._replace(x=x), implementation), donate_argnums=0)
    expected = jax.jit(call, static_argnums=1)(case, implementation)
    x = jnp.copy(case.x)
    assert_same_bits(layer(x, case), expected)
    assert x.is_deleted()


@implementations
def test_donated_weights_in_a_training_step(implementation):
    case = case_of(implementation)

    def step(experts, rest):
        def loss(experts):
            return (call(rest._replace(**experts), implementation) ** 2).sum()

        return jax.tree.map(lambda w, d: w - 0.1 * d, experts, jax.grad(loss)(experts))

    experts = {name: getattr(case, name) for name in Case._fields[3:6]}
    expected = jax.jit(step)(experts, case)
    donated = jax.tree.map(jnp.copy, experts)
    assert_same_bits(jax.jit(step, donate_argnums=0)(donated, case), expected)
    assert donated["w_gate"].is_deleted()


EXPORTED = [jax.export.DisabledSafetyCheck.custom_call(target) for target in ops.TARGETS]


def exported_and_called(function, *arguments, platforms=None):
    exported = jax.export.export(jax.jit(function), disabled_checks=EXPORTED, platforms=platforms)(*arguments)
    return jax.jit(exported.call)(*arguments)


@implementations
def test_export(implementation):
    case = case_of(implementation)
    platforms = ("cuda",) if implementation == "cuda" else None
    function = lambda case, dy: value_and_gradients(case, dy, implementation)  # noqa: E731
    result = exported_and_called(function, case, case.x, platforms=platforms)
    assert_near(result, run(case, "reference", case.x), bound(implementation, 1e-12))


@pytest.mark.parametrize("implementation", ["xla", "host"])
def test_export_on_a_mesh(implementation):
    mesh = mesh_of()
    case = jax.device_put(case_of(), NamedSharding(mesh, P()))

    def function(case, dy):
        return value_and_gradients(case, dy, implementation, (("mesh", mesh),))

    result = jax.device_get(exported_and_called(function, case, case.x))
    assert_near(result, run(case_of(), "reference", case_of().x), 1e-12)


# ---- vmap and jvp ----

BATCH = 2
MAPPED = {
    "x": ("x",),
    "ids": ("expert_ids",),
    "router_weights": ("router_weights",),
    "w_down": ("w_down",),
    "weights": ("w_gate", "w_up", "w_down", "shared"),
    "all": Case._fields,
}


def batch_of(names, implementation="reference"):
    """A case whose named arrays have a leading axis, and the in_axes for it."""
    cases = [case_of(implementation, "distinct", seed) for seed in range(BATCH)]
    both = jax.tree.map(lambda *values: jnp.stack(values), *cases)
    axes = Case(*(0 if name in names else None for name in Case._fields))
    return Case(*(getattr(both if name in names else cases[0], name) for name in Case._fields)), axes


def one_by_one(function, batch, axes):
    def item(index):
        picked = jax.tree.map(lambda values: values[index], batch)
        return Case(*(getattr(batch if axis is None else picked, name) for name, axis in axes._asdict().items()))

    return jax.tree.map(lambda *values: jnp.stack(values), *(function(item(index)) for index in range(BATCH)))


reference_y = jax.jit(lambda case: call(case, "reference"))


def assert_mapped(layer, names, implementation="reference"):
    """vmap of `layer(case)` gives the y of "reference" on one case after the other."""
    batch, axes = batch_of(names, implementation)
    mapped = jax.device_get(jax.jit(jax.vmap(layer, in_axes=(axes,)))(batch))
    with on_device("reference"):
        expected = jax.device_get(one_by_one(reference_y, batch, axes))
    assert_near({"y": mapped}, {"y": expected}, bound(implementation, 1e-13))


@implementations
@pytest.mark.parametrize("names", MAPPED.values(), ids=MAPPED)
def test_vmap_is_a_loop(implementation, names):
    assert_mapped(lambda case: call(case, implementation), names, implementation)


@implementations
@pytest.mark.parametrize("names", [MAPPED["x"], MAPPED["all"]], ids=["x", "all"])
def test_vmap_of_the_gradient_is_a_loop(implementation, names):
    batch, axes = batch_of(names, implementation)
    cotangent = cotangent_of(case_of(implementation).x)
    mapped = jax.vmap(lambda case: value_and_gradients(case, cotangent, implementation), in_axes=(axes,))
    expected = one_by_one(lambda case: run(case, "reference", cotangent), batch, axes)
    assert_near(jax.jit(mapped)(batch), jax.device_get(expected), bound(implementation, 1e-13))


@pytest.mark.parametrize("implementation", ["reference", "xla"])
def test_vmap_across_ranks(implementation):
    assert_mapped(lambda case: call(case, implementation, mesh=mesh_of()), MAPPED["all"])


def test_vmap_across_ranks_is_refused_by_host():
    batch, axes = batch_of(MAPPED["x"])
    mapped = jax.jit(jax.vmap(lambda case: call(case, "host", mesh=mesh_of()), in_axes=(axes,)))
    text = (
        'moe: vmap across the ranks of an expert axis is not supported by implementation "host"; '
        'vmap inside the shard or use "xla"'
    )
    refuse(NotImplementedError, text, mapped, batch)


def test_vmap_over_data_ranks_of_host():
    # One rank of experts on each device: the calls are independent, and vmap is a loop on each.
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    assert_mapped(lambda case: call(case, "host", mesh=mesh), MAPPED["all"])


@pytest.mark.parametrize("implementation", COMPILED)
def test_forward_mode_is_refused(implementation):
    case = case_of(implementation)
    with pytest.raises(TypeError, match=r"forward-mode .*\(jvp\) to a custom_vjp function"):
        jax.jvp(lambda x: call(case._replace(x=x), implementation), (case.x,), (case.x,))


@implementations
def test_nothing_is_promoted_silently(implementation):
    case = case_of(implementation)
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        jax.eval_shape(lambda case, dy: value_and_gradients(case, dy, implementation), case, case.x)


def test_route_promotes_nothing_silently():
    logits, bias, mask = jnp.zeros((8, 4), "float32"), jnp.zeros(4, "float32"), jnp.ones(8, bool)
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        jax.eval_shape(lambda x, b, m: mok_jax.route(x, 2, selection_bias=b, token_mask=m), logits, bias, mask)

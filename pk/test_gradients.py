"""Gradients of moe() on one device, as JAX takes them: each alone, twice, with nothing to do, again."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import (
    DTYPES,
    GPU,
    IMPLEMENTATIONS,
    SMALL,
    assert_good,
    assert_near,
    assert_same_bits,
    bound,
    call,
    cotangent_of,
    exactly,
    known,
    make_case,
    numbered,
    on_device,
    refuse,
    run,
    sharpest,
    tiny,
)
from jax.test_util import check_grads

implementations = pytest.mark.parametrize("implementation", IMPLEMENTATIONS)

FLOATS = ("x", "router_weights", "w_gate", "w_up", "w_down", "shared")


def mini(implementation="reference", dtype=None, routing="duplicates"):
    """Few enough numbers for finite differences and Jacobians."""
    return make_case(
        dtype or sharpest(implementation), routing, tokens=4, hidden=2, intermediate=3, shared=5, experts=3, top_k=2
    )


def layer_of(case, names, implementation, **options):
    """moe() as a function of the named arguments, jitted."""

    @jax.jit
    def layer(*values):
        return call(case._replace(**dict(zip(names, values, strict=True))), implementation, **options)

    return layer, [getattr(case, name) for name in names]


@implementations
def test_against_finite_differences(implementation):
    layer, arguments = layer_of(mini(implementation), FLOATS, implementation)
    tolerance = 1e-2 if implementation == "cuda" else 1e-7
    check_grads(layer, arguments, order=1, modes=["rev"], atol=tolerance, rtol=tolerance)


@implementations
@pytest.mark.parametrize("dtype", DTYPES)
def test_an_expert_without_rows_has_a_zero_gradient(implementation, dtype):
    case, _, _ = known(dtype, "holes", **SMALL)
    result = run(case, implementation, config=tiny(implementation))
    empty = np.setdiff1d(np.arange(SMALL["experts"]), np.asarray(case.expert_ids))
    assert empty.tolist() == [0, 2, 4]
    assert not result["d_w_gate"][empty].any()
    assert not result["d_w_up"][empty].any()
    assert not result["d_w_down"][empty].any()
    assert result["d_w_gate"][1].any()


@implementations
def test_a_route_of_weight_zero_still_teaches_the_router(implementation):
    case, _, _ = known("f32", "distinct", **SMALL)
    case = case._replace(router_weights=case.router_weights.at[:, 1].set(0))
    result = run(case, implementation, config=tiny(implementation))
    assert result["d_router_weights"][:, 1].all()
    assert_good(result, run(case, "plain"), exactly(case), "float32")


@implementations
def test_each_gradient_has_its_argument_s_dtype(implementation):
    case = mini(dtype="bf16")
    case = case._replace(
        w_gate=case.w_gate.astype(jnp.float32), shared=jax.tree.map(lambda w: w.astype(jnp.float32), case.shared)
    )
    result = run(case, implementation)
    assert {name: value.dtype.name for name, value in result.items()} == {
        "y": "bfloat16",
        "d_x": "bfloat16",
        "d_router_weights": "float32",
        "d_w_gate": "float32",
        "d_w_up": "bfloat16",
        "d_w_down": "bfloat16",
        "d_shared_w_gate": "float32",
        "d_shared_w_up": "float32",
        "d_shared_w_down": "float32",
    }
    assert_good(result, run(case, "plain"), exactly(case), "bfloat16")


# "host" and "cuda" compute only what is asked for, and decide it for each.
COMPILED = ("host", "cuda") if GPU else ("host",)
ALONE = [(implementation, name) for implementation in COMPILED for name in FLOATS] + [
    (other, name) for other in ("reference", "xla") for name in ("x", "w_gate")
]


@pytest.mark.parametrize(("implementation", "name"), ALONE)
def test_one_gradient_alone(implementation, name):
    case = mini(implementation)
    layer, arguments = layer_of(case, [name], implementation)
    (gradient,) = jax.jit(lambda dy: jax.vjp(layer, *arguments)[1](dy))(cotangent_of(case.x))
    every = run(case, "reference")
    tolerance = bound(implementation, 1e-14)
    if name == "shared":
        gradient = dict(zip(("w_gate", "w_up", "w_down"), gradient, strict=True))
        assert_near(gradient, {weight: every[f"d_shared_{weight}"] for weight in gradient}, tolerance)
    else:
        assert_near({name: gradient}, {name: every[f"d_{name}"]}, tolerance)


@implementations
def test_ids_have_no_gradient_and_do_not_disturb_the_others(implementation):
    case = mini(implementation)
    layer, arguments = layer_of(case, ("expert_ids", "x"), implementation)
    d_ids, d_x = jax.vjp(layer, *arguments)[1](cotangent_of(case.x))
    assert d_ids.dtype == jax.dtypes.float0
    assert_near({"d_x": d_x}, {"d_x": run(case, "reference")["d_x"]}, bound(implementation, 1e-14))


@implementations
def test_the_backward_runs_again(implementation):
    case = mini(implementation)
    layer, arguments = layer_of(case, FLOATS, implementation)
    _, pull = jax.vjp(layer, *arguments)
    first = pull(cotangent_of(case.x))
    assert_same_bits(pull(2 * cotangent_of(case.x)), jax.tree.map(lambda d: 2 * d, first))
    assert_same_bits(pull(cotangent_of(case.x)), first)


@implementations
def test_two_losses_share_a_forward(implementation):
    case = mini(implementation)
    layer, arguments = layer_of(case, FLOATS, implementation)

    def losses(*arguments):
        y = layer(*arguments)
        return y.sum(), (y * cotangent_of(y)).sum()

    _, pull = jax.vjp(losses, *arguments)
    zero, one = (jnp.asarray(value, case.x.dtype) for value in (0, 1))
    together = pull((2 * one, one))
    apart = jax.tree.map(lambda a, b: 2 * a + b, pull((one, zero)), pull((zero, one)))
    assert_near(numbered(together), numbered(apart), bound(implementation, 1e-14))


@implementations
def test_an_output_that_nobody_reads(implementation):
    case = mini(implementation)
    layer, arguments = layer_of(case, ("x", "w_gate"), implementation)

    def loss(x, w_gate):
        return jax.lax.stop_gradient(layer(x, w_gate)).sum() + x.sum()

    d_x, d_w_gate = jax.grad(loss, argnums=(0, 1))(*arguments)
    assert_same_bits((d_x, d_w_gate), (jnp.ones_like(d_x), jnp.zeros_like(d_w_gate)))


@implementations
def test_jacobian(implementation):
    case = mini(implementation)
    layer, arguments = layer_of(case, ("x", "router_weights"), implementation)
    jacobian = jax.jit(jax.jacrev(layer, argnums=(0, 1)))(*arguments)
    with on_device("reference"):
        definition, _ = layer_of(case, ("x", "router_weights"), "reference")
        expected = jax.jit(jax.jacfwd(definition, argnums=(0, 1)))(*arguments)
    assert_near(numbered(jacobian), jax.device_get(numbered(expected)), bound(implementation, 1e-13))


def curvature(case, implementation):
    """d/d(all arguments) of <v, gradient of the loss in x and in a weight>."""
    layer, arguments = layer_of(case, FLOATS, implementation)
    v = cotangent_of(case.x)

    def slope(*arguments):
        d_x, d_w_gate = jax.grad(lambda *a: (layer(*a) ** 2).sum(), argnums=(0, 2))(*arguments)
        return (d_x * v).sum() + d_w_gate.sum()

    gradients = jax.jit(jax.grad(slope, argnums=tuple(range(6))))(*arguments)
    return numbered(gradients)


@functools.cache
def reference_curvature():
    return curvature(mini(), "reference")


def test_second_derivatives_of_xla():
    assert_near(curvature(mini(), "xla"), reference_curvature(), 1e-12)


@pytest.mark.parametrize("implementation", COMPILED)
def test_second_derivatives_of_one_call_are_refused(implementation):
    text = f'moe: implementation "{implementation}" has no second derivative; use implementation="xla" or "reference"'
    refuse(NotImplementedError, text, curvature, mini(implementation), implementation)

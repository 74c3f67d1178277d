"""The definition itself, against a NumPy loop over routes that shares nothing with it, in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import GPU, PATTERNS, Case, assert_near, assert_same_bits, cotangent_of, make_case, run
from jax.test_util import check_grads

from mok_jax import MoKConfig
from mok_jax.reference import moe_reference, swiglu

SIZES = dict(tokens=9, hidden=5, intermediate=7, shared=3, experts=6, top_k=3)


@pytest.mark.parametrize("precision", [None, "mxfp8"])
@pytest.mark.parametrize("implementation", ["reference", "host"])
@pytest.mark.parametrize("name", ["w_gate", "w_up", "w_down"])
def test_rows_of_others_do_not_meet_an_infinite_weight(name, implementation, precision):
    """Clamped, an infinite u is a number again, and then so are the weights' gradients of its expert."""
    if GPU and implementation == "host":
        pytest.skip("without CPU devices")
    case = make_case("bf16", "distinct", **SIZES)
    config = MoKConfig(swiglu_limit=0.5, precision=precision)
    clean = run(case, implementation, config=config)
    weight = getattr(case, name)
    used = int(case.expert_ids[0, 0])
    found = run(case._replace(**{name: weight.at[used, 1, 2].set(jnp.inf)}), implementation, config=config)
    for key, value in found.items():
        if key.startswith("d_w_"):
            assert_same_bits(np.delete(value, used, axis=0), np.delete(clean[key], used, axis=0))
    if name == "w_up":
        assert all(np.isfinite(found[key].astype(np.float32)).all() for key in ("y", "d_w_gate", "d_w_up", "d_w_down"))


def ffn(x, w_gate, w_up, w_down, limit):
    """One row through one expert; returns the output and what the backward needs."""
    gate, up = x @ w_gate, x @ w_up
    gate_slope = up_slope = 1.0
    if limit is not None:
        gate_slope, up_slope = gate <= limit, np.abs(up) <= limit
        gate, up = np.minimum(gate, limit), np.clip(up, -limit, limit)
    sigmoid = 1 / (1 + np.exp(-gate))
    h = gate * sigmoid * up
    return h @ w_down, (h, sigmoid * (1 + gate * (1 - sigmoid)) * up * gate_slope, gate * sigmoid * up_slope)


def ffn_backward(x, weights, saved, d_out, d_weights):
    """Adds to d_weights (views) and returns dx."""
    w_gate, w_up, w_down = weights
    h, slope_of_gate, slope_of_up = saved
    d_h = w_down @ d_out
    d_gate, d_up = slope_of_gate * d_h, slope_of_up * d_h
    d_weights[0][...] += np.outer(x, d_gate)
    d_weights[1][...] += np.outer(x, d_up)
    d_weights[2][...] += np.outer(h, d_out)
    return w_gate @ d_gate + w_up @ d_up


def numpy_moe(case: Case, dy, limit=None):
    """y and every gradient, one route at a time."""
    x, ids, router_weights, *experts = (np.asarray(value) for value in case[:6])
    shared = [np.asarray(value) for value in case.shared]
    names = ("w_gate", "w_up", "w_down")
    results = {"y": np.zeros_like(x), "d_x": np.zeros_like(x), "d_router_weights": np.zeros_like(router_weights)}
    d_experts = [np.zeros_like(w) for w in experts]
    d_shared = [np.zeros_like(w) for w in shared]
    for t in range(x.shape[0]):
        for k in range(ids.shape[1]):
            e = int(ids[t, k])
            if not 0 <= e < experts[0].shape[0]:
                continue
            weights = [w[e] for w in experts]
            out, saved = ffn(x[t], *weights, limit)
            results["y"][t] += router_weights[t, k] * out
            results["d_router_weights"][t, k] = dy[t] @ out
            results["d_x"][t] += ffn_backward(
                x[t], weights, saved, router_weights[t, k] * dy[t], [d[e] for d in d_experts]
            )
        out, saved = ffn(x[t], *shared, limit)
        results["y"][t] += out
        results["d_x"][t] += ffn_backward(x[t], shared, saved, dy[t], d_shared)
    results |= {f"d_{name}": d for name, d in zip(names, d_experts, strict=True)}
    return results | {f"d_shared_{name}": d for name, d in zip(names, d_shared, strict=True)}


@pytest.mark.parametrize("limit", [None, 0.4], ids=["free", "clamped"])
@pytest.mark.parametrize("routing", PATTERNS)
def test_against_a_loop_over_routes(routing, limit):
    case = make_case("f64", routing, **SIZES)
    result = run(case, "reference", config=MoKConfig(swiglu_limit=limit))
    assert_near(result, numpy_moe(case, np.asarray(cotangent_of(case.x)), limit), 1e-14)


def test_a_nan_row_against_the_loop():
    case = make_case("f64", "distinct", **SIZES)
    case = case._replace(x=case.x.at[4].set(jnp.nan))
    result, expected = run(case, "reference", config=MoKConfig()), numpy_moe(case, np.asarray(cotangent_of(case.x)))
    jax.tree.map(lambda got, want: np.testing.assert_array_equal(np.isnan(got), np.isnan(want)), result, expected)
    assert_near(jax.tree.map(np.nan_to_num, result), jax.tree.map(np.nan_to_num, expected), 1e-14)


@pytest.mark.parametrize(
    ("gate", "up", "h", "gate_slope", "up_slope"),
    [
        (1.0, 0.5, 0.5, 1, 1),
        (2.0, 0.5, 1.0, 1, 1),
        (3.0, 0.5, 1.0, 0, 1),
        (-30.0, 0.5, -15.0, 1, 1),
        (1.0, 2.0, 2.0, 1, 1),
        (1.0, 3.0, 2.0, 1, 0),
        (1.0, -2.0, -2.0, 1, 1),
        (1.0, -3.0, -2.0, 1, 0),
        (np.inf, 0.5, 1.0, 0, 1),
        (1.0, -np.inf, -2.0, 1, 0),
        (np.nan, 3.0, np.nan, None, None),
        (1.0, np.nan, np.nan, None, None),
    ],
)
def test_clamp(monkeypatch, gate, up, h, gate_slope, up_slope):
    # With a sigmoid of 1 the activation is gate * up, so that every value and slope is exact.
    monkeypatch.setattr(jax.nn, "sigmoid", lambda value: jnp.where(jnp.isnan(value), value, 1.0))
    value, (d_gate, d_up) = jax.value_and_grad(lambda g, u: swiglu(g, u, 2.0), argnums=(0, 1))(gate, up)
    np.testing.assert_equal(float(value), h)
    assert gate_slope is None or (d_gate != 0, d_up != 0) == (bool(gate_slope), bool(up_slope))


def test_a_limit_beyond_every_value_changes_no_bit():
    case = make_case("f64", "distinct", **SIZES)
    assert_same_bits(
        run(case, "reference", config=MoKConfig(swiglu_limit=1e6)), run(case, "reference", config=MoKConfig())
    )


@pytest.mark.parametrize("ids", [[[2, 2]], [[2, -1]], [[-1, -1]], [[3, 2]], [[2**31 - 1, -(2**31)]]], ids=str)
def test_one_token_by_hand(ids):
    case = make_case("f64", tokens=1, hidden=5, intermediate=7, experts=3, top_k=2)
    case = case._replace(expert_ids=jnp.array(ids, jnp.int32), router_weights=jnp.array([[0.3, 0.7]]))
    out, _ = ffn(np.asarray(case.x[0]), *(np.asarray(w[2]) for w in case[3:6]), None)
    weight = 0.3 * (ids[0][0] == 2) + 0.7 * (ids[0][1] == 2)
    np.testing.assert_allclose(run(case, "reference")["y"][0], weight * out, rtol=1e-14)


def test_first_and_second_derivatives():
    # Some gates and ups lie beyond the limit, none at it.
    case = make_case("f64", "duplicates", tokens=4, hidden=2, intermediate=3, shared=2, experts=3, top_k=2)

    def layer(x, router_weights, experts, shared):
        return moe_reference(x, case.expert_ids, router_weights, *experts, shared, 0.4)

    arguments = (case.x, case.router_weights, case[3:6], case.shared)
    check_grads(jax.jit(layer), arguments, order=2, modes=["fwd", "rev"], atol=1e-5, rtol=1e-5)

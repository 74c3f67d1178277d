"""moe() on one device: every implementation against "reference" in float64, values and gradients."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import (
    DTYPES,
    IMPLEMENTATIONS,
    ODD,
    PATTERNS,
    SMALL,
    Case,
    assert_good,
    assert_same_bits,
    call,
    exactly,
    known,
    make_case,
    run,
    tiny,
)

import mok_jax

implementations = pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
dtypes = pytest.mark.parametrize("dtype", DTYPES)


@implementations
@dtypes
@pytest.mark.parametrize("routing", PATTERNS)
def test_routing_pattern(implementation, dtype, routing):
    case, plain, exact = known(dtype, routing, **SMALL)
    assert_good(run(case, implementation, config=tiny(implementation)), plain, exact, case.x.dtype.name)


@implementations
@pytest.mark.parametrize("dtype", ["f32", "bf16-f32"])
def test_odd_sizes_and_default_config(implementation, dtype):
    case, plain, exact = known(dtype, "distinct", **ODD)
    assert_good(run(case, implementation, config=mok_jax.MoKConfig()), plain, exact, case.x.dtype.name)


SIZES = {
    "no_tokens": dict(tokens=0, hidden=6, intermediate=10, experts=4, top_k=2, shared=14),
    "one_token_160_experts": dict(tokens=1, hidden=6, intermediate=10, experts=160, top_k=4),
    "every_one_of_3_experts": dict(tokens=130, hidden=9, intermediate=1, experts=3, top_k=3),
    "1025_experts": dict(tokens=33, hidden=6, intermediate=4, experts=1025, top_k=8),
    "all_ones": dict(tokens=1, hidden=1, intermediate=1, experts=1, top_k=1, shared=1),
}


@implementations
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_sizes(implementation, sizes):
    case, plain, exact = known("f32", "distinct", **sizes)
    assert_good(run(case, implementation), plain, exact, "float32")


@implementations
@pytest.mark.parametrize("counts", [[127, 128, 129, 0, 1, 0], [0, 1, 127, 1, 128, 128]], ids=["falling", "rising"])
def test_exact_counts_around_the_default_tile(implementation, counts):
    case = make_case("f32", tokens=385, hidden=6, intermediate=10, experts=60, top_k=1)
    of_expert = jnp.repeat(jnp.array([0, 1, 2, 30, 58, 59], jnp.int32), np.array(counts))
    case = case._replace(expert_ids=of_expert[:, None])
    assert_good(run(case, implementation), run(case, "plain"), exactly(case), "float32")


@implementations
def test_swiglu_limit(implementation):
    # Not in bfloat16: a gate that rounds to the limit has a gradient, the exact one has none.
    case, plain, exact = known("f32", "duplicates", limit=0.5, **SMALL)
    config = dataclasses.replace(tiny(implementation), swiglu_limit=0.5)
    assert_good(run(case, implementation, config=config), plain, exact, "float32")
    assert np.abs(exact["y"] - known("f32", "duplicates", **SMALL)[2]["y"]).max() > 0.1


@implementations
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_swiglu_limit_passes_the_gradient_at_the_limit_and_not_beyond(implementation, dtype):
    # One expert for each (gate, up); x, w_down and dy are 1, so d_w_gate and d_w_up are the activation's own.
    x_dtype, w_dtype = DTYPES[dtype]
    gate = jnp.array([2.0, 2.5, 1.5, 1.5, 1.5, 1.5, -9.0], w_dtype)
    up = jnp.array([1.0, 1.0, 2.0, 2.5, -2.0, -2.5, 1.0], w_dtype)
    ones = jnp.ones((7, 1), x_dtype)
    case = Case(
        x=ones,
        expert_ids=jnp.arange(7, dtype=jnp.int32)[:, None],
        router_weights=jnp.ones((7, 1), "float32"),
        w_gate=gate.reshape(7, 1, 1),
        w_up=up.reshape(7, 1, 1),
        w_down=jnp.ones((7, 1, 1), w_dtype),
        shared=None,
    )
    config = mok_jax.MoKConfig(swiglu_limit=2.0)
    result = run(case, implementation, ones, config=config)
    assert_good(result, run(case, "plain", ones, config=config), exactly(case, ones, limit=2.0), x_dtype)
    assert (result["d_w_gate"].ravel() != 0).tolist() == [True, False, True, True, True, True, True]
    assert (result["d_w_up"].ravel() != 0).tolist() == [True, True, True, False, True, False, True]


@implementations
@dtypes
def test_a_nan_row_stays_in_its_own_row(implementation, dtype):
    case, _, _ = known(dtype, "distinct", **SMALL)
    clean = run(case, implementation, config=tiny(implementation))
    bad = run(case._replace(x=case.x.at[5].set(jnp.nan)), implementation, config=tiny(implementation))
    seen = np.asarray(case.expert_ids[5])
    others = np.delete(np.arange(SMALL["tokens"]), 5)
    unseen = np.setdiff1d(np.arange(SMALL["experts"]), seen)
    assert np.isnan(bad["y"][5].astype(np.float32)).all()
    assert np.isnan(bad["d_x"][5].astype(np.float32)).all()
    assert np.isnan(bad["d_w_gate"][seen].astype(np.float32)).any(axis=(1, 2)).all()
    rows, experts = ("y", "d_x", "d_router_weights"), ("d_w_gate", "d_w_up", "d_w_down")
    assert_same_bits({name: bad[name][others] for name in rows}, {name: clean[name][others] for name in rows})
    assert_same_bits({name: bad[name][unseen] for name in experts}, {name: clean[name][unseen] for name in experts})


@implementations
def test_a_slot_without_expert_reads_nothing(implementation):
    case = make_case("f32", "padding_rows", **SMALL | dict(shared=0))
    junk = case._replace(
        x=case.x.at[-10:].set(jnp.nan),
        router_weights=jnp.where(case.expert_ids < 0, jnp.nan, case.router_weights),
    )
    result = run(junk, implementation, config=tiny(implementation))
    assert_same_bits(result, run(case, implementation, config=tiny(implementation)))
    assert not result["y"][-10:].any()
    assert not result["d_x"][-10:].any()
    assert not result["d_router_weights"][-10:].any()


@pytest.mark.parametrize("implementation", ["reference", "host"])  # XLA's own ragged_dot reads every expert
def test_an_expert_without_rows_is_not_read(implementation):
    case, _, _ = known("f32", "holes", **SMALL)  # rows for the odd experts only
    broken = case._replace(w_gate=case.w_gate.at[2].set(jnp.nan), w_down=case.w_down.at[2].set(jnp.inf))
    result = run(broken, implementation, config=tiny(implementation))
    assert_same_bits(result, run(case, implementation, config=tiny(implementation)))
    assert not result["d_w_gate"][2].any()


@implementations
@dtypes
def test_the_same_inputs_give_the_same_bits(implementation, dtype):
    case, _, _ = known(dtype, "duplicates", **SMALL)
    assert_same_bits(
        run(case, implementation, config=tiny(implementation)), run(case, implementation, config=tiny(implementation))
    )


# With gate = 64, silu(gate) is 64 and its derivative 1, both exactly: the sums below have exact answers.


@implementations
def test_the_sum_over_slots_is_not_rounded_between(implementation):
    x = jnp.full((1, 1), 64, jnp.bfloat16)
    w_gate = jnp.ones((4, 1, 1), jnp.bfloat16)
    w_up = jnp.full((4, 1, 1), 2**-6, jnp.bfloat16)  # up = 1, h = 64
    w_down = jnp.array([1, 2**-9, -1, 0], jnp.bfloat16).reshape(4, 1, 1) / 64  # outputs 1, 2**-9, -1, 0
    router_weights = jnp.array([[1 + 2**-12, 1, 1, 1]], jnp.float32)
    case = Case(x, jnp.arange(4, dtype=jnp.int32)[None], router_weights, w_gate, w_up, w_down, None)
    assert run(case, implementation)["y"].item() == 2**-9 + 2**-12


@implementations
def test_a_float32_weight_gradient_is_never_rounded_to_bfloat16(implementation):
    # Two rows of one expert: x = (256, 64) and (1, 64); 257 and 16 + 2**-12 have no bfloat16.
    case = Case(
        x=jnp.array([[256, 64], [1, 64]], jnp.bfloat16),
        expert_ids=jnp.zeros((2, 1), jnp.int32),
        router_weights=jnp.ones((2, 1), jnp.float32),
        w_gate=jnp.array([[[0.0], [1.0]]], jnp.float32),  # gate = 64
        w_up=jnp.array([[[2**-6], [0.0]]], jnp.float32),  # up = 4 and 2**-6; h = 256 and 1
        w_down=jnp.array([[[2**-6, 0.0]]], jnp.float32),
        shared=None,
    )
    result = run(case, implementation, jnp.array([[1, 0], [1, 0]], jnp.bfloat16))
    assert result["d_w_down"].dtype == np.float32
    assert result["d_w_down"][0, 0, 0] == 257
    assert result["d_w_up"][0, 0, 0] == 257
    assert result["d_w_gate"][0, 0, 0] == 16 + 2**-12


@implementations
def test_slices_and_transposes_inside_jit(implementation):
    case = make_case("bf16", tokens=11, hidden=7, intermediate=5, experts=3, top_k=2)
    wider = jnp.pad(case.x, ((1, 0), (1, 0)), constant_values=9)
    swapped = [w.swapaxes(1, 2) for w in case[3:6]]

    @jax.jit
    def layer(wider, swapped):
        weights = [w.swapaxes(1, 2) for w in swapped]
        return call(Case(wider[1:, 1:], *case[1:3], *weights, None), implementation)

    assert_same_bits(layer(wider, swapped), jax.jit(call, static_argnums=1)(case, implementation))


@implementations
def test_numpy_arguments(implementation):
    case, _, _ = known("f32", "distinct", **SMALL)
    assert_same_bits(call(jax.tree.map(np.asarray, case), implementation), call(case, implementation))


def test_the_default_implementation_on_cpu_devices_is_host():
    assert mok_jax.choose_implementation() == "host"

"""precision="mxfp8": each implementation against the definition, the definition against a NumPy loop over routes,
and both against the layer that quantises nothing.

Where the same values meet in the same products only the order of float32 sums differs, and what that moves across
a midpoint of bfloat16 or of e4m3, which is 2^-8 to 2^-7 or 2^-4 to 2^-3 of a value, but of few: a relative L1 error of
at most 2^-8 for each result and each expert. A value left unquantised, or quantised along another axis, costs some
2^-6 or more. Careful: a result of one element (all_ones) may miss the bound by one such flip.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from cases import (
    IMPLEMENTATIONS,
    ODD,
    PATTERNS,
    SMALL,
    assert_same_bits,
    call,
    cotangent_of,
    gradients_of,
    kinds,
    make_case,
    mesh_of,
    refuse,
    run,
    tiny,
)
from flax import nnx
from test_mxfp8 import by_ml_dtypes

import mok_jax

MXFP8 = mok_jax.MoKConfig(precision="mxfp8")
BOUND = 2**-8
EXPERTS = ("w_gate", "w_up", "w_down")

implementations = pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
others = pytest.mark.parametrize("implementation", [name for name in IMPLEMENTATIONS if name != "reference"])
on_meshes = pytest.mark.parametrize("implementation", ["xla", "host"])
dtypes = pytest.mark.parametrize("dtype", ["bf16", "bf16-f32"])


@functools.cache
def defined(dtype="bf16", routing="distinct", limit=None, **sizes):
    case = make_case(dtype, routing, **sizes)
    return case, run(case, "reference", config=dataclasses.replace(MXFP8, swiglu_limit=limit))


def parts(result):
    """Every result by name, weight gradients of experts one by one."""
    for name, value in result.items():
        if name in [f"d_{weight}" for weight in EXPERTS]:
            yield from ((f"{name}[{expert}]", value[expert]) for expert in range(len(value)))
        else:
            yield name, value


def assert_near(actual, expected, bound=BOUND):
    assert actual.keys() == expected.keys()
    expected = dict(parts(expected))
    for name, got in parts(actual):
        want = expected[name]
        assert got.dtype == want.dtype and got.shape == want.shape, name
        got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
        error = np.abs(got - want).sum()
        if not error <= bound * np.abs(want).sum():
            worst = np.unravel_index(np.abs(got - want).argmax(), got.shape)
            raise AssertionError(
                f"{name}: relative L1 error {error / np.abs(want).sum():.3g}, allowed {bound:.3g}; worst at "
                f"{tuple(map(int, worst))}: got {got[worst]!r}, expected {want[worst]!r}"
            )


# ---- the definition, by a loop over routes in float64 ----


def bf16(a):
    return np.asarray(a, np.float64).astype(ml_dtypes.bfloat16).astype(np.float64)


def q(a, axis=-1):
    """Rounded to MXFP8 along `axis`, by ml_dtypes."""
    moved = np.moveaxis(np.asarray(a, np.float64), axis, -1)
    return np.moveaxis(by_ml_dtypes(moved.reshape(-1, moved.shape[-1]))[2].reshape(moved.shape), -1, axis)


ROUNDED = ("x", "h", "d_y", "d_gate", "d_up", "forward weights", "backward weights")


def numpy_layer(case, dy, rounded=ROUNDED):
    """y and the gradients of a case without a shared expert; `rounded`: what is quantised."""

    def q_if(name, a, axis=-1):
        return q(a, axis) if name in rounded else a

    x, ids, router, *weights = (np.asarray(a) if a.dtype == jnp.int32 else np.asarray(a, np.float64) for a in case[:6])
    along_rows = [q_if("forward weights", w, 1) for w in weights]
    along_columns = [q_if("backward weights", w, 2) for w in weights]
    x, dy = q_if("x", x), q_if("d_y", np.asarray(dy, np.float64))
    y, d_x, d_router = np.zeros_like(x), np.zeros_like(x), np.zeros_like(router)
    d_weights = [np.zeros_like(w) for w in weights]
    for (t, k), e in np.ndenumerate(ids):
        w = router[t, k]
        w_gate, w_up, w_down = (a[e] for a in along_rows)
        g, u = bf16(x[t] @ w_gate), bf16(x[t] @ w_up)
        sigmoid = 1 / (1 + np.exp(-g))
        h = q_if("h", bf16(g * sigmoid * u))
        y[t] += w * bf16(h @ w_down)
        w_gate, w_up, w_down = (a[e].T for a in along_columns)
        d_h = dy[t] @ w_down
        d_router[t, k] = d_h @ h
        d_g = q_if("d_gate", bf16(w * d_h * u * sigmoid * (1 + g * (1 - sigmoid))))
        d_u = q_if("d_up", bf16(w * d_h * g * sigmoid))
        d_x[t] += bf16(d_g @ w_gate + d_u @ w_up)
        for d, left, right in zip(d_weights, (x[t], x[t], bf16(w * h)), (d_g, d_u, dy[t]), strict=True):
            d[e] += np.outer(left, right)
    results = {"y": y, "d_x": d_x, "d_router_weights": d_router}
    return results | {f"d_{name}": d for name, d in zip(EXPERTS, d_weights, strict=True)}


def assert_near_the_loop(result, case, rounded):
    expected = numpy_layer(case, cotangent_of(case.x), rounded)
    assert_near(result, {name: value.astype(result[name].dtype) for name, value in expected.items()})


@dtypes
def test_the_definition_against_a_loop_over_routes(dtype):
    case, result = defined(dtype, "duplicates", **ODD | dict(shared=0))
    assert_near_the_loop(result, case, ROUNDED)


@pytest.mark.parametrize("missing", ROUNDED)
def test_the_bound_sees_what_is_not_quantised(missing):
    case, result = defined("bf16", "duplicates", **ODD | dict(shared=0))
    with pytest.raises(AssertionError, match="relative L1 error"):
        assert_near_the_loop(result, case, set(ROUNDED) - {missing})


# ---- each implementation against the definition ----


@others
@dtypes
@pytest.mark.parametrize("routing", PATTERNS)
def test_routing_pattern(implementation, dtype, routing):
    case, expected = defined(dtype, routing, **SMALL)
    assert_near(
        run(case, implementation, config=dataclasses.replace(tiny(implementation), precision="mxfp8")), expected
    )


@others
def test_odd_sizes_and_default_config(implementation):
    case, expected = defined("bf16-f32", **ODD)
    assert_near(run(case, implementation, config=MXFP8), expected)


@others
@pytest.mark.parametrize(
    "sizes",
    [
        dict(tokens=300, hidden=64, intermediate=96, experts=3, top_k=2),
        dict(tokens=65, hidden=33, intermediate=291, experts=4, top_k=1),
        dict(tokens=1, hidden=1, intermediate=1, experts=1, top_k=1, shared=1),
        dict(tokens=0, hidden=6, intermediate=10, experts=4, top_k=2, shared=14),
    ],
    ids=["whole_blocks", "short_blocks", "all_ones", "no_tokens"],
)
def test_sizes(implementation, sizes):
    case, expected = defined(**sizes)
    assert_near(run(case, implementation, config=MXFP8), expected)


# Rows as they travel: chunks of 1024 values, which the Hopper kernel moves three at a time.
LONG = (1029, 1032, 3072, 3079, 3080, 4104, 6152)
MOVERS = {"host": ("host", {})}
if "cuda" in IMPLEMENTATIONS:
    MOVERS |= {"hopper": ("cuda", {}), "portable": ("cuda", dict(portable=True))}


@pytest.mark.parametrize(("implementation", "options"), MOVERS.values(), ids=[f"{n}-{MOVERS[n][0]}" for n in MOVERS])
@pytest.mark.parametrize("hidden", LONG)
@pytest.mark.parametrize("ranks", [1, 2])
def test_rows_of_several_chunks(implementation, options, hidden, ranks):
    case, expected = defined("bf16", "distinct", tokens=150, hidden=hidden, intermediate=64, experts=4, top_k=2)
    config = dataclasses.replace(MXFP8, virtual_ranks=ranks, **options)
    assert_near(run(case, implementation, config=config), expected)


@others
def test_swiglu_limit(implementation):
    case, expected = defined("bf16", "duplicates", 0.5, **SMALL)
    assert_near(run(case, implementation, config=dataclasses.replace(MXFP8, swiglu_limit=0.5)), expected)


# ---- against the layer that quantises nothing ----


@implementations
@pytest.mark.parametrize("routing", ["distinct", "duplicates", "one_expert"])
def test_near_the_layer_in_bfloat16(implementation, routing):
    case = make_case("bf16", routing, tokens=96, hidden=192, intermediate=320, experts=6, top_k=3)
    plain, result = run(case, implementation, config=mok_jax.MoKConfig()), run(case, implementation, config=MXFP8)
    assert_near(result, plain, 0.1)
    for name in result:
        a, b = (np.asarray(r[name], np.float64).ravel() for r in (result, plain))
        assert a @ b >= 0.996 * np.linalg.norm(a) * np.linalg.norm(b), name
        assert (a != b).any(), name


@implementations
def test_the_shared_expert_stays_as_it_is(implementation):
    case = make_case("bf16", "no_expert", **SMALL)
    assert_same_bits(run(case, implementation, config=MXFP8), run(case, implementation, config=mok_jax.MoKConfig()))


# ---- what must not change the results ----

WAYS = {
    "one_thread": dict(num_threads=1),
    "smallest_macrobatch": dict(minibatch=8, macrobatch=8),
    "small_macrobatches": dict(minibatch=16, macrobatch=48),
    "nothing_kept": dict(save_context=False),
    "random_order": dict(random_order=0),
    "random_order_small": dict(random_order=1, minibatch=8, macrobatch=24),
    "random_order_nothing_kept": dict(random_order=2, save_context=False, minibatch=16, macrobatch=32),
}
WIDE = dict(tokens=48, hidden=40, intermediate=300, shared=56, experts=6, top_k=3)  # 300: two column tiles


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_the_same_bits_on_host(way, ranks):
    case = make_case("bf16-f32", "duplicates", **WIDE)
    base = dict(row_tile=8, virtual_ranks=ranks, precision="mxfp8")
    expected = run(case, "host", config=mok_jax.MoKConfig(**base))
    assert_same_bits(run(case, "host", config=mok_jax.MoKConfig(**base | way)), expected)


@pytest.mark.parametrize("ranks", [2, 3, 6])
@pytest.mark.parametrize("precision", [None, "mxfp8"], ids=["bf16", "mxfp8"])
def test_virtual_ranks_change_the_order_of_sums_only(precision, ranks):
    case = make_case("bf16-f32", "duplicates", **WIDE)
    config = mok_jax.MoKConfig(row_tile=8, precision=precision)
    one = run(case, "host", config=config)
    several = run(case, "host", config=dataclasses.replace(config, virtual_ranks=ranks))
    assert_near(several, one, 2**-12)


@kinds
@on_meshes
@pytest.mark.parametrize("name", ["e8", "d2_e4"])
def test_meshes(implementation, name, kind):
    case, expected = defined("bf16-f32", "padding_slots", tokens=64, hidden=40, intermediate=72, experts=8, top_k=3)
    found = run(case, implementation, config=MXFP8, mesh=mesh_of(name, kind))
    assert_near(found, expected)


@on_meshes
def test_quantised_weights_over_a_mesh(implementation):
    case, expected = defined("bf16-f32", "padding_slots", tokens=64, hidden=40, intermediate=72, experts=8, top_k=3)
    assert_near(from_quantised(case, implementation, mesh=mesh_of("d2_e4")), expected)


# ---- weights quantised by the caller ----


def from_quantised(case, implementation, given=None, quantize=mok_jax.quantize_weight, **options):
    """As `run`, of experts quantised outside of what is differentiated."""

    @jax.jit
    def results(case, given):
        cached = tuple(quantize(w) for w in given)

        def layer(case):
            experts = [q._replace(weight=w) for q, w in zip(cached, case[3:6], strict=True)]
            return call(
                case._replace(**dict(zip(EXPERTS, experts, strict=True))), implementation, config=MXFP8, **options
            )

        return gradients_of(layer, case, cotangent_of(case.x))

    return jax.device_get(results(case, case[3:6] if given is None else given))


QUANTIZE = {"e4m3": mok_jax.quantize_weight, "bfloat16": lambda w: mok_jax.quantize_weight(w).dequantize()}


@implementations
@dtypes
@pytest.mark.parametrize("quantize", QUANTIZE.values(), ids=QUANTIZE)
def test_weights_quantised_once_give_the_same_bits(implementation, dtype, quantize):
    case = make_case(dtype, **SMALL)
    found = from_quantised(case, implementation, quantize=quantize)
    assert_same_bits(found, run(case, implementation, config=MXFP8))


@implementations
def test_a_quantised_weight_is_a_value(implementation):
    # What it holds counts, whatever the parameter beside it has become.
    case, other = make_case("bf16", **SMALL), make_case("bf16", seed=1, **SMALL)
    found = from_quantised(case._replace(**dict(zip(EXPERTS, other[3:6], strict=True))), implementation, case[3:6])
    assert_same_bits(found, run(case, implementation, config=MXFP8))


@implementations
def test_the_gradient_of_a_weight_quantised_inside(implementation):
    case = make_case("bf16-f32", **SMALL)

    def layer(case):
        experts = [mok_jax.quantize_weight(w) for w in case[3:6]]
        return call(case._replace(**dict(zip(EXPERTS, experts, strict=True))), implementation, config=MXFP8)

    found = jax.jit(functools.partial(gradients_of, layer))(case, cotangent_of(case.x))
    assert_same_bits(jax.device_get(found), run(case, implementation, config=MXFP8))


# ---- what is special ----


@implementations
def test_a_nan_row_stays_in_its_own_row(implementation):
    case, _ = defined(**SMALL)
    config = dataclasses.replace(tiny(implementation), precision="mxfp8")
    clean = run(case, implementation, config=config)
    bad = run(case._replace(x=case.x.at[5, 7].set(jnp.nan)), implementation, config=config)
    others = np.delete(np.arange(SMALL["tokens"]), 5)
    unseen = np.setdiff1d(np.arange(SMALL["experts"]), np.asarray(case.expert_ids[5]))
    assert np.isnan(bad["y"][5].astype(np.float32)).all()
    assert np.isnan(bad["d_x"][5].astype(np.float32)).all()
    rows, experts = ("y", "d_x", "d_router_weights"), [f"d_{name}" for name in EXPERTS]
    assert_same_bits({name: bad[name][others] for name in rows}, {name: clean[name][others] for name in rows})
    assert_same_bits({name: bad[name][unseen] for name in experts}, {name: clean[name][unseen] for name in experts})


@implementations
def test_a_slot_without_expert_reads_nothing(implementation):
    case = make_case("bf16", "padding_rows", **SMALL | dict(shared=0))
    junk = case._replace(
        x=case.x.at[-10:].set(jnp.nan),
        router_weights=jnp.where(case.expert_ids < 0, jnp.nan, case.router_weights),
    )
    config = dataclasses.replace(tiny(implementation), precision="mxfp8")
    result = run(junk, implementation, config=config)
    assert_same_bits(result, run(case, implementation, config=config))
    assert not any(result[name][-10:].any() for name in ("y", "d_x", "d_router_weights"))


# XLA's own ragged_dot reads every expert.
@pytest.mark.parametrize("implementation", [name for name in IMPLEMENTATIONS if name != "xla"])
def test_an_expert_without_rows_is_not_read(implementation):
    case, _ = defined("bf16", "holes", **SMALL)
    broken = case._replace(w_gate=case.w_gate.at[2].set(jnp.nan), w_down=case.w_down.at[2].set(jnp.inf))
    result = run(broken, implementation, config=MXFP8)
    assert_same_bits(result, run(case, implementation, config=MXFP8))
    assert not any(result[f"d_{name}"][[0, 2, 4]].any() for name in EXPERTS)


@implementations
def test_a_route_of_weight_zero_still_teaches_the_router(implementation):
    case, _ = defined(**SMALL)
    case = case._replace(router_weights=case.router_weights.at[:, 1].set(0))
    assert run(case, implementation, config=MXFP8)["d_router_weights"][:, 1].all()


@implementations
def test_a_module_trains(implementation):
    def made(precision):
        config = mok_jax.MoKConfig(precision=precision)
        options = dict(dtype=jnp.bfloat16, implementation=implementation, config=config, rngs=nnx.Rngs(0))
        return mok_jax.MoKMoE(40, 72, num_experts=4, top_k=2, **options)

    x = jax.random.normal(jax.random.key(1), (3, 8, 40), jnp.bfloat16)
    gradients = [nnx.jit(nnx.grad(lambda layer: (layer(x) ** 2).mean()))(made(p)) for p in ("mxfp8", None)]
    (got, want) = (np.asarray(g["w_up"][...], np.float64).ravel() for g in gradients)
    assert got.any() and (got != want).any()
    assert got @ want > 0.99 * np.linalg.norm(got) * np.linalg.norm(want)


# ---- refusals ----


@pytest.mark.parametrize("dtype", ["f32", "f64"])
def test_dtype_of_x(dtype):
    case = make_case(dtype, **SMALL)
    got = f"{case.x.dtype}[37, 24]; cast x, or give a layer dtype=jnp.bfloat16"
    text = f'moe: x must be bfloat16[tokens, hidden] for precision="mxfp8", got {got}'
    refuse(TypeError, text, call, case, "host", config=MXFP8)


def test_quantised_weights_without_the_precision():
    case = make_case("bf16", **SMALL)
    case = case._replace(w_up=mok_jax.quantize_weight(case.w_up))
    text = 'moe: w_up must be an array for precision=None, got an Mxfp8Weight; use MoKConfig(precision="mxfp8")'
    refuse(ValueError, text, call, case, "host")


def test_quantised_along_another_axis():
    case = make_case("bf16", **SMALL)
    wrong = mok_jax.quantize_weight(case.w_up)
    case = case._replace(w_up=wrong._replace(forward=wrong.backward))
    text = (
        "moe: w_up.forward must be float8_e4m3fn[6, 24, 40] along axis -2 with scales uint8[6, 1, 40], or their "
        "bfloat16 values, got float8_e4m3fn[6, 24, 40] along axis -1 with scales uint8[6, 24, 2]; use quantize_weight"
    )
    refuse(ValueError, text, call, case, "host", config=MXFP8)


def test_quantised_for_one_pass_only():
    case = make_case("bf16", **SMALL)
    case = case._replace(w_down=mok_jax.quantize_weight(case.w_down)._replace(backward=None))
    text = (
        "moe: w_down.backward must be float8_e4m3fn[6, 40, 24] along axis -1 with scales uint8[6, 40, 1], or their "
        "bfloat16 values, got NoneType None; use quantize_weight"
    )
    refuse(ValueError, text, call, case, "host", config=MXFP8)


@implementations
def test_second_derivatives(implementation):
    case = make_case("bf16", tokens=4, hidden=4, intermediate=6, experts=3, top_k=2)

    def slope(x):
        return jax.grad(lambda x: call(case._replace(x=x), implementation, config=MXFP8).sum())(x).sum()

    with pytest.raises(NotImplementedError, match="has no second derivative"):
        jax.grad(slope)(case.x)

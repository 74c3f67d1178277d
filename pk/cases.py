"""What the tests share: cases, routing patterns, one way to run the layer, one way to judge a result.

A result's error is at most twice the error of plain code in the same dtype (`plain_layer`) plus a floor,
and below a ceiling; judged for each tensor, and for each expert of a weight gradient, against
"reference" in float64.
"""

import contextlib
import functools
import os
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import mok_jax
from mok_jax import ops

GPU = "cuda" in os.environ.get("JAX_PLATFORMS", "")  # conftest.py sees to it
CPU_IMPLEMENTATIONS = ("reference", "xla", "host")
IMPLEMENTATIONS = (*CPU_IMPLEMENTATIONS, "cuda") if GPU else CPU_IMPLEMENTATIONS

# name: (dtype of x, dtype of the weights)
DTYPES = {
    "f32": ("float32", "float32"),
    "f64": ("float64", "float64"),
    "bf16": ("bfloat16", "bfloat16"),
    "bf16-f32": ("bfloat16", "float32"),
}

# Largest error over largest exact value. The floor is some 16 roundings of a sum's dtype (the slope of
# silu cancels near gate = -1.28), and two of a bfloat16 result; the ceiling holds even where plain code
# is bad.
FLOORS = {"float32": 2e-6, "float64": 4e-15, "bfloat16": 2**-8}
CEILINGS = {"float32": 1e-5, "float64": 1e-13, "bfloat16": 2e-2}

SMALL = dict(tokens=37, hidden=24, intermediate=40, shared=56, experts=6, top_k=3)
ODD = dict(tokens=37, hidden=192, intermediate=320, shared=448, experts=6, top_k=3)

BY_ROW = ("y", "d_x", "d_router_weights")  # results of which each row is computed by itself

# Many macrobatches even at SMALL: what only "host" looks at, and all but "cuda" accept.
TINY = mok_jax.MoKConfig(row_tile=8, minibatch=16, macrobatch=32)


def tiny(implementation):
    """The same for any implementation: "cuda" has one row tile, 128."""
    return mok_jax.MoKConfig(minibatch=128, macrobatch=256) if implementation == "cuda" else TINY


def sharpest(implementation):
    """The entry of DTYPES that rounds least."""
    return "f32" if implementation == "cuda" else "f64"


def bound(implementation, tolerance):
    """`tolerance` of a result in float64; what float32 allows for "cuda"."""
    return 2e-5 if implementation == "cuda" else tolerance


def on_device(implementation):
    """The GPU for "cuda", a CPU device for the others, as the default device."""
    if not GPU:
        return contextlib.nullcontext()
    return jax.default_device(jax.devices("cuda" if implementation == "cuda" else "cpu")[0])


class Case(NamedTuple):
    """moe()'s arrays, in its order."""

    x: jax.Array
    expert_ids: jax.Array
    router_weights: jax.Array
    w_gate: jax.Array
    w_up: jax.Array
    w_down: jax.Array
    shared: tuple | None


# ---- routing patterns: (rng, tokens, experts, top_k) -> int32 [tokens, top_k] ----


def distinct(rng, tokens, experts, top_k):
    """As a router does: no expert twice in a token."""
    return rng.random((tokens, experts)).argsort(axis=1)[:, :top_k].astype(np.int32)


def one_expert(rng, tokens, experts, top_k):
    return np.full((tokens, top_k), experts - 1, np.int32)


def holes(rng, tokens, experts, top_k):
    """Only every second expert, so that the first, a middle or the last one is empty."""
    return (rng.integers(0, experts // 2, (tokens, top_k)) * 2 + 1).astype(np.int32)


def tile_counts(rng, tokens, experts, top_k):
    """Exact counts around a row tile of 8, one of them zero; the last expert takes the rest."""
    counts = np.resize([8, 7, 0, 9, 16], experts - 1)
    ids = np.repeat(np.arange(experts, dtype=np.int32), [*counts, tokens * top_k])[: tokens * top_k]
    return rng.permutation(ids).reshape(tokens, top_k)


def padding_rows(rng, tokens, experts, top_k):
    ids = distinct(rng, tokens, experts, top_k)
    ids[-10:] = -1
    return ids


def padding_slots(rng, tokens, experts, top_k):
    ids = distinct(rng, tokens, experts, top_k)
    ids[rng.random(ids.shape) < 0.3] = -1
    return ids


def out_of_range(rng, tokens, experts, top_k):
    ids = distinct(rng, tokens, experts, top_k)
    wrong = [experts, experts + 7, 2**31 - 1, -(2**31), -1, -2]
    places = rng.choice(ids.size, 3 * len(wrong), replace=False)
    ids.reshape(-1)[places] = np.repeat(wrong, 3)
    return ids


def duplicates(rng, tokens, experts, top_k):
    """The same expert in several slots of a token, in every third token in all."""
    ids = rng.integers(0, experts, (tokens, top_k)).astype(np.int32)
    ids[::3] = ids[::3, :1]
    return ids


def no_expert(rng, tokens, experts, top_k):
    return np.full((tokens, top_k), -1, np.int32)


PATTERNS = {
    pattern.__name__: pattern
    for pattern in (
        distinct,
        one_expert,
        holes,
        tile_counts,
        padding_rows,
        padding_slots,
        out_of_range,
        duplicates,
        no_expert,
    )
}


def make_case(
    dtype="f32", routing="distinct", seed=0, *, tokens, hidden, intermediate, experts, top_k, shared=0
) -> Case:
    """Random arrays of these sizes; `routing` names a pattern, `dtype` an entry of DTYPES."""
    rng = np.random.default_rng(seed)
    x_dtype, w_dtype = DTYPES[dtype]
    wide = "float64" if dtype == "f64" else "float32"

    def weight(*shape):
        # In x's dtype first: what a bfloat16 x makes of a float32 weight is then the weight itself.
        return jnp.asarray(rng.normal(size=shape) / np.sqrt(shape[-2]), x_dtype).astype(w_dtype)

    return Case(
        x=jnp.asarray(rng.normal(size=(tokens, hidden)), x_dtype),
        expert_ids=jnp.asarray(PATTERNS[routing](rng, tokens, experts, top_k)),
        router_weights=jnp.asarray(rng.normal(size=(tokens, top_k)), wide),
        w_gate=weight(experts, hidden, intermediate),
        w_up=weight(experts, hidden, intermediate),
        w_down=weight(experts, intermediate, hidden),
        shared=(weight(hidden, shared), weight(hidden, shared), weight(shared, hidden)) if shared else None,
    )


def dims_of(case: Case, config, **options) -> ops.Dims:
    """The sizes of a call on one rank."""
    return ops.Dims(
        tokens=case.x.shape[0],
        hidden=case.x.shape[1],
        intermediate=case.w_gate.shape[2],
        shared_intermediate=0 if case.shared is None else case.shared[0].shape[1],
        local_experts=case.w_gate.shape[0],
        ranks=1,
        top_k=case.expert_ids.shape[1],
        dtype=case.x.dtype,
        config=config,
        **options,
    )


def first_block_of_h(case: Case, config) -> int:
    """The index of hidden_ready[0] in CounterLayout, for a call on a Hopper GPU: only a forward pass waits for it."""
    plan = dims_of(case, config, implementation="cuda", gpu=ops.Gpu((9, 0), None)).plan()
    return plan.capacity // plan.row_tile


def cotangent_of(x):
    """A fixed dy; its values do not depend on x's dtype beyond their rounding."""
    return jnp.asarray(np.random.default_rng(99).normal(size=x.shape), x.dtype)


# ---- meshes of the eight devices ----

MESHES = {
    "e8": ((8,), ("expert",)),
    "e2_d4": ((2, 4), ("expert", "data")),
    "d2_e4": ((2, 4), ("data", "expert")),
    "d4_e2": ((4, 2), ("data", "expert")),
    "e2_d2_m2": ((2, 2, 2), ("expert", "data", "model")),
    "d2_e2_m2": ((2, 2, 2), ("data", "expert", "model")),
    "d2_m2_e2": ((2, 2, 2), ("data", "model", "expert")),
}
KINDS = {"auto": AxisType.Auto, "explicit": AxisType.Explicit}

kinds = pytest.mark.parametrize("kind", KINDS)


def mesh_of(name="d2_e4", kind="auto"):
    shape, axes = MESHES[name]
    return jax.make_mesh(shape, axes, axis_types=(KINDS[kind],) * len(axes))


# ---- running ----


def call(case: Case, implementation, **options):
    """moe() on a case."""
    return mok_jax.moe(*case[:6], shared=case.shared, implementation=implementation, **options)


def plain_layer(case: Case, config=mok_jax.MoKConfig()):
    """What one writes without thought: every expert on every token, and a one-hot sum, in x's dtype."""
    dtype = case.x.dtype
    wide = case.router_weights.dtype
    limit = config.swiglu_limit

    def ffn(w_gate, w_up, w_down):
        gate, up = case.x @ w_gate.astype(dtype), case.x @ w_up.astype(dtype)
        if limit is not None:
            gate = jnp.where(gate > limit, limit, gate)
            up = jnp.where(jnp.abs(up) > limit, jnp.sign(up) * limit, up)
        h = jax.nn.silu(gate.astype(wide)) * up.astype(wide)
        return (h.astype(dtype) @ w_down.astype(dtype)).astype(wide)

    one_hot = case.expert_ids[:, :, None] == jnp.arange(case.w_gate.shape[0])
    y = jnp.einsum("tke,tk,eth->th", one_hot.astype(wide), case.router_weights, ffn(*case[3:6]))
    return (y if case.shared is None else y + ffn(*case.shared)).astype(dtype)


def gradients_of(layer, case: Case, cotangent):
    """y = layer(case) and the gradient of every float argument, by name."""
    differentiable = {name: value for name, value in case._asdict().items() if name != "expert_ids"}
    y, pull = jax.vjp(lambda changed: layer(case._replace(**changed)), differentiable)
    (gradients,) = pull(cotangent)
    d_shared = gradients.pop("shared") or ()
    results = {"y": y} | {f"d_{name}": value for name, value in gradients.items()}
    return results | {f"d_shared_{name}": d for name, d in zip(("w_gate", "w_up", "w_down"), d_shared, strict=False)}


def value_and_gradients(case: Case, cotangent, implementation, options=()):
    """The same of moe(), or of `plain_layer` as "plain"; `options` are items of their keywords."""
    run_layer = plain_layer if implementation == "plain" else functools.partial(call, implementation=implementation)
    return gradients_of(functools.partial(run_layer, **dict(options)), case, cotangent)


compiled = jax.jit(value_and_gradients, static_argnames=("implementation", "options"))


def run(case: Case, implementation, cotangent=None, **options) -> dict[str, np.ndarray]:
    """`value_and_gradients`, jitted once per shapes and options, awaited, on the host."""
    with on_device(implementation):
        cotangent = cotangent_of(case.x) if cotangent is None else cotangent
        return jax.device_get(compiled(case, cotangent, implementation, tuple(sorted(options.items()))))


def layers_beside_all_reduces(case: Case, cotangent, summands, mesh, **options):
    """Two layers, one on the other's y, forward and backward, and sums over the ranks that XLA may run beside them.

    summands: [ranks, ...] each; they are left alone without a mesh.
    """

    def both(case):
        return call(case._replace(x=call(case, mesh=mesh, **options)), mesh=mesh, **options)

    results = gradients_of(both, case, cotangent)
    if mesh is None:
        return results, summands
    add = jax.shard_map(lambda part: jax.lax.psum(part, "expert"), mesh=mesh, in_specs=P("expert"), out_specs=P())
    return results, [add(part) for part in summands]


# XLA moves collectives ahead as far as it can.
hidden_all_reduces = jax.jit(
    layers_beside_all_reduces,
    static_argnames=("mesh", "implementation", "config"),
    compiler_options={"xla_gpu_enable_latency_hiding_scheduler": True},
)


@jax.jit
def rows_that_differ(results, expected):
    """Of two trees, bit for bit, as booleans; where they lie, so that no device waits for another one."""

    def rows(*values):
        bits = [jax.lax.bitcast_convert_type(value, f"uint{8 * value.dtype.itemsize}") for value in values]
        return (bits[0] != bits[1]).any(axis=tuple(range(1, values[0].ndim)))

    return jax.tree.map(rows, results, expected)


def exactly(case: Case, cotangent=None, limit=None) -> dict[str, np.ndarray]:
    """The same by "reference" in float64, from the values that x's dtype has."""
    dtype = case.x.dtype

    def widen(value):
        return value if value.dtype == jnp.int32 else value.astype(jnp.float64)

    rounded = jax.tree.map(lambda w: w.astype(dtype), (case.w_gate, case.w_up, case.w_down, case.shared))
    wide = jax.tree.map(widen, Case(*case[:3], *rounded))
    cotangent = cotangent_of(case.x) if cotangent is None else cotangent
    return run(wide, "reference", widen(cotangent), config=mok_jax.MoKConfig(swiglu_limit=limit))


@functools.cache
def known(dtype, routing, limit=None, **sizes):
    """(case, plain, exact) of a case that several tests use."""
    with on_device("plain"):
        case = make_case(dtype, routing, **sizes)
    plain = run(case, "plain", config=mok_jax.MoKConfig(swiglu_limit=limit))
    return case, plain, exactly(case, limit=limit)


# ---- judging ----


def assert_good(actual, plain, exact, dtype):
    """The rule at the head of this file, for every result by name; `dtype` is x's."""
    assert actual.keys() == exact.keys() == plain.keys()
    for name in exact:
        assert actual[name].shape == exact[name].shape, name
        assert actual[name].dtype == plain[name].dtype, name
        if name in ("d_w_gate", "d_w_up", "d_w_down"):
            for expert in range(exact[name].shape[0]):
                _judge(f"{name}[{expert}]", *(result[name][expert] for result in (actual, plain, exact)), dtype)
        else:
            _judge(name, actual[name], plain[name], exact[name], dtype)


def _judge(name, actual, plain, exact, dtype):
    actual, plain, exact = (np.asarray(value, np.float64) for value in (actual, plain, exact))
    scale = np.abs(exact).max(initial=0.0)
    error = _error(actual, exact)
    bound = min(2 * _error(plain, exact).max(initial=0.0) + FLOORS[dtype] * scale, CEILINGS[dtype] * scale)
    if not error.max(initial=0.0) <= bound:
        worst = np.unravel_index(error.argmax(), error.shape)
        raise AssertionError(
            f"{name}: worst at {tuple(map(int, worst))}: got {actual[worst]!r}, exact {exact[worst]!r}, "
            f"plain {plain[worst]!r}; error {error[worst]:.3g}, allowed {bound:.3g}, largest exact {scale:.3g}"
        )


def _error(actual, exact):
    error = np.abs(actual - exact)
    return np.where(np.isnan(error), np.inf, error)  # NaN fails


def numbered(tree) -> dict[str, jax.Array]:
    """A tree as named results."""
    return {str(index): leaf for index, leaf in enumerate(jax.tree.leaves(tree))}


def assert_near(actual, expected, tolerance):
    """Each result within `tolerance` of the largest expected value, by name; NaN fails."""
    assert actual.keys() == expected.keys()
    for name in expected:
        error = _error(np.asarray(actual[name], np.float64), np.asarray(expected[name], np.float64))
        bound = tolerance * np.abs(expected[name]).max(initial=0.0)
        if not error.max(initial=0.0) <= bound:
            worst = np.unravel_index(error.argmax(), error.shape)
            raise AssertionError(
                f"{name}: worst at {tuple(map(int, worst))}: got {actual[name][worst]!r}, "
                f"expected {expected[name][worst]!r}; error {error[worst]:.3g}, allowed {bound:.3g}"
            )


def assert_same_bits(actual, expected):
    """Two trees of arrays, bit for bit."""
    paths = jax.tree_util.tree_leaves_with_path(expected)
    for (path, want), got in zip(paths, jax.tree.leaves(actual), strict=True):
        got, want = np.asarray(got), np.asarray(want)
        assert got.dtype == want.dtype and got.shape == want.shape, jax.tree_util.keystr(path)
        differ = np.ascontiguousarray(got).view(np.uint8) != np.ascontiguousarray(want).view(np.uint8)
        assert not differ.any(), f"{jax.tree_util.keystr(path)}: {differ.sum()} bytes differ"


def refuse(error, text, function, *arguments, **options):
    """The call raises `error`, and `text` is all that it says."""
    with pytest.raises(error) as caught:
        function(*arguments, **options)
    assert str(caught.value) == text

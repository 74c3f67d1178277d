"""Ranks on several GPUs of one process: bit for bit what virtual ranks on one of them give, whatever else runs there.

A rank that waits in vain for another one says so after 20 seconds, results are then NaN, and the limit of a test
(conftest.py) ends what hangs elsewhere.
"""

import math

import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import BY_ROW, PATTERNS, assert_good, assert_same_bits, known, make_case, rows_that_differ, run
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jax.test_util import check_grads
from test_cuda_peers import SIZES, kernels, need, table
from test_gradients import FLOATS, layer_of
from test_meshes import place, run_on
from test_mxfp8_layer import assert_near as assert_near_the_definition
from test_mxfp8_layer import defined

from mok_jax import MoKConfig

TOKENS = 77  # of a rank
SIZES = SIZES | dict(experts=8)


@pytest.fixture(params=[2, 4, 8])
def ranks(request):
    need(request.param)
    return request.param


def on(ranks):
    return (("expert", ranks),)


def config_of(options, **more):
    return MoKConfig(**options | dict(minibatch=128, macrobatch=256, barrier_timeout=20.0) | more)


def but_shared(results):
    """XLA sums the shared expert's gradients over the ranks in an order of its own."""
    return {name: value for name, value in results.items() if "shared" not in name}


def check(result, dtype, options, routing, sizes):
    """As good as plain code, or near MXFP8's definition."""
    if "precision" in options:
        assert_near_the_definition(result, defined(dtype, routing, **sizes)[1])
    else:
        _, plain, exact = known(dtype, routing, **sizes)
        assert_good(result, plain, exact, cases.DTYPES[dtype][0])


@kernels
@pytest.mark.parametrize("routing", PATTERNS)
def test_every_routing(ranks, dtype, options, routing):
    sizes = SIZES | dict(tokens=TOKENS * ranks)
    case, config = make_case(dtype, routing, **sizes), config_of(options)
    with table(dtype, axes=on(ranks)) as (mesh, _):
        result = run_on(mesh, case, "cuda", named=True, config=config)
    assert_same_bits(but_shared(result), but_shared(run(case, "cuda", config=config_of(options, virtual_ranks=ranks))))
    check(result, dtype, options, routing, sizes)


@kernels
@pytest.mark.parametrize(
    "axes",
    [
        (("expert", 2), ("data", 1)),
        (("data", 1), ("expert", 2)),
        (("expert", 2), ("data", 2)),
        (("data", 2), ("expert", 2)),
        (("expert", 4), ("data", 2)),
    ],
    ids=lambda axes: "_".join(f"{name[0]}{size}" for name, size in axes),
)
def test_a_data_axis_beside_the_expert_axis(axes, dtype, options):
    devices = math.prod(size for _, size in axes)
    need(devices)
    sizes = SIZES | dict(tokens=TOKENS * devices)
    case, config = make_case(dtype, "padding_slots", **sizes), config_of(options)
    with table(dtype, axes=axes) as (mesh, _):
        result = run_on(mesh, case, "cuda", named=True, config=config)
    one = run(case, "cuda", config=config)
    assert_same_bits({name: result[name] for name in BY_ROW}, {name: one[name] for name in BY_ROW})
    check(result, dtype, options, "padding_slots", sizes)


def test_against_finite_differences(ranks):
    sizes = dict(tokens=2 * ranks, hidden=2, intermediate=3, shared=5, experts=8, top_k=2)
    with table("f32", axes=on(ranks)) as (mesh, _):
        layer, arguments = layer_of(
            make_case("f32", "duplicates", **sizes), FLOATS, "cuda", mesh=mesh, config=MoKConfig(barrier_timeout=20.0)
        )
        check_grads(layer, arguments, order=1, modes=["rev"], atol=1e-2, rtol=1e-2)


# ---- many calls in flight ----


def rank_0_sends_nothing(ids, ranks):
    return ids.at[: len(ids) // ranks].set(-1)


def rank_0_receives_nothing(ids, ranks):
    return jnp.where(ids < 8 // ranks, ids + 8 // ranks, ids)


def all_to_rank_0(ids, ranks):
    return ids % (8 // ranks)


def nobody_sends_but_rank_0(ids, ranks):
    return ids.at[len(ids) // ranks :].set(-1)


def as_they_are(ids, ranks):
    return ids


PROBES = {
    change.__name__: (300, change)
    for change in (rank_0_sends_nothing, rank_0_receives_nothing, all_to_rank_0, nobody_sends_but_rank_0)
} | {f"{tokens}_tokens": (tokens, as_they_are) for tokens in (1, 127, 4093, 4095)}


@pytest.mark.parametrize(("dtype", "options"), [("bf16", {}), ("f32", {})], ids=["hopper", "f32"])
@pytest.mark.parametrize(("tokens", "change"), PROBES.values(), ids=PROBES)
def test_a_hundred_calls_in_flight(ranks, tokens, change, dtype, options):
    case = make_case(dtype, **SIZES | dict(tokens=tokens * ranks, shared=0))
    case = case._replace(expert_ids=change(case.expert_ids, ranks))
    wanted = run(case, "cuda", config=config_of(options, virtual_ranks=ranks))
    with table(dtype, axes=on(ranks), tokens=tokens) as (mesh, _):
        placed = place(case, mesh, "wanted")
        cotangent = jax.device_put(cases.cotangent_of(case.x), placed.x.sharding)
        named = (("config", config_of(options)), ("mesh", mesh))

        def call():
            return cases.compiled(placed, cotangent, "cuda", named)

        first = call()
        assert_same_bits(jax.device_get(first), wanted)
        differ = [rows_that_differ(call(), first) for _ in range(100)]  # none awaited
        assert not any(rows.any() for rows in jax.tree.leaves(jax.device_get(differ)))


@pytest.mark.parametrize("collective_stream", [False, True], ids=["beside", "in_order"])
def test_two_layers_and_all_reduces_of_nccl_in_flight(ranks, collective_stream):
    case = make_case("bf16", "padding_slots", **SIZES | dict(tokens=TOKENS * ranks, shared=0))
    cotangent = cases.cotangent_of(case.x)
    virtual = config_of({}, virtual_ranks=ranks)
    wanted, _ = cases.hidden_all_reduces(case, cotangent, [], None, implementation="cuda", config=virtual)
    # Whole numbers, whose sums are exact: 4 and 16 MiB.
    numbers = [np.arange(ranks * n, dtype=np.float32).reshape(ranks, 1, n) % 1000 for n in (2**20, 2**22)]
    with table("bf16", axes=on(ranks)) as (mesh, _):
        summands = [jax.device_put(part, NamedSharding(mesh, P("expert"))) for part in numbers]
        placed = place(case, mesh, "wanted")
        cotangent = jax.device_put(cotangent, placed.x.sharding)

        def call():
            config = config_of({}, collective_stream=collective_stream)
            return cases.hidden_all_reduces(placed, cotangent, summands, mesh, implementation="cuda", config=config)

        first = call()
        results, sums = jax.device_get(first)
        assert_same_bits(results, jax.device_get(wanted))
        assert_same_bits(sums, [part.sum(axis=0, keepdims=True) for part in numbers])
        differ = [rows_that_differ(call(), first) for _ in range(200)]  # none awaited
        assert not any(rows.any() for rows in jax.tree.leaves(jax.device_get(differ)))

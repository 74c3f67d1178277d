"""What only the GPU can get wrong: dirty memory, tile edges, orders, offsets, command buffers, waits in vain.

The shared matrices (test_moe.py and others) run "cuda" too; this file has what they do not ask.
"""

import dataclasses
import functools
import os
import re
import subprocess
import sys
import time

import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import BY_ROW, assert_good, assert_near, assert_same_bits, exactly, make_case, run
from test_mxfp8_layer import assert_near as assert_near_the_definition

import mok_jax
from mok_jax import MoKConfig, ops

# name: (dtype, what asks for these kernels)
KERNELS = {
    "hopper": ("bf16", MoKConfig()),
    "hopper_f32_weights": ("bf16-f32", MoKConfig()),
    "hopper_mxfp8": ("bf16-f32", MoKConfig(precision="mxfp8")),
    "portable": ("bf16", MoKConfig(portable=True)),
    "portable_mxfp8": ("bf16", MoKConfig(portable=True, precision="mxfp8")),
    "f32": ("f32", MoKConfig()),
}
kernels = pytest.mark.parametrize(("dtype", "kernel"), KERNELS.values(), ids=KERNELS)

SIZES = dict(hidden=136, intermediate=264, shared=72)  # multiples of 8, not of a tile
EDGES = (0, 1, 15, 16, 17, 63, 64, 65, 127, 128, 129, 255, 256, 257)


def with_counts(dtype, counts, seed=0, **sizes):
    """Top-1 with exactly these counts, tokens in random order."""
    case = make_case(dtype, tokens=sum(counts), experts=len(counts), top_k=1, seed=seed, **SIZES | sizes)
    ids = np.random.default_rng(seed).permutation(np.repeat(np.arange(len(counts)), counts))
    return case._replace(expert_ids=jnp.asarray(ids[:, None], jnp.int32))


def check(case, dtype, config):
    """Every tensor, and every expert's part of one, is as good as plain code, or near MXFP8's definition; returns
    them."""
    result = run(case, "cuda", config=config)
    if config.precision == "mxfp8":
        assert_near_the_definition(result, run(case, "reference", config=MoKConfig(precision="mxfp8")))
    else:
        assert_good(result, run(case, "plain"), exactly(case), cases.DTYPES[dtype][0])
    return result


# ---- counts ----

COUNTS = {
    "every_edge": EDGES,
    "every_edge_falling": EDGES[::-1],
    "one_row": (0, 0, 1, 0),
    "empty_first_middle_last": (0, 130, 0, 5, 0),
    "all_on_one": (0, 0, 700, 0),
    "all_on_the_last": (0, 0, 385),
} | {f"each_{edge}": (edge,) * 3 for edge in EDGES[1:]}


@kernels
@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
def test_exact_counts(dtype, kernel, counts):
    check(with_counts(dtype, counts), dtype, kernel)


@kernels
@pytest.mark.parametrize("save_context", [True, False], ids=["kept", "recomputed"])
def test_an_expert_over_several_macrobatches(dtype, kernel, save_context):
    # Six macrobatches and more; the second expert lies in four of them.
    case = with_counts(dtype, (100, 900, 0, 257, 128))
    config = dataclasses.replace(kernel, minibatch=128, macrobatch=256, save_context=save_context)
    check(case, dtype, config)


@kernels
@pytest.mark.parametrize("macrobatch", [None, 4096], ids=["default", "small"])
def test_more_experts_than_shared_memory_has_room_for(dtype, kernel, macrobatch):
    counts = [e % 3 for e in range(520)] + [130]
    minibatch = None if macrobatch is None else 512
    config = dataclasses.replace(kernel, minibatch=minibatch, macrobatch=macrobatch)
    check(with_counts(dtype, counts, hidden=64, intermediate=72, shared=0), dtype, config)


# ---- what is not finite ----


@kernels
@pytest.mark.parametrize("value", [np.nan, np.inf], ids=str)
@pytest.mark.parametrize("weight", ["w_gate", "w_up", "w_down"])
def test_a_weight_that_is_not_finite_reaches_its_expert_s_rows_alone(dtype, kernel, weight, value):
    case = make_case(dtype, tokens=200, experts=6, top_k=2, **SIZES)
    config = kernel
    good = run(case, "cuda", config=config)
    # The last element: the next expert's first one lies behind it.
    bad = run(case._replace(**{weight: getattr(case, weight).at[2, -1, -1].set(value)}), "cuda", config=config)
    slots = np.asarray(case.expert_ids) == 2
    rows, experts = slots.any(axis=1), np.arange(6) == 2
    reached = dict(y=rows, d_x=rows, d_router_weights=slots, d_w_gate=experts, d_w_up=experts, d_w_down=experts)
    for name in ("y", "d_x"):
        assert not np.isfinite(bad[name][rows, -1].astype(np.float32)).any(), name
    for name in good:
        spared = ~reached[name] if name in reached else ...
        assert_same_bits({name: bad[name][spared]}, {name: good[name][spared]})


@kernels
@pytest.mark.parametrize("intermediate", [264, 261])
def test_an_infinite_cotangent_gives_an_infinite_router_gradient(dtype, kernel, intermediate):
    # All is positive, so no sum may be NaN: <dh', h> must leave out the columns that its last tile lacks.
    case = make_case(dtype, tokens=37, experts=3, top_k=2, **SIZES | dict(intermediate=intermediate))
    cotangent = jnp.ones_like(case.x).at[5, 7].set(jnp.inf)
    result = run(jax.tree.map(jnp.abs, case), "cuda", cotangent, config=kernel)
    d_router_weights = result["d_router_weights"]
    assert np.isposinf(d_router_weights[5]).all(), d_router_weights[5]
    assert np.isfinite(np.delete(d_router_weights, 5, axis=0)).all()


# ---- the same bits ----


@functools.cache
def skewed(dtype, kernel):
    case = make_case(dtype, "duplicates", tokens=680, experts=8, top_k=3, **SIZES)
    ids = np.array(case.expert_ids)
    ids[::2] = [1, 1, 4]
    case = case._replace(expert_ids=jnp.asarray(ids))
    return case, run(case, "cuda", config=kernel)


@kernels
def test_twenty_runs(dtype, kernel):
    case, first = skewed(dtype, kernel)
    for _ in range(20):
        assert_same_bits(run(case, "cuda", config=kernel), first)


WAYS = {
    "smallest_macrobatch": dict(minibatch=128, macrobatch=128),
    "small_macrobatches": dict(minibatch=128, macrobatch=384),
    "large_minibatches": dict(minibatch=512, macrobatch=1024),
    "one_macrobatch": dict(minibatch=128, macrobatch=8192),
    "nothing_kept": dict(save_context=False),
    "nothing_kept_small": dict(save_context=False, minibatch=128, macrobatch=256),
    "dirty_scratch": dict(random_order=0),
    "dirty_scratch_small": dict(random_order=0, minibatch=128, macrobatch=256),
    "dirty_scratch_nothing_kept": dict(random_order=0, save_context=False, minibatch=256, macrobatch=512),
}


@kernels
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_every_way_gives_the_same_bits(dtype, kernel, way):
    case, expected = skewed(dtype, kernel)
    assert_same_bits(run(case, "cuda", config=dataclasses.replace(kernel, **way)), expected)


@kernels
def test_a_forward_pass_has_minibatches_of_its_own(dtype, kernel):
    case = make_case(dtype, tokens=8192, hidden=264, intermediate=2048, shared=8, experts=4, top_k=2)
    dims = cases.dims_of(case, kernel, implementation="cuda", gpu=ops.Gpu((9, 0), None))
    small = dims.plan().minibatch
    assert small < dims.plan(forward=True).minibatch < dims.plan().capacity
    same = run(case, "cuda", config=dataclasses.replace(kernel, minibatch=small))
    assert_same_bits(run(case, "cuda", config=kernel), same)


# ---- virtual ranks ----


@kernels
@pytest.mark.parametrize("macrobatch", [None, 256], ids=["default", "small"])
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_virtual_ranks_are_one_rank(dtype, kernel, ranks, macrobatch):
    case, expected = skewed(dtype, kernel)
    minibatch = None if macrobatch is None else 128
    config = dataclasses.replace(kernel, virtual_ranks=ranks, minibatch=minibatch, macrobatch=macrobatch)
    result = run(case, "cuda", config=config)
    assert_same_bits({name: result[name] for name in BY_ROW}, {name: expected[name] for name in BY_ROW})
    assert_near(result, expected, 1e-5 if dtype == "f32" else 2**-6)  # weight gradients: in another order


@pytest.mark.parametrize("precision", [None, "mxfp8"], ids=["bf16", "mxfp8"])
@pytest.mark.parametrize(("tokens", "hidden"), [(200, 3080), (40, 65544)])
def test_long_rows_move_in_pieces_of_few(tokens, hidden, precision):
    """21 rows at a time, which do not divide a block, and one."""
    sizes = dict(tokens=tokens, hidden=hidden, intermediate=64, experts=6, top_k=3)
    case = make_case("bf16", "padding_slots", **sizes)
    config = MoKConfig(minibatch=128, macrobatch=256, precision=precision)
    one, two = (check(case, "bf16", dataclasses.replace(config, virtual_ranks=ranks)) for ranks in (1, 2))
    assert_same_bits({name: two[name] for name in BY_ROW}, {name: one[name] for name in BY_ROW})


@kernels
def test_virtual_ranks_of_dirty_scratch_and_few_movers(dtype, kernel):
    case, _ = skewed(dtype, kernel)
    config = dataclasses.replace(kernel, virtual_ranks=4, minibatch=128, macrobatch=256)
    expected = run(case, "cuda", config=config)
    for changed in (dict(random_order=0), dict(num_comm_sms=1), dict(num_comm_sms=40), dict(num_comm_sms=1000)):
        assert_same_bits(run(case, "cuda", config=dataclasses.replace(config, **changed)), expected)


@pytest.mark.parametrize("portable", [False, True], ids=["hopper", "portable"])
@pytest.mark.parametrize(("precision", "row_bytes"), [(None, 2048), ("mxfp8", 1056)], ids=["bf16", "mxfp8"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_pulled_bytes_are_counted(ranks, precision, row_bytes, portable):
    case = make_case("bf16", "padding_slots", tokens=200, hidden=1024, intermediate=64, experts=6, top_k=3)
    config = MoKConfig(minibatch=128, macrobatch=4096, virtual_ranks=ranks, precision=precision, portable=portable)
    dims = cases.dims_of(case, config, implementation="cuda", gpu=ops.Gpu((9, 0), None))
    place, none = jnp.zeros(2, jnp.int32), jnp.zeros((1024, 0), jnp.bfloat16)
    weights = [*case[3:6], none, none, none.T]

    @jax.jit
    def both():
        _, residuals, forward = ops.forward(dims, place, *case[:3], weights, context=True)
        more = case[3:6] if precision else ()
        options = dict(context=True, gradients=3, dtypes=["bfloat16"] * 6)
        *_, backward = ops.backward(dims, place, case.x, *case[:3], [*weights, *more], residuals, **options)
        return dims.pulled_bytes(forward, False, True, 0), dims.pulled_bytes(backward, True, True, 3)

    rows = int((np.asarray(case.expert_ids) >= 0).sum())
    # On one rank x is not kept; the portable kernels gather it, and dy, where nothing is to be converted.
    gathers = ranks == 1 and portable and precision is None
    expected = [0, 0] if gathers else [rows * row_bytes, rows * row_bytes * (2 if ranks == 1 else 1)]
    found = [np.asarray(words, np.int64) for words in jax.device_get(both())]
    assert [words[:, 0].sum() for words in found] == expected
    assert not any(words[:, 1].any() for words in found)


# ---- memory ----


def fill_free_memory_with_nan(gibibytes=4):
    blocks = [jnp.full(2**26, jnp.nan, jnp.float32) for _ in range(4 * gibibytes)]
    jax.block_until_ready(blocks)


@kernels
@pytest.mark.parametrize("routing", ["holes", "padding_slots", "no_expert"])
def test_dirty_memory(dtype, kernel, routing):
    case = make_case(dtype, routing, tokens=200, experts=6, top_k=3, **SIZES)
    config = dataclasses.replace(kernel, minibatch=128, macrobatch=256)
    first = check(case, dtype, config)
    for _ in range(6):
        fill_free_memory_with_nan()
        assert_same_bits(run(case, "cuda", config=config), first)


def test_offsets_beyond_32_bits():
    # tokens * top_k * hidden and the ring have 2.4e9 elements; the last tokens alone must give the same.
    tokens, few = 65536, 256
    case = make_case("bf16", tokens=few, hidden=4608, intermediate=64, experts=8, top_k=8)
    keys = jax.random.split(jax.random.key(0), 2)
    x = jax.random.normal(keys[0], (tokens, 4608), jnp.bfloat16).at[-few:].set(case.x)
    ids = jax.random.randint(keys[1], (tokens, 8), 0, 8, jnp.int32).at[-few:].set(case.expert_ids)
    weights = jnp.ones((tokens, 8), jnp.float32).at[-few:].set(case.router_weights)

    @jax.jit
    def both(x, ids, weights):
        def layer(x):
            return mok_jax.moe(x, ids, weights, *case[3:6], implementation="cuda")

        y, pull = jax.vjp(layer, x)
        return y[-few:], pull(x)[0][-few:]

    assert_same_bits(both(x, ids, weights), both(case.x, case.expert_ids, case.router_weights))


# ---- many programs, many calls in flight ----


def test_two_shapes_and_two_kernels_in_flight():
    layers = [
        (make_case("bf16", tokens=300, experts=6, top_k=3, **SIZES), MoKConfig()),
        (make_case("f32", tokens=90, hidden=7, intermediate=9, experts=3, top_k=2), MoKConfig()),
        (make_case("bf16", tokens=128, experts=8, top_k=2, **SIZES), MoKConfig(virtual_ranks=2)),
    ]
    call = jax.jit(lambda case, config: cases.call(case, "cuda", config=config), static_argnums=1)
    expected = [jax.device_get(call(*layer)) for layer in layers]
    results = [call(*layer) for _ in range(30) for layer in layers]  # none awaited
    assert_same_bits(jax.device_get(results), expected * 30)


COMMAND_BUFFERS = """
import sys
import cases, jax, mok_jax

jax.config.update("jax_default_device", jax.devices("cuda")[0])
case = cases.make_case("bf16", tokens=200, hidden=136, intermediate=264, shared=72, experts=6, top_k=3)
config = mok_jax.MoKConfig(minibatch=128, macrobatch=256, virtual_ranks=int(sys.argv[1]))
first = cases.run(case, "cuda", config=config)
for i in range(5):  # other buffers, then the same again
    changed = case._replace(x=case.x * (i % 2 + 1))
    result = cases.run(changed, "cuda", config=config)
    cases.assert_good(result, cases.run(changed, "plain"), cases.exactly(changed), "bfloat16")
cases.assert_same_bits(cases.run(case, "cuda", config=config), first)
print("done")
"""


def child(code, *arguments, **environment):
    path = os.pathsep.join([os.path.dirname(__file__), os.environ.get("PYTHONPATH", "")])
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env=os.environ | {"PYTHONPATH": path} | environment,
        capture_output=True,
        text=True,
        timeout=110,
    )


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("kinds", ["", "FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL"], ids=["without", "with"])
def test_command_buffers(kinds, ranks):
    flags = f"--xla_gpu_enable_command_buffer={kinds} --xla_gpu_graph_min_graph_size=1"
    result = child(COMMAND_BUFFERS, str(ranks), XLA_FLAGS=f"{os.environ['XLA_FLAGS']} {flags}")
    assert (result.returncode, result.stdout) == (0, "done\n"), result.stderr


# ---- waits in vain ----


@kernels
def test_a_wait_in_vain_is_reported_once_by_the_next_call(dtype, kernel):
    case = make_case(dtype, tokens=200, experts=6, top_k=3, **SIZES)
    config = dataclasses.replace(kernel, minibatch=128)
    good = run(case, "cuda", config=config)
    counter = cases.first_block_of_h(case, config)
    stuck = dataclasses.replace(config, timeout=0.2, stuck_counter=counter)
    y = jax.device_get(jax.jit(lambda case: cases.call(case, "cuda", config=stuck))(case))
    assert np.isnan(y.astype(np.float32)).all()
    with pytest.raises(jax.errors.JaxRuntimeError) as caught:
        run(case, "cuda", config=config)
    pattern = (
        r"mok_jax cuda: in an earlier call on this device down of block 0 tile \d+ on rank 0 waited 0\.2 s in vain for "
        rf"counter {counter}: found -\d+, expected \d+; that call's results are NaN\. .*raise MoKConfig\.timeout"
    )
    assert re.search(pattern, str(caught.value)), caught.value
    assert_same_bits(run(case, "cuda", config=config), good)


def test_every_call_that_waits_in_vain_is_reported():
    case = make_case("bf16", tokens=200, experts=6, top_k=3, **SIZES)
    config = MoKConfig(minibatch=128)
    stuck = dataclasses.replace(config, timeout=0.5, stuck_counter=cases.first_block_of_h(case, config))
    # The second is on the stream before the first gives up.
    twice = jax.jit(lambda case: [cases.call(c, "cuda", config=stuck) for c in (case, case._replace(x=-case.x))])
    assert all(np.isnan(y.astype(np.float32)).all() for y in jax.device_get(twice(case)))
    with pytest.raises(jax.errors.JaxRuntimeError, match="are NaN, as are those of 1 before it for the same reason"):
        run(case, "cuda", config=config)
    run(case, "cuda", config=config)


# The second: so much to push that half of the movers hold back when block 2 is stuck.
@pytest.mark.parametrize(
    ("sizes", "block"), [(SIZES, 0), (dict(hidden=65544, intermediate=64), 2)], ids=["few", "many"]
)
def test_a_call_of_many_ranks_that_wait_in_vain_is_reported_once(sizes, block):
    case = make_case("bf16", tokens=200, experts=12, top_k=6, **sizes)
    config = MoKConfig(minibatch=128, virtual_ranks=2)
    good = jax.jit(lambda case: cases.call(case, "cuda", config=config))
    jax.block_until_ready(good(case))
    stuck = dataclasses.replace(config, timeout=0.5, stuck_counter=cases.first_block_of_h(case, config) + block)
    jax.jit(lambda case: cases.call(case, "cuda", config=stuck))(case)
    errors, later = [], []
    for _ in range(16):  # while one rank after the other gives up
        time.sleep(0.1)
        try:
            later.append(good(case))
        except jax.errors.JaxRuntimeError as error:
            errors.append(error)
    for y in later:
        try:
            jax.block_until_ready(y)
        except jax.errors.JaxRuntimeError as error:
            errors.append(error)
    assert len(errors) == 1 and "in vain" in str(errors[0]), errors


@kernels
def test_a_forward_pass_that_waits_in_vain_leaves_nan_to_the_backward_pass(dtype, kernel):
    case = make_case(dtype, tokens=200, experts=6, top_k=3, **SIZES)
    config = dataclasses.replace(kernel, minibatch=128)
    good = run(case, "cuda", config=config)
    stuck = dataclasses.replace(config, timeout=0.5, stuck_counter=cases.first_block_of_h(case, config))
    result = run(case, "cuda", config=stuck)
    assert [name for name, value in result.items() if not np.isnan(value.astype(np.float32)).all()] == []
    # The kept activations are there, so the backward pass waits for nothing that is stuck: one report.
    with pytest.raises(jax.errors.JaxRuntimeError, match="that call's results are NaN\\. The time runs"):
        run(case, "cuda", config=config)
    assert_same_bits(run(case, "cuda", config=config), good)


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_context_of_a_forward_pass_that_waits_in_vain_is_nan(ranks):
    case = make_case("bf16", tokens=200, experts=6, top_k=3, **SIZES)
    config = MoKConfig(minibatch=128, virtual_ranks=ranks)
    config = dataclasses.replace(config, timeout=0.5, stuck_counter=cases.first_block_of_h(case, config))
    dims = cases.dims_of(case, config, implementation="cuda", gpu=ops.Gpu((9, 0), None))
    place, weights = jnp.zeros(2, jnp.int32), (*case[3:6], *case.shared)
    y, residuals, _ = jax.jit(lambda: ops.forward(dims, place, *case[:3], weights, context=True))()
    context = jax.device_get([y, *(value for value in residuals[3:] if value.size)])
    assert len(context) == (5 if ranks == 1 else 6)
    assert all(np.isnan(value.astype(np.float32)).all() for value in context)
    with pytest.raises(jax.errors.JaxRuntimeError, match="in vain"):
        run(case, "cuda", config=MoKConfig(minibatch=128))
    run(case, "cuda", config=MoKConfig(minibatch=128))


def test_every_gradient_of_a_backward_pass_that_waits_in_vain_is_nan():
    case = make_case("bf16", tokens=200, experts=6, top_k=3, **SIZES)
    config = MoKConfig(minibatch=128, timeout=0.2, save_context=False)
    config = dataclasses.replace(config, stuck_counter=cases.first_block_of_h(case, config))
    result = run(case, "cuda", config=config)
    assert [name for name, value in result.items() if not np.isnan(value.astype(np.float32)).all()] == []
    with pytest.raises(jax.errors.JaxRuntimeError, match="in vain"):
        run(case, "cuda", config=MoKConfig(minibatch=128))
    run(case, "cuda", config=MoKConfig(minibatch=128))


# ---- the schedule ----


def uniform(rng, shape, experts):
    return rng.integers(-3, experts + 3, shape)


def skewed_ids(rng, shape, experts):
    return np.minimum(rng.geometric(0.3, shape) - 1, experts - 1)


def one(rng, shape, experts):
    return np.full(shape, experts - 1)


def hostile(rng, shape, experts):
    wrong = [-(2**31), 2**31 - 1, -1, experts, -experts, experts - 2**31]
    return np.where(rng.random(shape) < 0.5, rng.integers(0, experts, shape), rng.choice(wrong, shape))


# tokens, top_k, local experts, ranks
SCHEDULES = [
    (0, 1, 1, 1),
    (1, 1, 1, 1),
    (37, 3, 6, 1),
    (2047, 1, 5, 1),
    (2049, 1, 512, 1),
    (5000, 8, 513, 1),
    (100, 64, 4097, 1),
    (32768, 8, 128, 1),
    (131072, 8, 256, 1),
    (700, 6, 33, 2),
    (1025, 4, 3, 5),
    (300, 4, 513, 3),
    (33, 4, 2, 72),
]


@pytest.mark.parametrize("pattern", [uniform, skewed_ids, one, hostile], ids=lambda pattern: pattern.__name__)
@pytest.mark.parametrize("sizes", SCHEDULES, ids=lambda sizes: "x".join(map(str, sizes)))
def test_schedule_is_the_host_s(sizes, pattern):
    tokens, top_k, experts, ranks = sizes
    rng = np.random.default_rng(tokens)
    ids = pattern(rng, (ranks, tokens, top_k), experts * ranks).astype(np.int32)
    plan = dict(tokens=tokens, hidden=8, intermediate=8, shared_intermediate=0, local_experts=experts, ranks=ranks)
    plan |= dict(top_k=top_k, row_tile=128, minibatch=0, macrobatch=0)
    host, cuda = ops._host.Dims(**plan), ops.cuda().Dims(**plan)
    shapes = [host.capacity, experts + 1, experts, ops.cuda().schedule_scratch(cuda)]
    call = jax.ffi.ffi_call("mok_schedule", [jax.ShapeDtypeStruct((size,), jnp.int32) for size in shapes])
    for rank in sorted({0, ranks // 2, ranks - 1}):
        result = jax.jit(functools.partial(call, rank=np.int64(rank)))(ids)[:3]
        expected = ops._host.build_schedule(host, rank, ids.reshape(ranks, -1))
        for name, got, want in zip(("row_source", "row_offset", "row_count"), result, expected, strict=True):
            np.testing.assert_array_equal(got, want, err_msg=f"{name} of rank {rank}")


# ---- choice and refusals on a real device ----


def test_the_default_implementation_on_a_gpu_is_cuda():
    assert mok_jax.choose_implementation() == "cuda"
    assert mok_jax.choose_implementation(dtype=np.dtype("float64")) == "xla"
    assert mok_jax.choose_implementation(ranks=2) == "xla"


def test_report_of_the_machine():
    code = "from mok_jax import __main__; __main__.main()"
    result = child(code, JAX_PLATFORMS="cuda")
    rows = dict(line.split(None, 1) for line in result.stdout.splitlines())
    assert (rows['"cuda"'], rows["chosen"]) == ("yes", '"cuda"'), result.stderr


def test_scratch_beyond_the_device_is_refused():
    case = make_case("bf16", tokens=8, experts=4, top_k=2, **SIZES)
    many = jax.tree.map(lambda a: jax.ShapeDtypeStruct((2**28, *a.shape[1:]), a.dtype), case[:3])
    with pytest.raises(ValueError, match=r"the scratch of the forward pass must fit into the \d+\.\d\d GiB"):
        jax.eval_shape(lambda case: cases.call(case, "cuda"), cases.Case(*many, *case[3:]))

"""The host implementation from within: saved intermediates, one set of bits for every way to run, the
random-order mode, threads, and the modules for each CPU level."""

import os
import re
import subprocess
import sys
import threading

import cases
import jax
import jax.numpy as jnp
import jaxlib
import numpy as np
import pytest

import mok_jax
from mok_jax import ops
from mok_jax.reference import swiglu

SIZES = dict(tokens=48, hidden=24, intermediate=300, shared=56, experts=6, top_k=3)  # 300: two column tiles
BASE = mok_jax.MoKConfig(row_tile=8)


def forward(case, config, context=True):
    dims = cases.dims_of(case, config)
    weights = (case.w_gate, case.w_up, case.w_down, *case.shared)
    place = jnp.zeros(2, jnp.int32)
    return ops.forward(dims, place, case.x, case.expert_ids, case.router_weights, weights, context=context)[:2]


@pytest.fixture(scope="module")
def case():
    return cases.make_case("f64", "duplicates", **SIZES)


def rows_of(case, residuals, ranks):
    """(rank, ring row, token, expert) of every row of each rank's first macrobatch."""
    routes = case.expert_ids.size // ranks
    experts = case.w_gate.shape[0] // ranks
    found = []
    for rank in range(ranks):
        for row, source in enumerate(np.asarray(residuals.row_source[rank])):
            if source >= 0:
                # Packed: the source rank, and the route within it.
                token = source // routes * (case.x.shape[0] // ranks) + source % routes // case.expert_ids.shape[1]
                expert = np.searchsorted(np.asarray(residuals.row_offset[rank]), row, side="right") - 1
                found.append((rank, row, token, rank * experts + expert))
    return found


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("macrobatch", [None, 32])
def test_saved_intermediates(case, ranks, macrobatch):
    config = mok_jax.MoKConfig(row_tile=8, minibatch=16, macrobatch=macrobatch, virtual_ranks=ranks)
    _, kept = forward(case, config)
    rows_in_ring = kept.gate.shape[0] // ranks
    expected = {name: np.zeros(getattr(kept, name).shape) for name in ("gate", "up", "x")}
    for rank, row, token, expert in rows_of(case, kept, ranks):
        if row >= rows_in_ring:
            continue
        at = rank * rows_in_ring + row
        expected["gate"][at] = case.x[token] @ case.w_gate[expert]
        expected["up"][at] = case.x[token] @ case.w_up[expert]
        if ranks > 1:
            expected["x"][at] = case.x[token]
    for name, value in expected.items():  # rows that hold nothing are zero
        np.testing.assert_allclose(getattr(kept, name), value, atol=1e-13, rtol=0, err_msg=name)
    np.testing.assert_allclose(kept.shared_gate, case.x @ case.shared[0], atol=1e-13, rtol=0)
    np.testing.assert_allclose(kept.shared_up, case.x @ case.shared[1], atol=1e-13, rtol=0)


def test_schedule_counts_every_route(case):
    _, kept = forward(case, BASE)
    np.testing.assert_array_equal(kept.row_count[0], np.bincount(np.asarray(case.expert_ids).ravel(), minlength=6))


def test_without_a_backward_pass_nothing_is_kept(case):
    _, kept = forward(case, BASE, context=False)
    assert [a.size for a in kept[3:]] == [0] * 5


def test_output_is_the_definition_of_the_kept_activations(case):
    y, kept = forward(case, BASE)
    expected = np.array(swiglu(kept.shared_gate, kept.shared_up) @ case.shared[2])
    h = np.asarray(swiglu(kept.gate, kept.up))
    for _, row, token, expert in rows_of(case, kept, 1):
        slot = int(kept.row_source[0, row]) % 3
        expected[token] += case.router_weights[token, slot] * (h[row] @ case.w_down[expert])
    np.testing.assert_allclose(y, expected, atol=1e-13)


# ---- one set of bits ----

WAYS = {
    "again": {},
    "one thread": dict(num_threads=1),
    "eight threads": dict(num_threads=8),
    "one macrobatch of all rows": dict(minibatch=8, macrobatch=2048),
    "smallest macrobatch": dict(minibatch=8, macrobatch=8),
    "small macrobatches": dict(minibatch=16, macrobatch=48),
    "large minibatches": dict(minibatch=64, macrobatch=64),
    "nothing kept": dict(save_context=False),
    "nothing kept, small": dict(save_context=False, minibatch=8, macrobatch=24),
    "random order": dict(random_order=0),
    "random order, small": dict(random_order=1, minibatch=8, macrobatch=24),
    "random order, nothing kept": dict(random_order=2, save_context=False, minibatch=16, macrobatch=32),
}


def all_results(case, config):
    """y and every gradient."""

    def run(x, router_weights, *weights):
        return mok_jax.moe(
            x, case.expert_ids, router_weights, *weights[:3], shared=weights[3:], implementation="host", config=config
        )

    arguments = (case.x, case.router_weights, case.w_gate, case.w_up, case.w_down, *case.shared)
    y, pull = jax.vjp(run, *arguments)
    return [np.asarray(a).view(np.uint8) for a in (y, *pull(cases.cotangent_of(case.x)))]


@pytest.fixture(scope="module", params=["f32", "bf16-f32"])
def skewed(request):
    """One expert with most rows, so that it straddles macrobatches."""
    made = cases.make_case(request.param, "distinct", **SIZES)
    ids = np.array(made.expert_ids)
    ids[::2] = [1, 1, 4]
    return made._replace(expert_ids=jnp.asarray(ids))


@pytest.fixture(scope="module", params=[1, 2], ids=["one rank", "two virtual ranks"])
def base_results(request, skewed):
    return request.param, all_results(skewed, mok_jax.MoKConfig(row_tile=8, virtual_ranks=request.param))


@pytest.mark.parametrize("way", [pytest.param(way, id=name) for name, way in WAYS.items()])
def test_the_same_bits(skewed, base_results, way):
    ranks, expected = base_results
    found = all_results(skewed, mok_jax.MoKConfig(**(dict(row_tile=8, virtual_ranks=ranks) | way)))
    for a, b in zip(expected, found, strict=True):
        np.testing.assert_array_equal(a, b)


def test_calls_from_many_threads_do_not_meet(case):
    run = jax.jit(lambda x: mok_jax.moe(x, *case[1:6], implementation="host", config=BASE))
    inputs = [case.x * (i + 1) for i in range(8)]
    expected = [np.asarray(run(x)) for x in inputs]
    found = [None] * 8

    def work(i):
        for _ in range(20):
            found[i] = np.asarray(run(inputs[i]))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    np.testing.assert_array_equal(expected, found)


def test_workspace_is_linear_in_tokens():
    def total(tokens):
        sizes = dict(hidden=64, intermediate=128, shared_intermediate=32, local_experts=4, ranks=1, top_k=2)
        dims = ops.Dims(tokens=tokens, dtype=np.dtype("float32"), config=mok_jax.MoKConfig(), **sizes)
        return dims.workspace_bytes(False, True, 0) + dims.workspace_bytes(True, True, 15)

    assert total(16384) - total(8192) == pytest.approx(total(32768) / 2 - total(16384) / 2, rel=1e-3)


# ---- the module itself ----

CHILD = """
import jax, numpy as np, mok_jax, cases
from mok_jax import ops
case = cases.make_case("f32", **cases.SMALL)
y = mok_jax.moe(*case[:6], shared=case.shared, implementation="host")
expected = mok_jax.moe(*case[:6], shared=case.shared, implementation="reference")
np.testing.assert_allclose(y, expected, atol=2e-6)
print(ops.describe()["instruction set"])
"""


def run_child(code, **environment):
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        env=os.environ | {"PYTHONPATH": os.path.dirname(__file__)} | environment,
        capture_output=True,
        text=True,
        timeout=100,
    )


@pytest.mark.parametrize("level", ["v2", "v3", "v4"])
def test_module_of_each_cpu_level(level):
    if not ops._host.cpu_has(f"x86-64-{level}"):
        pytest.skip(f"this CPU is below x86-64-{level}")
    child = run_child(CHILD, MOK_CPU_LEVEL=level)
    assert (child.stdout.strip(), child.stderr) == (f"x86-64-{level}", "")


def test_unknown_cpu_level_is_refused():
    child = run_child("import mok_jax", MOK_CPU_LEVEL="avx9")
    assert child.stderr.splitlines()[-1].startswith("ValueError: MOK_CPU_LEVEL must be one of ['v")
    assert child.stderr.splitlines()[-1].endswith("on this CPU, got 'avx9'; unset it for the first")


def test_older_jaxlib_is_refused_in_one_sentence(monkeypatch):
    monkeypatch.setattr(jaxlib, "__version__", "0.9.2")
    with pytest.raises(ImportError) as error:
        ops._load()
    assert str(error.value) == (
        f"mok_jax was built for jaxlib {ops._host.JAXLIB_VERSION} or newer, but jaxlib 0.9.2 is installed; "
        "upgrade jax and jaxlib"
    )


@pytest.mark.parametrize("version", ["0.12.0.1", "0.12.0.dev20261101", "1.0.0", "0.11.2"])
def test_newer_jaxlib_is_accepted(version):
    assert ops._version(version) >= (0, 11, 2)


@pytest.mark.parametrize(
    "tokens, message",
    [
        (
            2**27,
            "moe: ranks * tokens * top_k must be less than 2**31, got 1 * 134217728 * 16; "
            "split the tokens over several calls",
        ),
        (
            2**27 - 1,
            "moe: rows padded to the row tile must be less than 2**31, got 2147484544; "
            "split the tokens over several calls, or use a smaller row_tile",
        ),
    ],
    ids=["routes", "padded rows"],
)
def test_more_rows_than_int32_are_refused(tokens, message):
    sizes = dict(hidden=8, intermediate=8, shared_intermediate=0, local_experts=8, ranks=1, top_k=16)
    dims = ops.Dims(tokens=tokens, dtype=np.dtype("float32"), config=mok_jax.MoKConfig(), **sizes)
    with pytest.raises(ValueError) as error:
        dims.check()
    assert str(error.value) == message


# ---- what the handlers refuse: another caller than ops.py, or an export of another version ----

ATTRIBUTES = {
    "ranks": (dict(ranks=0), "ranks must be a multiple of 1 in [1, 2**31), got 0"),
    "virtual_ranks": (dict(virtual_ranks=0), "virtual_ranks must be a multiple of 1 in [1, 2**31), got 0"),
    "odd_virtual_ranks": (
        dict(virtual_ranks=5),
        "tokens and experts must be multiples of virtual_ranks=5, got 48 and 6",
    ),
    "many_ranks": (dict(ranks=2**30), "ranks * routes must be less than 2**31, got 1073741824 * 144"),
    "row_tile": (dict(row_tile=0), "row_tile must be a multiple of 1 in [1, 2**31), got 0"),
    "large_row_tile": (
        dict(row_tile=2**30, minibatch=2**30, macrobatch=2**30),
        "padded rows must be less than 2**31, got 6442450944",
    ),
    "minibatch": (dict(minibatch=12), "minibatch must be a multiple of 8 in [1, 2**31), got 12"),
    "negative_minibatch": (dict(minibatch=-8), "minibatch must be a multiple of 8 in [1, 2**31), got -8"),
    "macrobatch_of_no_tile": (dict(macrobatch=12), "macrobatch must be a multiple of 8 in [1, 2**31), got 12"),
    "another_macrobatch": (
        dict(minibatch=8, macrobatch=8),
        "context gate must have 2400 elements of F64, got 55200 of F64",
    ),
    "timeout": (dict(timeout=-1.0), "timeout must be more than 0 s, got -1.000000"),
}


@pytest.mark.parametrize(("changed", "text"), ATTRIBUTES.values(), ids=ATTRIBUTES)
def test_attributes_that_do_not_fit(case, monkeypatch, changed, text):
    attributes = ops.Dims.attributes
    changed = {name: np.float64(v) if name == "timeout" else np.int64(v) for name, v in changed.items()}
    monkeypatch.setattr(ops.Dims, "attributes", lambda *arguments: attributes(*arguments) | changed)
    with pytest.raises(jax.errors.JaxRuntimeError, match=re.escape(f"INVALID_ARGUMENT: mok_jax: {text}")):
        jax.block_until_ready(forward(case, BASE))


BUFFERS = [
    ("x", lambda a: a.reshape(-1), "x must have 2 axes, got 1"),
    ("x", lambda a: a[:, :0], "experts and hidden must be at least 1, got 6 and 0"),
    ("expert_ids", lambda a: a.astype("int64"), "expert_ids must have 144 elements of S32, got 144 of S64"),
    ("router_weights", lambda a: a[:-1], "router_weights must have 144 elements of F64, got 141 of F64"),
    ("w_gate", lambda a: a[:, :-1], "w_gate must have 43200 elements of F64, got 41400 of F64"),
    ("w_gate", lambda a: a[:0], "experts and hidden must be at least 1, got 0 and 24"),
    ("w_down", lambda a: a.astype("float32"), "w_down must have 43200 elements of F64, got 43200 of F32"),
]


@pytest.mark.parametrize(("name", "change", "text"), BUFFERS, ids=[f"{name}: {text}" for name, _, text in BUFFERS])
def test_buffers_that_do_not_fit(case, name, change, text):
    dims = cases.dims_of(case, BASE)
    wrong = case._replace(**{name: change(getattr(case, name))})
    arguments = (jnp.zeros(2, jnp.int32), *wrong[:3], (*wrong[3:6], *wrong.shared))
    with pytest.raises(jax.errors.JaxRuntimeError, match=re.escape(f"INVALID_ARGUMENT: mok_jax: {text}")):
        jax.block_until_ready(ops.forward(dims, *arguments, context=True))


def test_mxfp8_buffers_that_do_not_fit():
    made = cases.make_case("bf16", **SIZES)
    config = mok_jax.MoKConfig(row_tile=8, precision="mxfp8")
    dims, place, weights = cases.dims_of(made, config), jnp.zeros(2, jnp.int32), (*made[3:6], *made.shared)

    def refused(text, call, *arguments, **options):
        with pytest.raises(jax.errors.JaxRuntimeError, match=re.escape(f"INVALID_ARGUMENT: mok_jax: {text}")):
            jax.block_until_ready(call(dims, place, *arguments, **options))

    refused("x must be bfloat16 for MXFP8", ops.forward, made.x.astype("float32"), *made[1:3], weights, context=True)
    _, residuals, _ = ops.forward(dims, place, *made[:3], weights, context=True)
    refused(
        "w_down for the gradient must have 43200 elements of BF16, got 36000 of BF16",
        ops.backward,
        made.x,
        *made[:3],
        (*weights, *made[3:5], made.w_down[:-1]),
        residuals,
        context=True,
        gradients=15,
        dtypes=["bfloat16"] * 6,
    )


def test_gradients_that_do_not_fit(case):
    _, residuals = forward(case, BASE)
    dims, weights = cases.dims_of(case, BASE), (*case[3:6], *case.shared)
    text = "INVALID_ARGUMENT: mok_jax: d_w_up must have 43200 elements of F64, got 43200 of F32"
    with pytest.raises(jax.errors.JaxRuntimeError, match=text):
        jax.block_until_ready(
            ops.backward(
                dims,
                jnp.zeros(2, jnp.int32),
                case.x,
                *case[:3],
                weights,
                residuals,
                context=True,
                gradients=15,
                dtypes=["float64", "float32", *["float64"] * 4],
            )
        )

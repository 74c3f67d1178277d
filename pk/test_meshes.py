"""Expert parallelism: over any mesh and any placement the results are those of one device."""

import contextlib
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import (
    CPU_IMPLEMENTATIONS,
    KINDS,
    TINY,
    Case,
    assert_near,
    assert_same_bits,
    call,
    compiled,
    cotangent_of,
    gradients_of,
    kinds,
    make_case,
    mesh_of,
    run,
)
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

implementations = pytest.mark.parametrize("implementation", CPU_IMPLEMENTATIONS)

SIZES = dict(tokens=24, hidden=12, intermediate=20, shared=28, experts=8, top_k=3)


def place(case: Case, mesh, placement) -> Case:
    """The case on the mesh: replicated, as the layer wants it, or as FSDP leaves it."""
    others = tuple(axis for axis in mesh.axis_names if axis != "expert")
    specs = {
        "replicated": Case(*[P()] * 6, shared=P()),
        "wanted": Case(*[P(mesh.axis_names)] * 3, *[P("expert")] * 3, shared=P()),
        "fsdp": Case(
            x=P(others, "expert"),
            expert_ids=P(others),
            router_weights=P(),
            w_gate=P("expert", others),
            w_up=P(None, others, "expert"),
            w_down=P(others),
            shared=P(others),
        ),
    }[placement]
    return Case(*(jax.device_put(value, NamedSharding(mesh, spec)) for value, spec in zip(case, specs, strict=True)))


def run_on(mesh, case, implementation, placement="wanted", named=False, ambient=False, **options):
    """`cases.run` with the arguments on the mesh."""
    placed = place(case, mesh, placement)
    cotangent = jax.device_put(cotangent_of(case.x), placed.x.sharding)
    with jax.set_mesh(mesh) if ambient else contextlib.nullcontext():
        return run(placed, implementation, cotangent, **options | (dict(mesh=mesh) if named else {}))


@functools.cache
def on_one_device(routing="duplicates"):
    case = make_case("f64", routing, **SIZES)
    return case, run(case, "reference")


def assert_as_on_one_device(result, expected):
    assert_near(result, expected, 1e-12)
    norms = [np.sqrt(sum((r[name] ** 2).sum() for name in sorted(r) if name != "y")) for r in (result, expected)]
    assert abs(norms[0] - norms[1]) <= 1e-12 * norms[1]


# Every mesh with both kinds of axes; placements and ways to name the mesh are spread, complete on d2_e4.
MATRIX = [
    ("e8", "auto", "wanted", "named"),
    ("e8", "explicit", "replicated", "ambient"),
    ("e2_d4", "auto", "fsdp", "ambient"),
    ("e2_d4", "explicit", "wanted", "arguments"),
    ("d2_e4", "auto", "wanted", "ambient"),
    ("d2_e4", "auto", "replicated", "arguments"),
    ("d2_e4", "auto", "fsdp", "named"),
    ("d2_e4", "explicit", "wanted", "named"),
    ("d2_e4", "explicit", "replicated", "arguments"),
    ("d2_e4", "explicit", "fsdp", "ambient"),
    ("d4_e2", "auto", "replicated", "named"),
    ("d4_e2", "explicit", "fsdp", "arguments"),
    ("e2_d2_m2", "auto", "fsdp", "arguments"),
    ("e2_d2_m2", "explicit", "replicated", "named"),
    ("d2_e2_m2", "auto", "replicated", "ambient"),
    ("d2_e2_m2", "explicit", "wanted", "ambient"),
    ("d2_m2_e2", "auto", "wanted", "named"),
    ("d2_m2_e2", "explicit", "fsdp", "named"),
]


# "reference" has only an all-gather here: every third row.
ROWS = [(i, *row) for i in CPU_IMPLEMENTATIONS for row in (MATRIX[::3] if i == "reference" else MATRIX)]


@pytest.mark.parametrize(
    ("implementation", "name", "kind", "placement", "how"), ROWS, ids=["-".join(row) for row in ROWS]
)
def test_matrix(implementation, name, kind, placement, how):
    case, expected = on_one_device()
    mesh = mesh_of(name, kind)
    result = run_on(mesh, case, implementation, placement, named=how == "named", ambient=how == "ambient", config=TINY)
    assert_as_on_one_device(result, expected)


def all_to_rank_0(ids):
    return ids * 0


def rank_2_sends_nothing(ids):
    return ids.at[6:9].set(-1)


def rank_0_only_receives(ids):
    return (ids * 0).at[:3].set(-1)


def only_rank_7_has_tokens(ids):
    return jnp.full_like(ids, -1).at[21:].set(ids[21:])


def nobody_sends(ids):
    return jnp.full_like(ids, -1)


def ids_out_of_range(ids):
    return ids.at[::2, 0].set(8).at[1::2, 1].set(2**31 - 1).at[::3, 2].set(-(2**31))


@implementations
@pytest.mark.parametrize(
    "change",
    [all_to_rank_0, rank_2_sends_nothing, rank_0_only_receives, only_rank_7_has_tokens, nobody_sends, ids_out_of_range],
)
def test_ids_that_leave_ranks_idle(implementation, change):
    case = make_case("f64", "distinct", **SIZES)
    case = case._replace(expert_ids=change(case.expert_ids))
    result = run_on(mesh_of("e8"), case, implementation, named=True, config=TINY)
    assert_as_on_one_device(result, run(case, "reference"))


@implementations
def test_a_nan_row_stays_in_its_own_row_across_ranks(implementation):
    case = make_case("f64", "distinct", **SIZES)
    case = case._replace(x=case.x.at[5].set(jnp.nan))
    result = run_on(mesh_of("e8"), case, implementation, named=True, config=TINY)
    expected = run(case, "reference")
    jax.tree.map(lambda got, want: np.testing.assert_array_equal(np.isnan(got), np.isnan(want)), result, expected)
    assert_near(jax.tree.map(np.nan_to_num, result), jax.tree.map(np.nan_to_num, expected), 1e-12)


@implementations
def test_tokens_split_over_some_axes_only(implementation):
    # 24 tokens go over 4 ranks; over data the work is replicated, and counted once.
    case, expected = on_one_device()
    result = run_on(mesh_of("d2_e4"), case, implementation, "replicated", named=True, token_axes=("expert",))
    assert_as_on_one_device(result, expected)


def test_the_order_of_token_axes_means_nothing():
    case, _ = on_one_device()
    mesh = mesh_of("d2_e4")
    assert_same_bits(
        run_on(mesh, case, "xla", named=True, token_axes=("expert", "data")),
        run_on(mesh, case, "xla", named=True, token_axes=("data", "expert")),
    )


@implementations
def test_an_expert_axis_of_another_name(implementation):
    case, expected = on_one_device()
    mesh = jax.make_mesh((4, 2), ("ep", "expert"), axis_types=(AxisType.Auto,) * 2)
    assert_as_on_one_device(run(case, implementation, mesh=mesh, expert_axis="ep", config=TINY), expected)


@implementations
@kinds
def test_a_mesh_without_an_expert_axis_has_one_rank(implementation, kind):
    case, expected = on_one_device()
    mesh = jax.make_mesh((8,), ("data",), axis_types=(KINDS[kind],))
    result = run(jax.device_put(case, NamedSharding(mesh, P())), implementation, mesh=mesh, config=TINY)
    assert_as_on_one_device(result, expected)


@pytest.mark.parametrize("name", ["d2_e4", "e8"])
def test_without_a_shared_expert(name):
    """Its weights are then of size 0, over which XLA of jax 0.11.2 stumbles."""
    case = make_case("f64", **SIZES | dict(shared=0))
    result = run_on(mesh_of(name), case, "host", config=TINY)
    assert_as_on_one_device(result, run(case, "host", config=TINY))


@kinds
def test_y_is_sharded_as_x_is(kind):
    case, _ = on_one_device()
    mesh = mesh_of("d2_e4", kind)
    placed = place(case, mesh, "wanted")
    y = jax.jit(call, static_argnums=1)(placed, "xla")
    assert y.sharding.is_equivalent_to(placed.x.sharding, 2)


@kinds
@pytest.mark.parametrize(
    ("implementation", "gathers"),
    [("host", False), ("xla", False), ("reference", True)],
    ids=["host", "xla", "reference"],
)
def test_nothing_is_gathered_behind_the_scenes(implementation, gathers, kind):
    case, _ = on_one_device()
    placed = place(case, mesh_of("d2_e4", kind), "wanted")
    cotangent = jax.device_put(cotangent_of(case.x), placed.x.sharding)
    text = compiled.lower(placed, cotangent, implementation, (("config", TINY),)).compile().as_text()
    assert ("all-gather" in text) == gathers
    # Weight gradients are summed over data, where they are needed: one device's share has 8 / 4 experts.
    assert gathers or not re.search(r"f64\[8,\d+,\d+\]", text)


@pytest.mark.parametrize("implementation", ["xla", "host"])
def test_float32_weights_under_bfloat16(implementation):
    case = make_case("bf16-f32", "duplicates", **SIZES)
    result = run_on(mesh_of("d2_e4"), case, implementation, named=True, config=TINY)
    assert result["d_w_gate"].dtype == np.float32
    assert_near(result, run(case, "reference"), 2e-2)


@implementations
def test_the_same_inputs_give_the_same_bits_across_ranks(implementation):
    case, _ = on_one_device()
    assert_same_bits(*[run_on(mesh_of("e8"), case, implementation, named=True, config=TINY) for _ in range(2)])


# ---- inside the caller's own shard_map ----


def run_inside(mesh, manual, case, implementation, specs, check_vma=True):
    """y and gradients, the caller's shard_map being manual over `manual`."""
    layer = jax.shard_map(
        lambda *arrays: call(Case(*arrays), implementation, config=TINY),
        mesh=mesh,
        in_specs=tuple(specs),
        out_specs=specs.x,
        axis_names=set(manual),
        check_vma=check_vma,
    )
    tokens = NamedSharding(mesh, P((*manual, *(axis for axis in mesh.axis_names if axis not in manual))))
    of_tokens = {name: jax.device_put(getattr(case, name), tokens) for name in Case._fields[:3]}
    placed = place(case, mesh, "wanted")._replace(**of_tokens)
    results = jax.jit(functools.partial(gradients_of, lambda case: layer(*case)))
    return jax.device_get(results(placed, jax.device_put(cotangent_of(case.x), tokens)))


def specs_of(tokens, experts):
    return Case(*[P(tokens)] * 3, *[P(experts)] * 3, shared=P())


@implementations
@pytest.mark.parametrize("check_vma", [True, False], ids=["vma", "no_vma"])
def test_inside_a_fully_manual_shard_map(implementation, check_vma):
    case, expected = on_one_device()
    mesh = mesh_of("d2_e4")
    result = run_inside(mesh, mesh.axis_names, case, implementation, specs_of(("data", "expert"), "expert"), check_vma)
    assert_as_on_one_device(result, expected)


@implementations
@pytest.mark.parametrize(
    ("name", "kind", "manual", "experts", "check_vma"),
    [
        ("d2_e4", "auto", ("data",), None, True),
        ("d2_e4", "explicit", ("data",), None, True),
        ("d2_e4", "auto", ("expert",), "expert", True),
        ("d2_e4", "auto", ("expert",), "expert", False),
        ("d2_e4", "explicit", ("expert",), "expert", True),
        ("d2_e2_m2", "auto", ("expert", "model"), "expert", True),
    ],
    ids=["data", "data_explicit", "expert", "expert_no_vma", "expert_explicit", "expert_model"],
)
def test_inside_a_partly_manual_shard_map(implementation, name, kind, manual, experts, check_vma):
    case, expected = on_one_device()
    result = run_inside(mesh_of(name, kind), manual, case, implementation, specs_of(manual, experts), check_vma)
    assert_as_on_one_device(result, expected)


@implementations
def test_replicated_tokens_inside_a_shard_map(implementation):
    # Manual over data too, but x is the same there: the work is replicated, the gradient counted once.
    case, expected = on_one_device()
    mesh = mesh_of("d2_e4")
    result = run_inside(mesh, mesh.axis_names, case, implementation, specs_of("expert", "expert"))
    assert_as_on_one_device(result, expected)

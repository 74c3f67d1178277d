"""Every refusal of moe() by its full text: who, argument, requirement, found, remedy."""

import re

import jax
import jax.numpy as jnp
import pytest
from cases import call, make_case
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, Mesh, PartitionSpec

import mok_jax
from mok_jax import MoKConfig

SIZES = dict(tokens=8, hidden=6, intermediate=10, experts=4, top_k=2, shared=14)
CASE = make_case("f32", **SIZES)


def zeros(dtype, *shape):
    return jnp.zeros(shape, dtype)


def mesh(*shape, names=("data", "expert")):
    return jax.make_mesh(shape, names, axis_types=(AxisType.Auto,) * len(shape))


def refuse(error, text, case=CASE, implementation="xla", **options):
    with pytest.raises(error) as caught:
        call(case, implementation, **options)
    assert str(caught.value) == text


# (argument, wrong value, error, message after "moe: ")
ARGUMENTS = {
    "x_float16": (
        "x",
        zeros("float16", 8, 6),
        TypeError,
        "x must be float32, float64 or bfloat16 [tokens, hidden], got float16[8, 6]; cast x",
    ),
    "x_int32": (
        "x",
        zeros("int32", 8, 6),
        TypeError,
        "x must be float32, float64 or bfloat16 [tokens, hidden], got int32[8, 6]; cast x",
    ),
    "x_list": ("x", [1.0, 2.0], TypeError, "x must be an array, got list [1.0, 2.0]"),
    "x_none": ("x", None, TypeError, "x must be an array, got NoneType None"),
    "x_rank_3": (
        "x",
        zeros("float32", 2, 4, 6),
        ValueError,
        "x must be float32[tokens, hidden], got float32[2, 4, 6]; it has 3 axes, not 2",
    ),
    "x_hidden_0": (
        "x",
        zeros("float32", 8, 0),
        ValueError,
        "x must be float32[tokens, hidden], got float32[8, 0]; its hidden must be at least 1",
    ),
    "ids_int64": (
        "expert_ids",
        zeros("int64", 8, 2),
        TypeError,
        "expert_ids must be int32[tokens=8, top_k], got int64[8, 2]; cast it to int32",
    ),
    "ids_float": (
        "expert_ids",
        zeros("float32", 8, 2),
        TypeError,
        "expert_ids must be int32[tokens=8, top_k], got float32[8, 2]; cast it to int32",
    ),
    "ids_rank_1": (
        "expert_ids",
        zeros("int32", 8),
        ValueError,
        "expert_ids must be int32[tokens=8, top_k], got int32[8]; it has 1 axes, not 2",
    ),
    "ids_tokens": (
        "expert_ids",
        zeros("int32", 7, 2),
        ValueError,
        "expert_ids must be int32[tokens=8, top_k], got int32[7, 2]; its tokens differs",
    ),
    "ids_top_k_0": (
        "expert_ids",
        zeros("int32", 8, 0),
        ValueError,
        "expert_ids must be int32[tokens=8, top_k], got int32[8, 0]; its top_k must be at least 1",
    ),
    "router_weights_dtype": (
        "router_weights",
        zeros("bfloat16", 8, 2),
        TypeError,
        "router_weights must be float32[tokens=8, top_k=2], got bfloat16[8, 2]; cast it to float32",
    ),
    "router_weights_rank": (
        "router_weights",
        zeros("float32", 8, 2, 1),
        ValueError,
        "router_weights must be float32[tokens=8, top_k=2], got float32[8, 2, 1]; it has 3 axes, not 2",
    ),
    "router_weights_tokens": (
        "router_weights",
        zeros("float32", 9, 2),
        ValueError,
        "router_weights must be float32[tokens=8, top_k=2], got float32[9, 2]; its tokens differs",
    ),
    "router_weights_top_k": (
        "router_weights",
        zeros("float32", 8, 3),
        ValueError,
        "router_weights must be float32[tokens=8, top_k=2], got float32[8, 3]; its top_k differs",
    ),
    "w_gate_dtype": (
        "w_gate",
        zeros("bfloat16", 4, 6, 10),
        TypeError,
        "w_gate must be float32[experts, hidden=6, intermediate], got bfloat16[4, 6, 10]; cast it to float32",
    ),
    "w_gate_rank": (
        "w_gate",
        zeros("float32", 6, 10),
        ValueError,
        "w_gate must be float32[experts, hidden=6, intermediate], got float32[6, 10]; it has 2 axes, not 3",
    ),
    "w_gate_hidden": (
        "w_gate",
        zeros("float32", 4, 5, 10),
        ValueError,
        "w_gate must be float32[experts, hidden=6, intermediate], got float32[4, 5, 10]; its hidden differs",
    ),
    "w_gate_experts_0": (
        "w_gate",
        zeros("float32", 0, 6, 10),
        ValueError,
        "w_gate must be float32[experts, hidden=6, intermediate], got float32[0, 6, 10]; its experts must be at least 1",
    ),
    "w_gate_width_0": (
        "w_gate",
        zeros("float32", 4, 6, 0),
        ValueError,
        "w_gate must be float32[experts, hidden=6, intermediate], got float32[4, 6, 0]; its intermediate must be at least 1",
    ),
    "w_up_dtype": (
        "w_up",
        zeros("float64", 4, 6, 10),
        TypeError,
        "w_up must be float32[experts=4, hidden=6, intermediate=10], got float64[4, 6, 10]; cast it to float32",
    ),
    "w_up_experts": (
        "w_up",
        zeros("float32", 3, 6, 10),
        ValueError,
        "w_up must be float32[experts=4, hidden=6, intermediate=10], got float32[3, 6, 10]; its experts differs",
    ),
    "w_up_width": (
        "w_up",
        zeros("float32", 4, 6, 9),
        ValueError,
        "w_up must be float32[experts=4, hidden=6, intermediate=10], got float32[4, 6, 9]; its intermediate differs",
    ),
    "w_down_transposed": (
        "w_down",
        zeros("float32", 4, 6, 10),
        ValueError,
        "w_down must be float32[experts=4, intermediate=10, hidden=6], got float32[4, 6, 10]; its intermediate differs",
    ),
    "w_down_hidden": (
        "w_down",
        zeros("float32", 4, 10, 7),
        ValueError,
        "w_down must be float32[experts=4, intermediate=10, hidden=6], got float32[4, 10, 7]; its hidden differs",
    ),
}


@pytest.mark.parametrize(("name", "value", "error", "text"), ARGUMENTS.values(), ids=ARGUMENTS)
def test_arguments(name, value, error, text):
    refuse(error, f"moe: {text}", CASE._replace(**{name: value}))


# (index in shared, wrong value, error, message after "moe: shared ")
SHARED = {
    "gate_dtype": (0, zeros("int32", 6, 14), TypeError, "w_gate must be float32[hidden=6, intermediate], got int32[6, 14]; cast it to float32"),
    "gate_rank": (0, zeros("float32", 1, 6, 14), ValueError, "w_gate must be float32[hidden=6, intermediate], got float32[1, 6, 14]; it has 3 axes, not 2"),
    "gate_hidden": (0, zeros("float32", 7, 14), ValueError, "w_gate must be float32[hidden=6, intermediate], got float32[7, 14]; its hidden differs"),
    "up_width": (1, zeros("float32", 6, 10), ValueError, "w_up must be float32[hidden=6, intermediate=14], got float32[6, 10]; its intermediate differs"),
    "down_transposed": (2, zeros("float32", 6, 14), ValueError, "w_down must be float32[intermediate=14, hidden=6], got float32[6, 14]; its intermediate differs"),
    "down_none": (2, None, TypeError, "w_down must be an array, got NoneType None"),
}  # fmt: skip


@pytest.mark.parametrize(("index", "value", "error", "text"), SHARED.values(), ids=SHARED)
def test_shared(index, value, error, text):
    shared = [value if i == index else weight for i, weight in enumerate(CASE.shared)]
    refuse(error, f"moe: shared {text}", CASE._replace(shared=tuple(shared)))


@pytest.mark.parametrize(
    ("shared", "found"),
    [(zeros("float32", 6, 14), "float32[6, 14]"), ((1, 2), "tuple (1, 2)"), ("no", "str 'no'")],
    ids=["array", "pair", "text"],
)
def test_shared_is_no_triple(shared, found):
    refuse(TypeError, f"moe: shared must be a tuple (w_gate, w_up, w_down) or None, got {found}", CASE._replace(shared=shared))


def test_float64_x_wants_float64_router_weights():
    case = make_case("f64", **SIZES)
    case = case._replace(router_weights=case.router_weights.astype("float32"))
    refuse(TypeError, "moe: router_weights must be float64[tokens=8, top_k=2], got float32[8, 2]; cast it to float64", case)


def test_bfloat16_x_takes_two_kinds_of_weights():
    case = make_case("bf16", **SIZES)
    case = case._replace(w_up=case.w_up.astype("float64"))
    text = "moe: w_up must be bfloat16 or float32[experts=4, hidden=6, intermediate=10], got float64[4, 6, 10]; cast it to bfloat16"
    refuse(TypeError, text, case)


# (options of moe(), error, message after "moe: "); the mesh is made in the test.
OPTIONS = {
    "config": (dict(config={"row_tile": 8}), TypeError, "config must be a MoKConfig, got dict {'row_tile': 8}"),
    "expert_axis": (dict(expert_axis=("expert",)), TypeError, "expert_axis must be the name of a mesh axis, got tuple ('expert',)"),
    "mesh": (dict(mesh="all"), TypeError, "mesh must be a jax.sharding.Mesh or None, got str 'all'"),
    "token_axes_without_mesh": (dict(token_axes=("data",)), ValueError, "token_axes must name axes of the mesh (), got 'data'"),
    "token_axes": (
        dict(mesh=(2, 2), token_axes=("dat", "expert")),
        ValueError,
        "token_axes must name axes of the mesh ('data', 'expert'), got 'dat'",
    ),
    "token_axes_without_expert": (
        dict(mesh=(2, 2), token_axes=("data",)),
        ValueError,
        "token_axes must contain the expert axis 'expert', got ('data',); "
        "add it: the layer splits tokens over it whatever sharding x has",
    ),
    "token_axes_text": (
        dict(mesh=(2, 2), token_axes="data"),
        ValueError,
        "token_axes must contain the expert axis 'expert', got ('data',); "
        "add it: the layer splits tokens over it whatever sharding x has",
    ),
    "experts": (
        dict(mesh=(1, 8)),
        ValueError,
        "experts must be divisible by the expert axis 'expert' of size 8, "
        "got w_gate float32[4, 6, 10]; change the mesh or the number of experts",
    ),
    "virtual_ranks_and_real_ones": (
        dict(mesh=(2, 2), config=MoKConfig(virtual_ranks=2)),
        ValueError,
        "virtual_ranks must be 1 where the expert axis has 2 ranks, got 2; virtual ranks split one device",
    ),
    "virtual_ranks_experts": (
        dict(config=MoKConfig(virtual_ranks=8)),
        ValueError,
        "tokens and experts must be divisible by virtual_ranks=8, got 8 tokens and 4 experts on a device",
    ),
    "virtual_ranks_tokens": (
        dict(mesh=(8, 1), config=MoKConfig(virtual_ranks=4)),
        ValueError,
        "tokens and experts must be divisible by virtual_ranks=4, got 1 tokens and 4 experts on a device",
    ),
}


@pytest.mark.parametrize(("options", "error", "text"), OPTIONS.values(), ids=OPTIONS)
def test_options(options, error, text):
    if isinstance(options.get("mesh"), tuple):
        options = options | dict(mesh=mesh(*options["mesh"]))
    refuse(error, f"moe: {text}", **options)


def test_tokens_that_do_not_divide():
    text = (
        "moe: tokens must be divisible by the mesh axes ('data', 'expert') of size 4, got x float32[6, 6]; "
        "pad x with rows whose ids are -1, or name fewer token_axes"
    )
    refuse(ValueError, text, make_case("f32", **SIZES | dict(tokens=6)), mesh=mesh(2, 2))


def test_another_mesh_than_the_ambient_one():
    text = (
        "moe: mesh must be the ambient one, got {'data': 2, 'expert': 2} under jax.set_mesh of {'data': 4, 'expert': 2}; "
        "leave mesh out or call outside that context"
    )
    with jax.set_mesh(mesh(4, 2)):
        refuse(ValueError, text, mesh=mesh(2, 2))


def test_checks_come_at_trace_time_too():
    with pytest.raises(ValueError, match=re.escape("got float32[8, 3]; its top_k differs")):
        jax.eval_shape(lambda case: call(case, "xla"), CASE._replace(router_weights=zeros("float32", 8, 3)))


# ---- the choice of the implementation ----

NAMES = "('host', 'xla', 'reference')"


@pytest.mark.parametrize(
    ("name", "error", "found"), [("cuda", ValueError, "'cuda'"), ("", ValueError, "''"), (3, TypeError, "int 3")]
)
def test_unknown_implementation(name, error, found):
    refuse(error, f"moe: implementation must be one of {NAMES} or None, got {found}", implementation=name)


@pytest.mark.parametrize(
    ("platform", "processes", "reason"),
    [
        ("gpu", 1, "it needs CPU devices, these are gpu"),
        ("cpu", 2, "it needs all devices in one process, these are in 2"),
    ],
    ids=["gpu", "processes"],
)
def test_host_where_it_cannot_run(monkeypatch, platform, processes, reason):
    monkeypatch.setattr(mok_jax.moe.__globals__["_platform"].__module__ + "._platform", lambda mesh: (platform, processes))
    text = f'moe: implementation "host" cannot run here: {reason}; use None or "xla"'
    refuse(ValueError, text, implementation="host")
    assert mok_jax.choose_implementation() == "xla"


def test_an_abstract_mesh_of_gpus():
    gpus = AbstractMesh((2,), ("expert",), abstract_device=AbstractDevice("H200", None, "gpu"))
    assert mok_jax.choose_implementation(None, gpus) == "xla"
    with pytest.raises(ValueError, match="it needs CPU devices, these are gpu"):
        mok_jax.choose_implementation("host", gpus)


class FakeDevice:
    """What a Mesh and the choice look at."""

    def __init__(self, platform, process_index):
        self.platform, self.process_index = platform, process_index


def test_a_mesh_of_two_processes():
    devices = [FakeDevice("cpu", 0), FakeDevice("cpu", 1)]
    assert mok_jax.choose_implementation(None, Mesh(devices, ("expert",))) == "xla"
    with pytest.raises(ValueError, match="it needs all devices in one process, these are in 2"):
        mok_jax.choose_implementation("host", Mesh(devices, ("expert",)))


def test_the_default_device_decides_without_a_mesh(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert mok_jax.choose_implementation() == "xla"
    with jax.default_device(jax.devices("cpu")[0]):
        assert mok_jax.choose_implementation() == "host"


def test_a_spec_is_no_mesh():
    refuse(TypeError, "moe: mesh must be a jax.sharding.Mesh or None, got PartitionSpec PartitionSpec('expert',)", mesh=PartitionSpec("expert"))

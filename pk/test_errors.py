"""Every refusal of moe() by its full text: who, argument, requirement, found, remedy."""

import importlib
import re
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import GPU, call, make_case, refuse
from flax import nnx
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, Mesh

import mok_jax
from mok_jax import MoKConfig, distributed, ops

SIZES = dict(tokens=8, hidden=6, intermediate=10, experts=4, top_k=2, shared=14)
CASE = make_case("f32", **SIZES)
WEIGHTS = ("w_gate", "w_up", "w_down")


def mesh(*shape, names=("data", "expert")):
    return jax.make_mesh(shape, names, axis_types=(AxisType.Auto,) * len(shape))


def refuse_call(error, text, case=CASE, implementation="xla", **options):
    refuse(error, text, call, case, implementation, **options)


REQUIRED = {
    "x": "x must be float32[tokens, hidden]",
    "expert_ids": "expert_ids must be int32[tokens=8, top_k]",
    "router_weights": "router_weights must be float32[tokens=8, top_k=2]",
    "w_gate": "w_gate must be float32[experts, hidden=6, intermediate]",
    "w_up": "w_up must be float32[experts=4, hidden=6, intermediate=10]",
    "w_down": "w_down must be float32[experts=4, intermediate=10, hidden=6]",
    "shared w_gate": "shared w_gate must be float32[hidden=6, intermediate]",
    "shared w_up": "shared w_up must be float32[hidden=6, intermediate=14]",
    "shared w_down": "shared w_down must be float32[intermediate=14, hidden=6]",
}

SWAP = ", so swap its last two axes: .swapaxes(-1, -2)"

# (argument, dtype and shape given, error, remedy)
WRONG = [
    ("x", "float32", (2, 4, 6), ValueError, "reshape it to 2 axes"),
    ("x", "float32", (8, 0), ValueError, "its hidden must be at least 1"),
    ("expert_ids", "int64", (8, 2), TypeError, "cast it to int32"),
    ("expert_ids", "float32", (8, 2), TypeError, "cast it to int32"),
    ("expert_ids", "int32", (8,), ValueError, "reshape it to 2 axes"),
    ("expert_ids", "int32", (7, 2), ValueError, "its tokens must be 8 as in x"),
    ("expert_ids", "int32", (8, 0), ValueError, "its top_k must be at least 1"),
    ("router_weights", "bfloat16", (8, 2), TypeError, "cast it to float32"),
    ("router_weights", "float64", (8, 2), TypeError, "cast it to float32"),
    ("router_weights", "float32", (8, 2, 1), ValueError, "reshape it to 2 axes"),
    ("router_weights", "float32", (9, 2), ValueError, "its tokens must be 8 as in x"),
    ("router_weights", "float32", (8, 3), ValueError, "its top_k must be 2 as in expert_ids"),
    ("w_gate", "bfloat16", (4, 6, 10), TypeError, "cast it to float32"),
    ("w_gate", "float32", (6, 10), ValueError, "reshape it to 3 axes"),
    ("w_gate", "float32", (4, 5, 10), ValueError, "its hidden must be 6 as in x"),
    ("w_gate", "float32", (4, 10, 6), ValueError, "its hidden must be 6 as in x" + SWAP),
    ("w_gate", "float32", (0, 6, 10), ValueError, "its experts must be at least 1"),
    ("w_gate", "float32", (4, 6, 0), ValueError, "its intermediate must be at least 1"),
    ("w_up", "float64", (4, 6, 10), TypeError, "cast it to float32"),
    ("w_up", "float32", (3, 6, 10), ValueError, "its experts must be 4 as in w_gate"),
    ("w_up", "float32", (4, 6, 9), ValueError, "its intermediate must be 10 as in w_gate"),
    ("w_down", "int32", (4, 10, 6), TypeError, "cast it to float32"),
    ("w_down", "float32", (4, 6, 10), ValueError, "its intermediate must be 10 as in w_gate" + SWAP),
    ("w_down", "float32", (4, 10, 7), ValueError, "its hidden must be 6 as in x"),
    ("shared w_gate", "int32", (6, 14), TypeError, "cast it to float32"),
    ("shared w_gate", "float32", (1, 6, 14), ValueError, "reshape it to 2 axes"),
    ("shared w_gate", "float32", (7, 14), ValueError, "its hidden must be 6 as in x"),
    ("shared w_up", "float32", (6, 10), ValueError, "its intermediate must be 14 as in shared w_gate"),
    ("shared w_down", "bfloat16", (14, 6), TypeError, "cast it to float32"),
    ("shared w_down", "float32", (6, 14), ValueError, "its intermediate must be 14 as in shared w_gate" + SWAP),
]


def replaced(name, value):
    """CASE with one argument changed, the shared ones too."""
    shared = [value if name == f"shared {weight}" else old for weight, old in zip(WEIGHTS, CASE.shared, strict=True)]
    return CASE._replace(shared=tuple(shared)) if name.startswith("shared") else CASE._replace(**{name: value})


@pytest.mark.parametrize(
    ("name", "dtype", "shape", "error", "remedy"), WRONG, ids=[f"{row[0]}-{row[1]}{list(row[2])}" for row in WRONG]
)
def test_arguments(name, dtype, shape, error, remedy):
    text = f"moe: {REQUIRED[name]}, got {dtype}{list(shape)}; {remedy}"
    refuse_call(error, text, replaced(name, jnp.zeros(shape, dtype)))


@pytest.mark.parametrize("dtype", ["float16", "int32", "bool"])
def test_dtype_of_x(dtype):
    text = f"moe: x must be float32, float64 or bfloat16 [tokens, hidden], got {dtype}[8, 6]; cast x"
    refuse_call(TypeError, text, replaced("x", jnp.zeros((8, 6), dtype)))


@pytest.mark.parametrize("name", REQUIRED)
@pytest.mark.parametrize(("value", "found"), [([1.0], "list [1.0]"), (None, "NoneType None")], ids=["list", "none"])
def test_no_array(name, value, found):
    refuse_call(TypeError, f"moe: {name} must be an array, got {found}; use jnp.asarray", replaced(name, value))


@pytest.mark.parametrize(
    ("shared", "found"),
    [(jnp.zeros((6, 14), "float32"), "float32[6, 14]"), ((1, 2), "2 of them"), ("no", "str 'no'")],
    ids=["array", "pair", "text"],
)
def test_shared_is_no_triple(shared, found):
    refuse_call(
        TypeError,
        f"moe: shared must be a tuple (w_gate, w_up, w_down) or None, got {found}",
        CASE._replace(shared=shared),
    )


def test_float64_x_wants_float64_router_weights():
    case = make_case("f64", **SIZES)
    case = case._replace(router_weights=case.router_weights.astype("float32"))
    refuse_call(
        TypeError, "moe: router_weights must be float64[tokens=8, top_k=2], got float32[8, 2]; cast it to float64", case
    )


def test_bfloat16_x_takes_two_kinds_of_weights():
    case = make_case("bf16", **SIZES)
    case = case._replace(w_up=case.w_up.astype("float64"))
    text = (
        "moe: w_up must be bfloat16 or float32[experts=4, hidden=6, intermediate=10], got float64[4, 6, 10]; "
        "cast it to bfloat16"
    )
    refuse_call(TypeError, text, case)


# (options of moe(), error, message after "moe: "); the mesh is made in the test.
OPTIONS = {
    "config": (
        dict(config={"row_tile": 8}),
        TypeError,
        "config must be a MoKConfig, got dict {'row_tile': 8}; use mok_jax.MoKConfig(...)",
    ),
    "expert_axis": (
        dict(expert_axis=("expert",)),
        TypeError,
        "expert_axis must be the name of a mesh axis, got tuple ('expert',)",
    ),
    "mesh": (dict(mesh="all"), TypeError, "mesh must be a jax.sharding.Mesh or None, got str 'all'"),
    "token_axes_type": (
        dict(mesh=(2, 2), token_axes=["data", 3]),
        TypeError,
        "token_axes must be names of mesh axes or None, got list ['data', 3]",
    ),
    "token_axes_without_mesh": (
        dict(token_axes=("data",)),
        ValueError,
        "token_axes must name axes of the mesh (), got 'data'",
    ),
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
    refuse_call(error, f"moe: {text}", **options)


def test_tokens_that_do_not_divide():
    text = (
        "moe: tokens must be divisible by the mesh axes ('data', 'expert') of size 4, got 6 in x float32[6, 6]; "
        "pad x with rows whose ids are -1, or name fewer token_axes"
    )
    refuse_call(ValueError, text, make_case("f32", **SIZES | dict(tokens=6)), mesh=mesh(2, 2))


def test_another_mesh_than_the_ambient_one():
    text = (
        "moe: mesh must be the ambient one, got {'data': 2, 'expert': 2} under jax.set_mesh of "
        "{'data': 4, 'expert': 2}; leave mesh out or call outside that context"
    )
    with jax.set_mesh(mesh(4, 2)):
        refuse_call(ValueError, text, mesh=mesh(2, 2))


def test_checks_come_at_trace_time_too():
    with pytest.raises(ValueError, match=re.escape("got float32[8, 3]; its top_k must be 2 as in expert_ids")):
        jax.eval_shape(lambda case: call(case, "xla"), CASE._replace(router_weights=jnp.zeros((8, 3), "float32")))


# ---- what only "host" refuses ----


@pytest.mark.parametrize("name", ["minibatch", "macrobatch"])
def test_sizes_that_do_not_fit_the_row_tile_of_host(name):
    text = f"MoKConfig: {name} must be a multiple of the row tile, got {name}=200 and the row tile=128; use {name}=256"
    refuse_call(ValueError, text, implementation="host", config=MoKConfig(**{name: 200}))


def test_more_rows_than_int32_holds():
    many = jax.tree.map(lambda a: jax.ShapeDtypeStruct((2**30, *a.shape[1:]), a.dtype), CASE[:3])
    text = (
        "moe: ranks * tokens * top_k must be less than 2**31, got 1 * 1073741824 * 2; "
        "split the tokens over several calls"
    )
    refuse(ValueError, text, jax.eval_shape, lambda case: call(case, "host"), type(CASE)(*many, *CASE[3:]))


def test_a_bad_timeout_variable(monkeypatch):
    monkeypatch.setenv("MOK_TIMEOUT", "soon")
    refuse_call(
        ValueError, "MOK_TIMEOUT must be a number of seconds > 0, got 'soon'; unset it for 20", implementation="host"
    )


# ---- what only "cuda" refuses; planned here as for an H200, by the host's module ----


@pytest.fixture
def gpu(monkeypatch):
    """Makes the checks see one GPU, of which the test may change what it will."""
    module, host = importlib.import_module("mok_jax.moe"), ops._host
    planning = types.SimpleNamespace(
        ROW_TILE=128, MAX_RANKS=72, Dims=host.Dims, Pass=host.Pass, workspace_bytes=host.workspace_bytes
    )
    gpu = types.SimpleNamespace(capability=(9, 0), memory=None, reach="")
    planning.reach = lambda device, peer: gpu.reach
    monkeypatch.setattr(module, "_platform", lambda mesh: ("gpu", 1))
    monkeypatch.setattr(module, "_gpu", lambda mesh: ops.Gpu(gpu.capability, gpu.memory))
    monkeypatch.setattr(ops, "cuda", lambda: planning)
    return gpu


def refuse_cuda(error, text, case=CASE, **options):
    refuse(error, text, jax.eval_shape, lambda case: call(case, "cuda", **options), case)


def test_cuda_is_the_best_on_a_gpu(gpu):
    assert mok_jax.choose_implementation() == "cuda"


def test_cuda_has_no_float64(gpu):
    text = 'moe: x must be float32 or bfloat16 for implementation "cuda", got float64; cast x or use "xla"'
    refuse_cuda(TypeError, text, make_case("f64", **SIZES))
    assert mok_jax.choose_implementation(dtype=jnp.dtype("float64")) == "xla"


def test_cuda_has_one_row_tile(gpu):
    text = 'moe: row_tile must be 128 or None for implementation "cuda", got 64; leave it out'
    refuse_cuda(ValueError, text, config=MoKConfig(row_tile=64))


def test_virtual_ranks_of_cuda(gpu):
    case = make_case("f32", **SIZES | dict(tokens=73, experts=73))
    text = 'moe: virtual_ranks must be at most 72 for implementation "cuda", got 73'
    refuse_cuda(ValueError, text, case, config=MoKConfig(virtual_ranks=73))


def test_cuda_over_several_gpus(gpu):
    gpu.reach = "device 0 cannot access device 3"
    text = f'moe: implementation "cuda" cannot run here: {gpu.reach}; use None or "xla"'
    refuse_cuda(ValueError, text, mesh=mesh(2, 4))
    assert mok_jax.choose_implementation(None, mesh(2, 4), 4) == "xla"
    gpu.reach = ""
    assert mok_jax.choose_implementation(None, mesh(2, 4), 4) == "cuda"


@pytest.mark.parametrize(("dtype", "axis", "more"), [("f32", "expert", ""), ("bf16", "e", ", expert_axis='e'")])
def test_cuda_with_arenas_that_are_too_small(gpu, monkeypatch, dtype, axis, more):
    case = make_case(dtype, **SIZES | dict(tokens=64, experts=8))
    over = jax.make_mesh((4,), (axis,))
    small = distributed.Table(5, "key", "ipc", over.shape_tuple, axis, (0, 1, 2, 3), 1000)
    monkeypatch.setattr(distributed, "_tables", [small])
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    hidden, top_k = case.x.shape[1], case.expert_ids.shape[1]
    ops.cuda().arena_bytes = lambda plan, element_bytes: 10000 * element_bytes
    wanted = 10000 * case.x.dtype.itemsize
    text = (
        f'moe: implementation "cuda" needs arenas of {wanted} bytes for the 4 ranks of this mesh; call '
        f"mok_jax.distributed.initialize(mesh, tokens=16, hidden={hidden}, top_k={top_k}, "
        f"dtype={case.x.dtype.name!r}{more}) on every process first"
    )
    refuse_cuda(ValueError, text, case, mesh=over, expert_axis=axis)


def test_cuda_over_several_gpus_of_an_abstract_mesh(gpu):
    text = (
        'moe: implementation "cuda" cannot run here: its 4 ranks have no peer buffers, and the mesh is abstract here; '
        'call mok_jax.distributed.initialize(mesh, ...) on every process first; use None or "xla"'
    )
    refuse_cuda(ValueError, text, mesh=mesh(2, 4).abstract_mesh)
    assert mok_jax.choose_implementation(ranks=4) == "xla"


def test_an_older_gpu(gpu):
    gpu.capability = (7, 5)
    text = (
        'moe: implementation "cuda" cannot run here: it needs compute capability 8.0 or later, this is 7.5; '
        'use None or "xla"'
    )
    refuse_cuda(ValueError, text)


# name: (tokens, hidden, intermediate, macrobatch, message after "moe: ")
BEYOND_32_BITS = {
    "rows": (
        2**30,
        8,
        8,
        None,
        'padded rows + macrobatch must be less than 2**31 for implementation "cuda", '
        "got 1073742208 + 1073742208; use a smaller macrobatch, or split the tokens over several calls",
    ),
    "tasks": (
        2**30,
        4096,
        4096,
        128,
        'tiles of a backward pass must be less than 2147418112 for implementation "cuda", got 4848618672; '
        "use a larger macrobatch than 128, or split the tokens over several calls",
    ),
}


@pytest.mark.parametrize(
    ("tokens", "hidden", "intermediate", "macrobatch", "text"), BEYOND_32_BITS.values(), ids=BEYOND_32_BITS
)
def test_cuda_counts_in_32_bits(gpu, tokens, hidden, intermediate, macrobatch, text):
    sizes = dict(local_experts=4, shared_intermediate=8, ranks=1, top_k=1, dtype=jnp.dtype("bfloat16"))
    sizes |= dict(tokens=tokens, hidden=hidden, intermediate=intermediate)
    config = MoKConfig(minibatch=macrobatch, macrobatch=macrobatch)
    ops.Dims(**sizes, config=config).check()  # "host" counts in 64 bits
    dims = ops.Dims(**sizes, config=config, implementation="cuda", gpu=ops.Gpu((9, 0), None))
    refuse(ValueError, f"moe: {text}", dims.check)


def test_scratch_that_does_not_fit(gpu):
    gpu.memory = 2**20
    case = make_case("f32", **SIZES | dict(tokens=2**16, hidden=64))
    with pytest.raises(ValueError) as caught:
        jax.eval_shape(lambda case: call(case, "cuda"), case)
    assert re.fullmatch(
        r"moe: the scratch of the forward pass must fit into the 0\.00 GiB of GPU memory that XLA may use, "
        r"got 0\.\d\d GiB; use a macrobatch smaller than \d+, or split the tokens over several calls",
        str(caught.value),
    )


def test_without_a_gpu_or_without_its_module(monkeypatch):
    module = importlib.import_module("mok_jax.moe")
    text = 'moe: implementation "cuda" cannot run here: {}; use None or "xla"'
    refuse_cuda(ValueError, text.format("it needs CUDA devices, these are cpu"))
    monkeypatch.setattr(module, "_platform", lambda mesh: ("gpu", 1))
    if not GPU:
        refuse_cuda(ValueError, text.format("there is no CUDA device here"))
    monkeypatch.setattr(module, "_gpu", lambda mesh: ops.Gpu((9, 0), None))
    monkeypatch.setitem(sys.modules, "mok_jax._cuda", None)
    monkeypatch.setattr(ops, "cuda", ops.cuda.__wrapped__)  # not what it returned before
    reason = "mok_jax was built without CUDA; reinstall it where a CUDA 13 compiler is found (nvcc on PATH, or CUDACXX)"
    refuse_cuda(ValueError, text.format(reason))


# name: (sizes, options, compute capability, dtype, whether the portable kernels run)
PATHS = {
    "hopper": ({}, {}, (9, 0), "bfloat16", False),
    "no_shared_expert": (dict(shared_intermediate=0), {}, (9, 0), "bfloat16", False),
    "asked_for": ({}, dict(portable=True), (9, 0), "bfloat16", True),
    "ampere": ({}, {}, (8, 0), "bfloat16", True),
    "blackwell": ({}, {}, (10, 0), "bfloat16", True),
    "float32": ({}, {}, (9, 0), "float32", True),
    "hidden": (dict(hidden=12), {}, (9, 0), "bfloat16", True),
    "intermediate": (dict(intermediate=20), {}, (9, 0), "bfloat16", True),
    "shared_intermediate": (dict(shared_intermediate=4), {}, (9, 0), "bfloat16", True),
}


@pytest.mark.parametrize(("sizes", "options", "capability", "dtype", "portable"), PATHS.values(), ids=PATHS)
def test_which_kernels_cuda_takes(sizes, options, capability, dtype, portable):
    sizes = dict(hidden=16, intermediate=24, shared_intermediate=8) | sizes
    counts = dict(tokens=8, local_experts=2, ranks=1, top_k=1)
    gpu, config = ops.Gpu(capability, None), MoKConfig(**options)
    dims = ops.Dims(**counts, **sizes, dtype=jnp.dtype(dtype), config=config, implementation="cuda", gpu=gpu)
    assert dims.portable == portable


# ---- the choice of the implementation ----

NAMES = "('cuda', 'host', 'xla', 'reference')"


@pytest.mark.parametrize(
    ("name", "error", "found"), [("gpu", ValueError, "'gpu'"), ("", ValueError, "''"), (3, TypeError, "int 3")]
)
def test_unknown_implementation(name, error, found):
    refuse_call(error, f"moe: implementation must be one of {NAMES} or None, got {found}", implementation=name)


@pytest.mark.parametrize(
    ("platform", "processes", "reason"),
    [
        ("gpu", 1, "it needs CPU devices, these are gpu"),
        ("cpu", 2, "it needs all devices in one process, these are in 2"),
    ],
    ids=["gpu", "processes"],
)
def test_host_where_it_cannot_run(monkeypatch, platform, processes, reason):
    module = importlib.import_module("mok_jax.moe")  # the package's `moe` is the function
    monkeypatch.setattr(module, "_platform", lambda mesh: (platform, processes))
    text = f'moe: implementation "host" cannot run here: {reason}; use None or "xla"'
    refuse_call(ValueError, text, implementation="host")
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


def test_a_named_expert_axis_must_exist():
    mesh = jax.make_mesh((8,), ("data",))
    refuse_call(
        ValueError,
        "moe: expert_axis must name an axis of the mesh ('data',), got 'experts'",
        mesh=mesh,
        expert_axis="experts",
    )


def test_a_module_names_its_own_axis():
    text = "MoKMoE: expert_axis must name an axis of the mesh ('data',), got 'experts'"
    with jax.set_mesh(jax.make_mesh((8,), ("data",))):
        refuse(ValueError, text, mok_jax.MoKMoE, 8, 8, 8, 2, expert_axis="experts", rngs=nnx.Rngs(0))


def test_a_long_value_is_cut():
    refuse_call(
        TypeError,
        "moe: x must be an array, got list [" + "1.0, " * 15 + "1.0,...; use jnp.asarray",
        CASE._replace(x=[1.0] * 1000),
    )


# ---- what a newcomer and a breaker came upon ----


def test_an_unknown_name_cannot_run():
    text = "moe: implementation must be one of ('cuda', 'host', 'xla', 'reference'), got 'cud'"
    refuse(ValueError, text, mok_jax.why_not, "cud")


def test_a_mesh_without_devices():
    refuse_call(ValueError, "moe: mesh must have devices, got {'expert': 0}", mesh=Mesh(np.array([]), ("expert",)))


def test_quantised_values_in_place_of_a_weight():
    case = make_case("bf16", **SIZES)
    q = mok_jax.quantize_mxfp8(case.w_gate, 1)
    text = "moe: w_gate must be an array, got Mxfp8; use quantize_weight(w)"
    refuse_call(TypeError, text, case._replace(w_gate=q))
    shared = (mok_jax.quantize_weight(case.shared[0]), *case.shared[1:])
    text = "moe: shared w_gate must be an array, got Mxfp8Weight; the shared expert is not quantised"
    refuse_call(TypeError, text, case._replace(shared=shared))

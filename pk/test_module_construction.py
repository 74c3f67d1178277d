"""How both modules make their parameters, and what they refuse then and in a call."""

import contextlib
import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import assert_same_bits, kinds, mesh_of, refuse
from flax import nnx
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P
from layers import HIDDEN, RANDOM, SHARED, frameworks, layer_of, module_of, parameters_of, x_of

import mok_jax
import mok_jax.linen

# ---- construction ----


def expert_specs(framework, module):
    """Each parameter's PartitionSpec as the framework tells it."""
    if framework == "nnx":
        specs = nnx.to_pure_dict(nnx.get_partition_spec(nnx.state(module, nnx.Param)))
    else:
        variables = jax.eval_shape(module.init, jax.random.key(0), x_of(8, dtype=jnp.float32))
        specs = nn.get_partition_spec(variables)["params"]
    return specs


def other_mesh():
    return jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))


def mixed_mesh():
    return jax.make_mesh((2, 4), ("data", "expert"), axis_types=(AxisType.Auto, AxisType.Explicit))


PLACES = {
    "none": (None, "none", False),
    "lacking-given": (other_mesh, "given", False),
    "lacking-ambient": (other_mesh, "ambient", False),
    "auto-given": (mesh_of, "given", True),
    "auto-ambient": (mesh_of, "ambient", True),
    "explicit-given": (functools.partial(mesh_of, kind="explicit"), "given", True),
    "explicit-ambient": (functools.partial(mesh_of, kind="explicit"), "ambient", True),
    "mixed-given": (mixed_mesh, "given", True),
    "mixed-ambient": (mixed_mesh, "ambient", True),
}


@frameworks
@pytest.mark.parametrize(("make", "how", "has_axis"), PLACES.values(), ids=PLACES)
def test_construction(framework, make, how, has_axis):
    mesh = make() if make else None
    with jax.set_mesh(mesh) if how == "ambient" else contextlib.nullcontext():
        given = dict(mesh=mesh) if how == "given" else {}
        module = module_of(framework, num_experts=8, shared_intermediate=SHARED, implementation="reference", **given)
        specs = expert_specs(framework, module)
    experts = P("expert", None, None) if has_axis else P()
    assert specs == {name: experts if name.startswith("w_") else P() for name in parameters_of()}


@kinds
def test_nnx_makes_the_experts_sharded(kind):
    with jax.set_mesh(mesh_of(kind=kind)):
        module = module_of("nnx", num_experts=8)
        layers = nnx.vmap(lambda rngs: module_of("nnx", num_experts=8))(nnx.Rngs(0).split(3))
    assert module.w_down[...].sharding.shard_shape((8, 40, HIDDEN)) == (2, 40, HIDDEN)
    assert layers.w_down[...].sharding.shard_shape((3, 8, 40, HIDDEN)) == (3, 2, 40, HIDDEN)


@kinds
def test_linen_parameters_may_stay_boxed(kind):
    mesh = mesh_of(kind=kind)
    with jax.set_mesh(mesh):
        module, x = module_of("linen", num_experts=8, implementation="xla", **RANDOM), x_of(8, dtype=jnp.float32)
        variables = jax.jit(module.init)(jax.random.key(0), x)
        assert isinstance(variables["params"]["w_gate"], nn.Partitioned)
        # nn.unbox would constrain the sharding, which Explicit axes refuse where it differs.
        unboxed = {name: getattr(box, "value", box) for name, box in variables["params"].items()}
        boxed, plain = (jax.jit(module.apply)({"params": v}, x) for v in (variables["params"], unboxed))
    assert_same_bits(boxed, plain)


def test_each_expert_has_its_own_fan_in_and_key():
    module = mok_jax.MoKMoE(96, 160, 6, 3, shared_intermediate=224, rngs=nnx.Rngs(0))  # with the defaults
    values = {name: np.asarray(value) for name, value in nnx.to_pure_dict(nnx.state(module, nnx.Param)).items()}
    for name, fan_in in dict(
        router=96, w_gate=96, w_up=96, w_down=160, shared_gate=96, shared_up=96, shared_down=224
    ).items():
        assert abs(values[name].std() * np.sqrt(fan_in) - 1) < 0.1, name
    assert len({expert.tobytes() for name in ("w_gate", "w_up", "w_down") for expert in values[name]}) == 18


def test_linen_makes_what_nnx_makes():
    initializers = dict(kernel_init=jax.nn.initializers.normal(0.5), router_init=jax.nn.initializers.ones)
    options = dict(shared_intermediate=SHARED, param_dtype=jnp.bfloat16, **initializers)
    variables = module_of("linen", **options).init(jax.random.key(0), x_of(2, dtype=jnp.float32))
    parameters = nnx.to_pure_dict(nnx.state(module_of("nnx", **options), nnx.Param))
    described = (jax.tree.map(lambda p: (p.shape, p.dtype), tree) for tree in (variables["params"], parameters))
    assert dict(next(described)) == next(described)
    assert (variables["params"]["router"] == 1).all() and (parameters["router"] == 1).all()


def test_linen_tabulates():
    table = module_of("linen", implementation="reference").tabulate(jax.random.key(0), x_of(5, dtype=jnp.float32))
    assert "w_gate" in table and "MoKMoE" in table


# ---- errors ----


DTYPE_NAMES = "('float32', 'float64', 'bfloat16')"
INDIVISIBLE = (
    "MoKMoE: num_experts must be divisible by the expert axis 'expert' of size 4, got 6; use 8 experts or another mesh"
)

# name: (options, error, text)
WRONG = {
    "expert_axis": (
        dict(expert_axis=["expert"]),
        TypeError,
        "MoKMoE: expert_axis must be the name of a mesh axis, got list ['expert']",
    ),
    "intermediate": (dict(intermediate=0), ValueError, "MoKMoE: intermediate must be an integer >= 1, got 0"),
    "num_experts": (dict(num_experts=2.0), TypeError, "MoKMoE: num_experts must be an integer >= 1, got float 2.0"),
    "top_k": (dict(top_k=7), ValueError, "MoKMoE: top_k must be an integer from 1 to num_experts 6, got 7"),
    "shared": (
        dict(shared_intermediate=0),
        ValueError,
        "MoKMoE: shared_intermediate must be an integer >= 1 or None, got 0",
    ),
    "scores": (dict(scores="relu"), ValueError, "MoKMoE: scores must be one of ('softmax', 'sigmoid'), got 'relu'"),
    "renormalize": (dict(renormalize=None), TypeError, "MoKMoE: renormalize must be True or False, got NoneType None"),
    "scaling": (dict(scaling=float("nan")), ValueError, "MoKMoE: scaling must be a finite number, got nan"),
    "bias": (dict(use_selection_bias=1), TypeError, "MoKMoE: use_selection_bias must be True or False, got int 1"),
    "dtype": (
        dict(dtype=jnp.float16),
        TypeError,
        f"MoKMoE: dtype must be one of {DTYPE_NAMES} or None, got float16",
    ),
    "param_dtype": (
        dict(param_dtype="half a float"),
        TypeError,
        f"MoKMoE: param_dtype must be one of {DTYPE_NAMES}, got 'half a float'",
    ),
    "dtype_of_mxfp8": (
        dict(dtype=jnp.float32, config=mok_jax.MoKConfig(precision="mxfp8")),
        ValueError,
        'MoKMoE: dtype must be bfloat16 for precision="mxfp8", got float32; param_dtype may be float32',
    ),
    "config": (dict(config=3), TypeError, "MoKMoE: config must be a MoKConfig, got int 3"),
    "implementation": (
        dict(implementation="best"),
        ValueError,
        "moe: implementation must be one of ('cuda', 'host', 'xla', 'reference') or None, got 'best'",
    ),
    "token_axes": (dict(token_axes=3), TypeError, "MoKMoE: token_axes must be names of mesh axes or None, got int 3"),
    "mesh": (dict(mesh="d2_e4"), TypeError, "MoKMoE: mesh must be a jax.sharding.Mesh or None, got str 'd2_e4'"),
    "indivisible": (dict(mesh=AbstractMesh((2, 4), ("data", "expert"))), ValueError, INDIVISIBLE),
}


@frameworks
@pytest.mark.parametrize(("options", "error", "text"), WRONG.values(), ids=WRONG)
def test_options_are_refused_at_construction(framework, options, error, text):
    refuse(error, text, module_of, framework, **options)


@frameworks
def test_experts_that_the_ambient_mesh_cannot_divide(framework):
    with jax.set_mesh(mesh_of()):
        refuse(ValueError, INDIVISIBLE, module_of, framework)


@frameworks
def test_tokens_that_the_mesh_does_not_divide(framework):
    layer = layer_of(framework, num_experts=8, mesh=mesh_of())
    text = (
        "MoKMoE: tokens must be divisible by the mesh axes ('data', 'expert') of size 8, got 36 in "
        "x float64[4, 9, 24]; pad x and set token_mask to False there, or name fewer token_axes"
    )
    refuse(ValueError, text, layer, parameters_of(experts=8), x_of(4, 9))


X_DTYPES = "float32 or float64 or bfloat16"
WRONG_CALLS = {
    "x_dtype": (
        (jnp.zeros((5, HIDDEN), jnp.int32),),
        TypeError,
        f"MoKMoE: x must be {X_DTYPES}[..., hidden=24], got int32[5, 24]; cast x",
    ),
    "x_width": (
        (jnp.zeros((5, 23)),),
        ValueError,
        "MoKMoE: x must be float64[..., hidden=24], got float64[5, 23]; make the layer for x's width",
    ),
    "x_rank": (
        (jnp.zeros(()),),
        ValueError,
        "MoKMoE: x must be float64[..., hidden=24], got float64[]; make the layer for x's width",
    ),
    "mask_dtype": (
        (jnp.zeros((5, 2, HIDDEN)), jnp.zeros((5, 2))),
        TypeError,
        "MoKMoE: token_mask must be bool[5, 2], got float64[5, 2]; True keeps a token",
    ),
    "mask_shape": (
        (jnp.zeros((5, 2, HIDDEN)), jnp.zeros(10, bool)),
        ValueError,
        "MoKMoE: token_mask must be bool[5, 2], got bool[10]; give each token a value",
    ),
}


@frameworks
@pytest.mark.parametrize(("arguments", "error", "text"), WRONG_CALLS.values(), ids=WRONG_CALLS)
def test_arguments_are_refused(framework, arguments, error, text):
    refuse(error, text, layer_of(framework), parameters_of(), *arguments)

"""The layer around moe() that nnx.py and linen.py share: options, the table of parameters, and what a call does.

Called by the two modules, which own the parameters.
"""

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.nn.initializers import Initializer
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from mok_jax.config import MoKConfig
from mok_jax.moe import Weights, as_array, choose_implementation, describe, moe, show
from mok_jax.placement import Placement, as_axes, check_expert_axis, place
from mok_jax.reference import HIGHEST, accumulation_dtype
from mok_jax.routing import Routing, check_integer, check_mask, check_scoring, route

# Compiled as a whole: one compilation for each shape in place of five.
LECUN_NORMAL: Initializer = jax.jit(jax.nn.initializers.lecun_normal(), static_argnums=(1, 2))
_DTYPES = ("float32", "float64", "bfloat16")


class Parameter(NamedTuple):
    """One parameter of the layer; `experts` says that its first axis is theirs."""

    shape: tuple[int, ...]
    dtype: Any
    experts: bool = False

    def initial(self, initializer: Initializer, key: jax.Array) -> jax.Array:
        """`initializer` for one matrix [in, out]; each expert has its own key, so its fan-in is its own."""
        if not self.experts:
            return initializer(key, self.shape, self.dtype)
        keys = jax.random.split(key, self.shape[0])
        return jax.vmap(lambda key: initializer(key, self.shape[1:], self.dtype))(keys)


class LayerWeights(NamedTuple):
    """What `apply_layer` reads of a module."""

    router: jax.Array
    experts: Weights
    shared: Weights | None
    selection_bias: jax.Array | None


@dataclasses.dataclass(frozen=True)
class LayerOptions:
    """The options of both modules, checked here; `nnx.MoKMoE` says what each means. hidden None: x's."""

    hidden: int | None
    intermediate: int
    num_experts: int
    top_k: int
    shared_intermediate: int | None
    scores: str
    renormalize: bool
    scaling: float
    use_selection_bias: bool
    dtype: Any
    param_dtype: Any
    config: MoKConfig
    implementation: str | None
    mesh: Mesh | AbstractMesh | None
    expert_axis: str
    token_axes: tuple[str, ...] | None

    def __post_init__(self) -> None:
        for name in ("hidden", "intermediate", "num_experts", "shared_intermediate"):
            optional = name in ("hidden", "shared_intermediate")
            if not (optional and getattr(self, name) is None):
                requirement = "an integer >= 1" + " or None" * (name == "shared_intermediate")
                check_integer("MoKMoE", name, getattr(self, name), requirement, 1)
        requirement = f"an integer from 1 to num_experts {self.num_experts}"
        check_integer("MoKMoE", "top_k", self.top_k, requirement, 1, self.num_experts)
        check_scoring("MoKMoE", self.scores, self.renormalize, self.scaling)
        if not isinstance(self.use_selection_bias, bool):
            raise TypeError(
                f"MoKMoE: use_selection_bias must be True or False, got {describe(self.use_selection_bias)}"
            )
        _check_dtype("param_dtype", self.param_dtype)
        if self.dtype is not None:
            _check_dtype("dtype", self.dtype, " or None")
        if not isinstance(self.config, MoKConfig):
            raise TypeError(f"MoKMoE: config must be a MoKConfig, got {describe(self.config)}")
        if self.config.precision == "mxfp8" and self.dtype is not None and jnp.dtype(self.dtype).name != "bfloat16":
            raise ValueError(
                f'MoKMoE: dtype must be bfloat16 for precision="mxfp8", got {jnp.dtype(self.dtype).name}; '
                "param_dtype may be float32"
            )
        if self.mesh is not None and not isinstance(self.mesh, (Mesh, AbstractMesh)):
            raise TypeError(f"MoKMoE: mesh must be a jax.sharding.Mesh or None, got {describe(self.mesh)}")
        if not isinstance(self.expert_axis, str):
            raise TypeError(f"MoKMoE: expert_axis must be the name of a mesh axis, got {describe(self.expert_axis)}")
        object.__setattr__(self, "token_axes", as_axes("MoKMoE", self.token_axes))  # hashable
        check_expert_axis("MoKMoE", self.expert_axis, self.known_mesh)
        ranks = self.known_mesh.shape.get(self.expert_axis, 1)
        if self.implementation is not None:
            choose_implementation(self.implementation, self.mesh, ranks)
        if self.num_experts % ranks:
            raise ValueError(
                f"MoKMoE: num_experts must be divisible by the expert axis {self.expert_axis!r} of size {ranks}, "
                f"got {self.num_experts}; use {-(-self.num_experts // ranks) * ranks} experts or another mesh"
            )

    @property
    def known_mesh(self) -> Mesh | AbstractMesh:
        """The mesh given, else the ambient one, which may be empty."""
        return jax.sharding.get_abstract_mesh() if self.mesh is None else self.mesh

    @property
    def shards_experts(self) -> bool:
        """Whether a mesh is known that splits the experts, and not in a caller's `shard_map`."""
        mesh = self.known_mesh
        manual = jax.sharding.get_abstract_mesh().manual_axes
        return self.expert_axis in mesh.axis_names and self.expert_axis not in manual

    def parameters(self, hidden: int) -> dict[str, Parameter]:
        """By name. Inside a `shard_map` over the expert axis the experts are this rank's."""
        experts, dtype = self.num_experts, jnp.dtype(self.param_dtype)
        mesh = jax.sharding.get_abstract_mesh()
        if self.expert_axis in mesh.manual_axes:
            experts //= mesh.shape[self.expert_axis]
        table = {
            "router": Parameter((hidden, self.num_experts), accumulation_dtype(dtype)),
            "w_gate": Parameter((experts, hidden, self.intermediate), dtype, experts=True),
            "w_up": Parameter((experts, hidden, self.intermediate), dtype, experts=True),
            "w_down": Parameter((experts, self.intermediate, hidden), dtype, experts=True),
        }
        if self.shared_intermediate is not None:
            table |= {
                "shared_gate": Parameter((hidden, self.shared_intermediate), dtype),
                "shared_up": Parameter((hidden, self.shared_intermediate), dtype),
                "shared_down": Parameter((self.shared_intermediate, hidden), dtype),
            }
        return table


def _check_dtype(name: str, dtype, or_none: str = "") -> None:
    try:
        found = jnp.dtype(dtype).name
    except TypeError:
        found = repr(dtype)
    if found not in _DTYPES:
        raise TypeError(f"MoKMoE: {name} must be one of {_DTYPES}{or_none}, got {found}")


@functools.partial(jax.jit, static_argnums=0)  # so that an eager call compiles once, as a whole
def apply_layer(
    options: LayerOptions, weights: LayerWeights, x: jax.Array, token_mask: jax.Array | None
) -> tuple[jax.Array, Routing]:
    """y, of x's shape and sharding and of the compute dtype, and the routing of the tokens in some order.

    Args:
      x: float [..., hidden].
      token_mask: None, or bool [...]; where False, y is 0 and nothing has a gradient, whatever x holds.
    """
    x = as_array("MoKMoE", "x", x)
    token_mask = None if token_mask is None else as_array("MoKMoE", "token_mask", token_mask)
    _check_layer_arguments(x, token_mask, weights.router)
    dtype = jnp.dtype(options.dtype or x.dtype)
    wide = accumulation_dtype(dtype)
    tokens = _flatten(x.astype(dtype), x)
    mask = None if token_mask is None else _flatten(token_mask[..., None], x)[:, 0]
    if mask is not None:
        tokens = jnp.where(mask[:, None], tokens, 0)
    placement = place(options.mesh, [tokens], options.expert_axis, options.token_axes)
    placement.check_tokens("MoKMoE", tokens.shape[0], x, "pad x and set token_mask to False there")

    precise = jnp.promote_types(wide, weights.router.dtype)
    router = _reshard_like(weights.router.astype(precise), P(), tokens)
    routing = route(
        jnp.dot(tokens.astype(precise), router, precision=HIGHEST),
        options.top_k,
        scores=options.scores,
        renormalize=options.renormalize,
        scaling=options.scaling,
        selection_bias=weights.selection_bias,
        token_mask=mask,
        axis_names=_manual_token_axes(options, tokens),
        on_each_device=functools.partial(_on_its_own_tokens, placement, tokens),
    )
    y = moe(
        tokens,
        routing.expert_ids,
        routing.router_weights.astype(wide),
        *_cast(weights.experts, dtype),
        shared=None if weights.shared is None else _cast(weights.shared, dtype),
        implementation=options.implementation,
        config=options.config,
        mesh=options.mesh,
        expert_axis=options.expert_axis,
        token_axes=options.token_axes,
    )
    if mask is not None:
        y = jnp.where(mask[:, None], y, 0)
    return _unflatten(y, x), routing


def _on_its_own_tokens(placement: Placement, tokens, function):
    """`function` of [tokens, ...] on each device, over the axes and in the place that `moe` gives the tokens."""
    if not placement.wrapped:
        return function
    spec, _ = placement.specs()
    run = placement.shard_map(function, (spec,), spec)
    return lambda value: placement.reshard(run(value), jax.typeof(tokens).sharding.spec)


def _check_layer_arguments(x, token_mask, router) -> None:
    hidden = router.shape[0]
    if router.dtype.name not in ("float32", "float64"):
        raise TypeError(
            f"MoKMoE: router must be float32 or float64[hidden, experts], got {show(router)}; "
            "leave it out when parameters are cast: a small error changes the choice of experts"
        )
    if x.dtype.name not in _DTYPES:
        raise TypeError(f"MoKMoE: x must be {' or '.join(_DTYPES)}[..., hidden={hidden}], got {show(x)}; cast x")
    if x.ndim == 0 or x.shape[-1] != hidden:
        raise ValueError(
            f"MoKMoE: x must be {x.dtype.name}[..., hidden={hidden}], got {show(x)}; make the layer for x's width"
        )
    if token_mask is not None:
        check_mask("MoKMoE", token_mask, f"bool{list(x.shape[:-1])}", x.shape[:-1])


def _cast(weights: Weights, dtype) -> Weights:
    """The dtypes that `moe` takes beside an x of `dtype`: float32 stays under bfloat16, and so do its gradients."""

    def cast(weight):
        if dtype == jnp.bfloat16:
            return weight if weight.dtype in (jnp.bfloat16, jnp.float32) else weight.astype(jnp.float32)
        return weight.astype(dtype)

    gate, up, down = map(cast, weights)
    return gate, up, down


def _manual_token_axes(options: LayerOptions, x) -> tuple[str, ...]:
    """The axes of a caller's `shard_map` over which these tokens are split."""
    manual = jax.sharding.get_abstract_mesh().manual_axes
    axes = [axis for axis in manual if options.token_axes is None or axis in options.token_axes]

    def varies(value, axis):
        return axis in jax.typeof(value).manual_axis_type.varying

    # Under check_vma=True the types tell where x is replicated; under False none says that it varies.
    return tuple(axis for axis in axes if varies(x, axis) or not varies(lax.axis_index(axis), axis))


# ---- [..., hidden] to [tokens, hidden] and back, also over Explicit mesh axes, where each reshape has a type ----


def _reshard_like(value, spec: P, x):
    """`value` as in `spec` over the Explicit axes of x's mesh; as it is where there are none."""
    mesh = jax.typeof(x).sharding.mesh
    if AxisType.Explicit not in mesh.axis_types:
        return value
    return jax.sharding.reshard(value, NamedSharding(mesh, spec))


def _flatten(value, x):
    """[..., n] to [tokens, n], sharded as x's leading axes are, in an order that depends on x's sharding alone.

    Where the mesh splits more than the first axis, each device keeps its tokens, in its own order: none
    has to move, and the layer does not care.
    """
    leading = jax.typeof(x).sharding.spec[:-1]
    value = _reshard_like(value, P(*leading, None), x)
    if not _names(leading[1:]):
        return value.reshape(-1, value.shape[-1])
    local = _on_each_device(x, lambda block: block.reshape(-1, block.shape[-1]))
    return local(in_specs=P(*leading, None), out_specs=P(_names(leading), None))(value)


def _unflatten(y, x):
    """The way back, and x's own sharding."""
    spec, mesh = jax.typeof(x).sharding.spec, jax.typeof(x).sharding.mesh
    leading = spec[:-1]
    if not _names(leading[1:]):
        return _reshard_like(y.reshape(x.shape), spec, x)
    sizes = [n // math.prod(mesh.shape[a] for a in _names([part])) for n, part in zip(x.shape, leading, strict=False)]
    local = _on_each_device(x, lambda block: block.reshape(*sizes, x.shape[-1]))
    return _reshard_like(local(in_specs=P(_names(leading), None), out_specs=P(*leading, None))(y), spec, x)


def _names(parts) -> tuple[str, ...]:
    """The mesh axes in parts of a PartitionSpec."""
    names: list[str] = []
    for part in parts:
        names += () if part is None else (part,) if isinstance(part, str) else part
    return tuple(names)


def _on_each_device(x, function):
    mesh = jax.typeof(x).sharding.mesh
    explicit = {a for a, kind in zip(mesh.axis_names, mesh.axis_types, strict=True) if kind == AxisType.Explicit}
    ambient = not jax.sharding.get_abstract_mesh().empty
    return functools.partial(jax.shard_map, function, mesh=None if ambient else mesh, axis_names=explicit)

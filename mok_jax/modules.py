"""What nnx.py and linen.py share: the options, the parameters' shapes, and the layer as a function of them."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType

from mok_jax.config import MoKConfig
from mok_jax.moe import moe
from mok_jax.placement import AnyMesh, place
from mok_jax.routing import SCORES, Routing, route

Initializer = Callable[..., jax.Array]
lecun_normal = jax.nn.initializers.lecun_normal()


@dataclasses.dataclass(frozen=True)
class Options:
    """The modules' options; see `nnx.MoKMoE`. Checked when made."""

    hidden: int
    intermediate: int
    num_experts: int
    top_k: int
    shared_intermediate: int | None
    scores: str
    renormalize: bool
    scaling: float
    dtype: Any
    param_dtype: Any
    config: MoKConfig
    implementation: str | None
    mesh: AnyMesh | None
    expert_axis: str
    token_axes: tuple[str, ...] | None

    def __post_init__(self) -> None:
        sizes = ("hidden", "intermediate", "num_experts", "top_k")
        for name in sizes if self.shared_intermediate is None else (*sizes, "shared_intermediate"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(f"MoKMoE: {name} must be an integer, got {type(value).__name__} {value!r}")
            if value < 1:
                raise ValueError(f"MoKMoE: {name} must be at least 1, got {value}")
        if self.top_k > self.num_experts:
            raise ValueError(f"MoKMoE: top_k must be at most num_experts, got {self.top_k} of {self.num_experts}")
        if self.scores not in SCORES:
            raise ValueError(f"MoKMoE: scores must be one of {SCORES}, got {self.scores!r}")
        ranks = 1 if self.axis is None or self.context_mesh.empty else self.context_mesh.shape[self.axis]
        if self.num_experts % ranks:
            raise ValueError(
                f"MoKMoE: num_experts must be divisible by the mesh axis {self.expert_axis!r} of size {ranks}, "
                f"got {self.num_experts}; change the mesh or the number of experts"
            )

    @property
    def context_mesh(self) -> AnyMesh:
        return jax.sharding.get_abstract_mesh() if self.mesh is None else self.mesh

    @property
    def axis(self) -> str | None:
        """The mesh axis that parameters are annotated with; None where the mesh lacks it, or is manual there."""
        mesh = self.context_mesh
        if mesh.empty:
            return self.expert_axis
        if self.expert_axis not in mesh.axis_names:
            return None
        kind = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))[self.expert_axis]
        return None if kind == AxisType.Manual else self.expert_axis

    @property
    def router_dtype(self):
        """Of the router's weights, logits and scores: never below float32."""
        return jnp.promote_types(self.param_dtype, jnp.float32)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of every parameter but the router: [experts, in, out], shared [in, out]."""
        experts, hidden, width, shared = self.num_experts, self.hidden, self.intermediate, self.shared_intermediate
        shapes: dict[str, tuple[int, ...]] = {
            "w_gate": (experts, hidden, width),
            "w_up": (experts, hidden, width),
            "w_down": (experts, width, hidden),
        }
        if shared is not None:
            shapes |= {"shared_gate": (hidden, shared), "shared_up": (hidden, shared), "shared_down": (shared, hidden)}
        return shapes


def per_expert(init: Initializer) -> Initializer:
    """Initialises each expert by itself: its fan-in is the matrix's, not the stack's."""

    def run(key, shape, dtype):
        if len(shape) == 2:
            return init(key, shape, dtype)
        return jax.vmap(lambda k: init(k, shape[1:], dtype))(jax.random.split(key, shape[0]))

    return run


def apply(
    options: Options, parameters: dict[str, jax.Array], x: jax.Array, token_mask: jax.Array | None
) -> tuple[jax.Array, Routing]:
    """The layer.

    Args:
      parameters: "router" [hidden, experts], those of `Options.shapes`, optionally "selection_bias".
      x: [..., hidden]; token_mask: bool [...] or None.

    Returns: y, the compute dtype [..., hidden], sharded as x is; and the routing of x's rows.
    """
    _check(options, x, token_mask)
    dtype = jnp.dtype(options.dtype or x.dtype)
    tokens, mask = _flatten(options, x, 1), None
    if token_mask is not None:
        mask = _flatten(options, token_mask, 0)
        # Whatever a masked row holds, NaN included, must reach no weight's gradient.
        tokens = jnp.where(mask[:, None], tokens, 0)

    wide = jnp.promote_types(options.router_dtype, jnp.float64 if dtype == jnp.float64 else jnp.float32)
    router = parameters["router"].astype(wide)
    logits = jnp.dot(tokens.astype(wide), router, precision=lax.Precision.HIGHEST)
    routing = route(
        logits,
        options.top_k,
        scores=options.scores,
        renormalize=options.renormalize,
        scaling=options.scaling,
        selection_bias=parameters.get("selection_bias"),
        token_mask=mask,
        axis_names=_manual_token_axes(options),
    )

    def weights(*names):
        found = [parameters[name] for name in names]
        # moe takes float32 weights under bfloat16 tokens as they are, for the gradients' sake.
        kept = {dtype, jnp.dtype(jnp.float32)} if dtype == jnp.bfloat16 else {dtype}
        return tuple(w if w.dtype in kept else w.astype(dtype) for w in found)

    y = moe(
        tokens.astype(dtype),
        routing.expert_ids,
        routing.router_weights.astype(jnp.float64 if dtype == jnp.float64 else jnp.float32),
        *weights("w_gate", "w_up", "w_down"),
        shared=weights("shared_gate", "shared_up", "shared_down") if options.shared_intermediate else None,
        implementation=options.implementation,
        config=options.config,
        mesh=options.mesh,
        expert_axis=options.expert_axis,
        token_axes=options.token_axes,
    )
    if mask is not None:
        y = jnp.where(mask[:, None], y, 0)
    return _reshape(y, x.shape, jax.typeof(x).sharding), routing


def _check(options: Options, x, token_mask) -> None:
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise TypeError(f"MoKMoE: x must be floating point [..., hidden], got {x.dtype.name}{list(x.shape)}")
    if x.ndim < 1 or x.shape[-1] != options.hidden:
        raise ValueError(f"MoKMoE: x must be [..., hidden={options.hidden}], got {list(x.shape)}")
    if token_mask is not None and token_mask.shape != x.shape[:-1]:
        raise ValueError(f"MoKMoE: token_mask must be bool{list(x.shape[:-1])}, got {list(token_mask.shape)}")
    if token_mask is not None and token_mask.dtype != jnp.bool_:
        raise TypeError(f"MoKMoE: token_mask must be bool, got {token_mask.dtype.name}; compare it to 0")


def _flatten(options: Options, value: jax.Array, features: int) -> jax.Array:
    """All leading axes in one; under Explicit axes sharded as `moe` wants its tokens."""
    lead = value.ndim - features
    shape = (-1, *value.shape[lead:])
    sharding = jax.typeof(value).sharding
    if sharding.mesh.empty or AxisType.Explicit not in sharding.mesh.axis_types:
        return value.reshape(shape)
    placement = place(options.mesh, [value], options.expert_axis, options.token_axes)
    tokens, _ = placement.specs()
    return _reshape(value, (value.size // max(1, _product(shape[1:])), *shape[1:]), sharding.update(spec=tokens))


def _product(sizes) -> int:
    result = 1
    for size in sizes:
        result *= size
    return result


def _reshape(value: jax.Array, shape, sharding) -> jax.Array:
    if sharding.mesh.empty or AxisType.Explicit not in sharding.mesh.axis_types:
        return value.reshape(shape)
    return lax.reshape(value, shape, out_sharding=sharding)


def _manual_token_axes(options: Options) -> tuple[str, ...]:
    """Inside a caller's shard_map: the axes over which losses and counts must be summed by hand."""
    manual = jax.sharding.get_abstract_mesh().manual_axes
    return tuple(axis for axis in manual if options.token_axes is None or axis in options.token_axes)

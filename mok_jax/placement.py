"""Where tokens and experts lie on the mesh: which axes split them, and which the layer makes manual itself.

Called by moe.py. Everything that only a mesh with more than one device needs is here.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

AnyMesh = Mesh | AbstractMesh


@dataclasses.dataclass(frozen=True)
class Placement:
    """One call's place on the mesh.

    Attributes:
      mesh: empty where there is none.
      expert_axis: None where the mesh lacks it: one rank.
      token_axes: in the mesh's order.
      ambient: the mesh is the context's, which knows the axes that a caller's shard_map made manual.
    """

    mesh: AnyMesh
    expert_axis: str | None
    token_axes: tuple[str, ...]
    ambient: bool

    @property
    def ranks(self) -> int:
        return 1 if self.expert_axis is None else self.mesh.shape[self.expert_axis]

    @property
    def wrapped(self) -> tuple[str, ...]:
        """The axes that are not manual yet, over which the caller's arrays are still whole."""
        return self._axes(lambda kind: kind != AxisType.Manual)

    @property
    def wrapped_token_axes(self) -> tuple[str, ...]:
        return tuple(axis for axis in self.token_axes if axis in self.wrapped)

    @property
    def nested(self) -> bool:
        """Inside a shard_map of the caller's that left some axes to the layer."""
        return 0 < len(self.wrapped) < len(self.mesh.axis_names)

    @property
    def check_vma(self) -> bool:
        """As the caller's shard_map has it, in which types cannot be mixed; True without one."""
        manual = self._axes(lambda kind: kind == AxisType.Manual)
        return not manual or bool(jax.typeof(lax.axis_index(manual[0])).manual_axis_type.varying)

    @property
    def token_shards(self) -> int:
        """How many ranks' tokens the caller's arrays hold together."""
        return math.prod(self.mesh.shape[axis] for axis in self.wrapped_token_axes)

    @property
    def expert_shards(self) -> int:
        return self.ranks if self.expert_axis in self.wrapped else 1

    def specs(self) -> tuple[P, P]:
        """Of arrays with a leading token axis, and of arrays with a leading expert axis."""
        return P(self.wrapped_token_axes or None), P(self.expert_axis if self.expert_axis in self.wrapped else None)

    def reshard(self, value: jax.Array, spec: P) -> jax.Array:
        """To the layer's spec along Explicit axes, where sharding is part of the type; jit sees to the others."""
        explicit = self._axes(lambda kind: kind == AxisType.Explicit)
        if not explicit:
            return value
        parts = [part if isinstance(part, tuple) else (part,) for part in spec]
        kept = [tuple(axis for axis in part if axis in explicit) or None for part in parts]
        return jax.sharding.reshard(value, NamedSharding(self.mesh, P(*kept)))

    def shard_map(self, function: Callable, in_specs: Any, out_specs: Any) -> Callable:
        """`function` on each device, over the axes that are not manual yet; its arguments resharded to their specs."""
        run = jax.shard_map(
            function,
            mesh=None if self.ambient else self.mesh,
            in_specs=in_specs,
            out_specs=out_specs,
            axis_names=set(self.wrapped),
            check_vma=self.check_vma,
        )
        return lambda *arguments: run(*jax.tree.map(self.reshard, arguments, in_specs))

    def index(self) -> jax.Array:
        """int32 [2]: this device's rank on the expert axis, and its group's number over all other axes.

        Only where every axis is manual.
        """
        rank = group = jnp.int32(0)
        for axis in self.mesh.axis_names:
            if axis == self.expert_axis:
                rank = lax.axis_index(axis)
            else:
                group = group * self.mesh.shape[axis] + lax.axis_index(axis)
        return jnp.stack([rank, group]).astype(jnp.int32)

    def check_tokens(self, who: str, tokens: int, x: jax.Array, remedy: str) -> None:
        """Raises ValueError where the axes do not divide the tokens; `remedy` is how to pad them."""
        if tokens % self.token_shards:
            raise ValueError(
                f"{who}: tokens must be divisible by the mesh axes {self.wrapped_token_axes} of size "
                f"{self.token_shards}, got {tokens} in x {x.dtype.name}{list(x.shape)}; {remedy}, "
                "or name fewer token_axes"
            )

    def _axes(self, holds) -> tuple[str, ...]:
        kinds = zip(self.mesh.axis_names, self.mesh.axis_types, strict=True)
        return tuple(axis for axis, kind in kinds if holds(kind))


def place(mesh: AnyMesh | None, arrays: list[Any], expert_axis: str, token_axes: tuple[str, ...] | None) -> Placement:
    """Finds the mesh (given, ambient, or the arrays' own) and checks the names of its axes.

    Raises:
      TypeError, ValueError: as `moe`.
    """
    if not isinstance(expert_axis, str):
        raise TypeError(
            f"moe: expert_axis must be the name of a mesh axis, got {type(expert_axis).__name__} {expert_axis!r}"
        )
    if mesh is not None and not isinstance(mesh, AnyMesh):
        raise TypeError(f"moe: mesh must be a jax.sharding.Mesh or None, got {type(mesh).__name__} {mesh!r}")
    if mesh is not None and mesh.axis_names and mesh.size == 0:
        raise ValueError(f"moe: mesh must have devices, got {dict(mesh.shape)}")
    context = jax.sharding.get_abstract_mesh()
    if mesh is None:
        candidates = [context, *(jax.typeof(array).sharding.mesh for array in arrays)]
        mesh = next((candidate for candidate in candidates if not candidate.empty), context)
    elif not context.empty:
        if context.shape_tuple != mesh.shape_tuple:
            raise ValueError(
                f"moe: mesh must be the ambient one, got {dict(mesh.shape)} under jax.set_mesh of "
                f"{dict(context.shape)}; leave mesh out or call outside that context"
            )
        mesh = context
    names = mesh.axis_names
    check_expert_axis("moe", expert_axis, mesh)
    token_axes = as_axes("moe", token_axes)
    if token_axes is not None:
        unknown = [axis for axis in token_axes if axis not in names]
        if unknown:
            raise ValueError(f"moe: token_axes must name axes of the mesh {tuple(names)}, got {unknown[0]!r}")
        if expert_axis in names and expert_axis not in token_axes:
            raise ValueError(
                f"moe: token_axes must contain the expert axis {expert_axis!r}, got {token_axes}; "
                "add it: the layer splits tokens over it whatever sharding x has"
            )
    # In mesh order whatever the caller's: the order must not change the layout.
    token_axes = tuple(axis for axis in names if token_axes is None or axis in token_axes)
    return Placement(mesh, expert_axis if expert_axis in names else None, token_axes, mesh is context)


DEFAULT_EXPERT_AXIS = "expert"


def as_axes(who: str, token_axes: Any) -> tuple[str, ...] | None:
    """One name or several, as a tuple."""
    if token_axes is None:
        return None
    axes = (token_axes,) if isinstance(token_axes, str) else token_axes
    if not isinstance(axes, (tuple, list)) or not all(isinstance(axis, str) for axis in axes):
        raise TypeError(
            f"{who}: token_axes must be names of mesh axes or None, got {type(token_axes).__name__} {token_axes!r}"
        )
    return tuple(axes)


def check_expert_axis(who: str, expert_axis: str, mesh: AnyMesh) -> None:
    """A mesh may lack the default axis (then there is one rank), but not one that the caller named."""
    if expert_axis != DEFAULT_EXPERT_AXIS and not mesh.empty and expert_axis not in mesh.axis_names:
        raise ValueError(
            f"{who}: expert_axis must name an axis of the mesh {tuple(mesh.axis_names)}, got {expert_axis!r}"
        )


def vary_alike(arrays):
    """Gives all arrays one type: varying over every axis that any of them varies over.

    A replicated weight becomes varying here, outside a custom_vjp, so that the transpose of this cast
    sums its gradient over the axes it is replicated on, exactly once.
    """
    axes = frozenset().union(*(jax.typeof(a).manual_axis_type.varying for a in jax.tree.leaves(arrays)))

    def vary(array):
        missing = axes - jax.typeof(array).manual_axis_type.varying
        return lax.pcast(array, tuple(sorted(missing)), to="varying") if missing else array

    return jax.tree.map(vary, arrays)

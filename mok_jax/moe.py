"""moe(): checks, choice of the implementation, sharding over the mesh.

Called by the modules and by users. Everything below `_moe` may assume checked arguments.
"""

import dataclasses
import functools
import logging
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from mok_jax import distributed, ops
from mok_jax.config import MoKConfig
from mok_jax.mxfp8 import BLOCK, Mxfp8, Mxfp8Weight, quantize_weight
from mok_jax.mxfp8_reference import moe_mxfp8_reference
from mok_jax.placement import DEFAULT_EXPERT_AXIS, AnyMesh, Placement, place, vary_alike
from mok_jax.reference import accumulation_dtype, moe_reference
from mok_jax.xla import moe_xla

IMPLEMENTATIONS = ("cuda", "host", "xla", "reference")  # best first

logger = logging.getLogger("mok_jax")

Weights = tuple[jax.Array, ...]
Experts = tuple[jax.Array | Mxfp8Weight, ...]

save_moe_residuals = jax.checkpoint_policies.save_only_these_names(
    "mok_ids", "mok_weights", "mok_schedule", "mok_context", "mok_out"
)
"""A `jax.checkpoint` policy that saves what keeps the layer's call and its routing from running twice."""


def moe(
    x: jax.Array,
    expert_ids: jax.Array,
    router_weights: jax.Array,
    w_gate: jax.Array | Mxfp8Weight,
    w_up: jax.Array | Mxfp8Weight,
    w_down: jax.Array | Mxfp8Weight,
    *,
    shared: Weights | None = None,
    implementation: str | None = None,
    config: MoKConfig = MoKConfig(),
    mesh: AnyMesh | None = None,
    expert_axis: str = DEFAULT_EXPERT_AXIS,
    token_axes: tuple[str, ...] | None = None,
) -> jax.Array:
    """Mixture-of-experts feed-forward: y[t] = sum_k w[t,k] FFN_{ids[t,k]}(x[t]) + FFN_shared(x[t]).

    Each expert is FFN(x) = (silu(x Wg) * (x Wu)) Wd. Sums are float32 (float64 for float64), each
    output is rounded once, and the same inputs give the same bits. Differentiable in x,
    router_weights and every weight.

    Args:
      x: float32, float64 or bfloat16 [tokens, hidden].
      expert_ids: int32 [tokens, top_k]. An id outside [0, experts), by convention -1, means no
        expert: it costs and contributes nothing. The same id twice in a row counts twice.
      router_weights: float32 (float64 with a float64 x) [tokens, top_k].
      w_gate: x's dtype, or float32 under a bfloat16 x [experts, hidden, intermediate]. Its gradient
        has its own dtype and is rounded once, from the accumulator. With precision="mxfp8" also what
        `quantize_weight` made of it; without, the call quantises it.
      w_up: as `w_gate`.
      w_down: likewise [experts, intermediate, hidden].
      shared: None, or the shared expert (w_gate, w_up, w_down) without the leading axis and with an
        intermediate width of its own.
      implementation: "cuda" (kernels for NVIDIA GPUs), "host" (C++ on the CPU devices of one process),
        "xla" (plain JAX, any backend), "reference" (plain jnp, the definition), or None for the best that
        the devices allow.
      config: see `MoKConfig`.
      mesh: the mesh to run over; None takes the ambient one (`jax.set_mesh`), else the one the
        arguments are sharded over, else one device. Inside a `shard_map` the arguments are this
        device's shards along its manual axes, and only the other axes are sharded here.
      expert_axis: the mesh axis over which the experts are split; a mesh without it has one rank.
      token_axes: the mesh axes over which the tokens are split; None for all. Over the others the
        work is replicated. It must contain `expert_axis` where the mesh has it.

    Returns:
      y, x.dtype [tokens, hidden]; along Explicit axes sharded as x is, along Auto axes as XLA chooses.

    Raises:
      TypeError: a wrong dtype.
      ValueError: a wrong rank, size, name or mesh.
      NotImplementedError: `vmap` across ranks; second derivatives of "cuda", "host" and MXFP8.

    Example:
      >>> import jax, jax.numpy as jnp, mok_jax
      >>> keys = jax.random.split(jax.random.key(0), 5)
      >>> x = jax.random.normal(keys[0], (8, 16))
      >>> scores = jax.nn.softmax(jax.random.normal(keys[1], (8, 4)))
      >>> router_weights, expert_ids = jax.lax.top_k(scores, 2)
      >>> w_gate, w_up = jax.random.normal(keys[2], (2, 4, 16, 32)) / 4
      >>> w_down = jax.random.normal(keys[3], (4, 32, 16)) / 6
      >>> mok_jax.moe(x, expert_ids, router_weights, w_gate, w_up, w_down).shape
      (8, 16)

    Source: the computation is the MoE layer of Cursor's Mixture-of-Kittens (PyTorch).
    """
    arguments = dict(x=x, expert_ids=expert_ids, router_weights=router_weights, w_gate=w_gate, w_up=w_up, w_down=w_down)
    if shared is not None:
        if not isinstance(shared, (tuple, list)) or len(shared) != 3:
            found = f"{len(shared)} of them" if isinstance(shared, (tuple, list)) else describe(shared)
            raise TypeError(f"moe: shared must be a tuple (w_gate, w_up, w_down) or None, got {found}")
        arguments |= {f"shared {name}": w for name, w in zip(("w_gate", "w_up", "w_down"), shared, strict=True)}
    if not isinstance(config, MoKConfig):
        raise TypeError(f"moe: config must be a MoKConfig, got {describe(config)}; use mok_jax.MoKConfig(...)")
    quantized = {
        name: value for name, value in arguments.items() if isinstance(value, Mxfp8Weight) and name.startswith("w_")
    }
    arguments |= {name: value.weight for name, value in quantized.items()}
    arrays = {name: as_array("moe", name, value) for name, value in arguments.items()}
    placement = place(mesh, list(arrays.values()), expert_axis, token_axes)
    _check_arguments(arrays, placement, config)
    for name, value in quantized.items():
        _check_quantized(name, value, config)
    chosen = choose_implementation(implementation, placement.mesh, placement.ranks, arrays["x"].dtype)
    x, ids, weights, *matrices = list(arrays.values())
    experts = tuple(
        quantized[name]._replace(weight=arrays[name]) if name in quantized else arrays[name]
        for name in ("w_gate", "w_up", "w_down")
    )
    shared = tuple(matrices[3:]) or None
    call = _Call(chosen, config, placement, _gpu(placement.mesh) if chosen == "cuda" else None)
    if chosen in ("cuda", "host"):
        dims = call.dims(x, ids, experts, shared, placement.token_shards, placement.expert_shards)
        if chosen == "cuda":
            call = dataclasses.replace(call, table=_table(placement, dims, config))
            dims = dataclasses.replace(dims, table=call.table)
        dims.check()
    return _moe(call, x, ids, weights, experts, shared)


# ---- checks ----


def _check_arguments(arrays: dict[str, Any], placement: Placement, config: MoKConfig) -> None:
    x = arrays["x"]
    name = x.dtype.name
    if name not in ("float32", "float64", "bfloat16"):
        raise TypeError(f"moe: x must be float32, float64 or bfloat16 [tokens, hidden], got {show(x)}; cast x")
    if config.precision == "mxfp8" and name != "bfloat16":
        raise TypeError(
            f'moe: x must be bfloat16[tokens, hidden] for precision="mxfp8", got {show(x)}; cast x, or give a layer '
            "dtype=jnp.bfloat16"
        )
    wide = accumulation_dtype(x.dtype).dtype.name
    weight_dtypes = (name, "float32") if name == "bfloat16" else (name,)
    _check("x", x, (name,), ("tokens", "hidden"))
    tokens, hidden = x.shape
    _check("expert_ids", arrays["expert_ids"], ("int32",), ("tokens", "top_k"), tokens=tokens)
    top_k = arrays["expert_ids"].shape[1]
    _check("router_weights", arrays["router_weights"], (wide,), ("tokens", "top_k"), tokens=tokens, top_k=top_k)
    _check("w_gate", arrays["w_gate"], weight_dtypes, ("experts", "hidden", "intermediate"), hidden=hidden)
    experts, _, width = arrays["w_gate"].shape
    sizes = dict(experts=experts, hidden=hidden, intermediate=width)
    _check("w_up", arrays["w_up"], weight_dtypes, ("experts", "hidden", "intermediate"), **sizes)
    _check("w_down", arrays["w_down"], weight_dtypes, ("experts", "intermediate", "hidden"), **sizes)
    if "shared w_gate" in arrays:
        _check("shared w_gate", arrays["shared w_gate"], weight_dtypes, ("hidden", "intermediate"), hidden=hidden)
        sizes = dict(hidden=hidden, intermediate=arrays["shared w_gate"].shape[1])
        _check("shared w_up", arrays["shared w_up"], weight_dtypes, ("hidden", "intermediate"), **sizes)
        _check("shared w_down", arrays["shared w_down"], weight_dtypes, ("intermediate", "hidden"), **sizes)

    placement.check_tokens("moe", tokens, x, "pad x with rows whose ids are -1")
    if experts % placement.expert_shards:
        raise ValueError(
            f"moe: experts must be divisible by the expert axis {placement.expert_axis!r} of size {placement.ranks}, "
            f"got w_gate {show(arrays['w_gate'])}; change the mesh or the number of experts"
        )
    virtual = config.virtual_ranks
    if virtual > 1:
        if placement.ranks > 1:
            raise ValueError(
                f"moe: virtual_ranks must be 1 where the expert axis has {placement.ranks} ranks, got {virtual}; "
                "virtual ranks split one device"
            )
        local_tokens = tokens // placement.token_shards
        if local_tokens % virtual or experts % virtual:
            raise ValueError(
                f"moe: tokens and experts must be divisible by virtual_ranks={virtual}, "
                f"got {local_tokens} tokens and {experts} experts on a device"
            )


def _check(name: str, array, dtypes: tuple[str, ...], axes: tuple[str, ...], **sizes: int) -> None:
    """One array's dtype, rank and sizes, with one message for each."""
    wanted = ", ".join(f"{axis}={sizes[axis]}" if axis in sizes else axis for axis in axes)
    requirement = f"moe: {name} must be {' or '.join(dtypes)}[{wanted}], got {show(array)}"
    if array.dtype.name not in dtypes:
        raise TypeError(f"{requirement}; cast it to {dtypes[0]}")
    if len(array.shape) != len(axes):
        raise ValueError(f"{requirement}; reshape it to {len(axes)} axes")
    for axis, size in zip(axes, array.shape, strict=True):
        if size != sizes.get(axis, size):
            swapped = (*array.shape[:-2], array.shape[-1], array.shape[-2])
            fits = all(size == sizes.get(axis, size) for axis, size in zip(axes, swapped, strict=True))
            remedy = ", so swap its last two axes: .swapaxes(-1, -2)" * fits  # PyTorch has them so
            raise ValueError(f"{requirement}; its {axis} must be {sizes[axis]} as in {_source(name, axis)}{remedy}")
        if size == 0 and axis != "tokens":
            raise ValueError(f"{requirement}; its {axis} must be at least 1")


def _check_quantized(name: str, value: Mxfp8Weight, config: MoKConfig) -> None:
    if config.precision != "mxfp8":
        raise ValueError(
            f'moe: {name} must be an array for precision=None, got an Mxfp8Weight; use MoKConfig(precision="mxfp8")'
        )
    weight = value.weight
    for part, axis in (("forward", -2), ("backward", -1)):
        scales = list(weight.shape)
        scales[axis] = -(-scales[axis] // BLOCK)
        wanted = f"float8_e4m3fn{list(weight.shape)} along axis {axis} with scales uint8{scales}"
        q = getattr(value, part)
        if isinstance(q, Mxfp8):
            found = f"{describe(q.values)} along axis {q.axis} with scales {describe(q.scales)}"
        else:
            found = describe(q)
        if found not in (wanted, f"bfloat16{list(weight.shape)}"):
            raise ValueError(
                f"moe: {name}.{part} must be {wanted}, or their bfloat16 values, got {found}; use quantize_weight"
            )


def _source(name: str, axis: str) -> str:
    """The argument that sets the size of an axis of `name`."""
    gate = "shared w_gate" if name.startswith("shared") else "w_gate"
    return {"tokens": "x", "hidden": "x", "top_k": "expert_ids"}.get(axis, gate)


def as_array(who: str, name: str, value) -> jax.Array:
    """`value`, which must be an array of JAX's or NumPy's."""
    if isinstance(value, (Mxfp8, Mxfp8Weight)):
        advice = "the shared expert is not quantised" if name.startswith("shared") else "use quantize_weight(w)"
        raise TypeError(f"{who}: {name} must be an array, got {type(value).__name__}; {advice}")
    if not isinstance(value, (jax.Array, np.ndarray, np.generic)):
        raise TypeError(f"{who}: {name} must be an array, got {describe(value)}; use jnp.asarray")
    return value if isinstance(value, jax.Array) else jnp.asarray(value)


def show(array) -> str:
    return f"{array.dtype.name}{list(array.shape)}"


def describe(value) -> str:
    if getattr(value, "shape", ()) and hasattr(value, "dtype"):
        return show(value)
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 80 else text[:80] + '...'}"


# ---- choice ----


def choose_implementation(
    implementation: str | None = None,
    mesh: AnyMesh | None = None,
    ranks: int = 1,
    dtype: Any = None,
) -> str:
    """The implementation that `moe` runs on these devices; a named one is returned or refused.

    Args:
      implementation: a name, or None for the best that the devices allow.
      mesh: the mesh of the call; None for `jax_default_device`, else the default backend.
      ranks: the size of its expert axis.
      dtype: of x, for None; None leaves it out of account.

    Raises:
      TypeError, ValueError: an unknown name, or one that the devices do not allow.
    """
    if implementation is not None and not isinstance(implementation, str):
        raise TypeError(f"moe: implementation must be one of {IMPLEMENTATIONS} or None, got {describe(implementation)}")
    if implementation is not None:
        if implementation not in IMPLEMENTATIONS:
            raise ValueError(f"moe: implementation must be one of {IMPLEMENTATIONS} or None, got {implementation!r}")
        reason = why_not(implementation, mesh, ranks)
        if reason is not None:
            raise ValueError(f'moe: implementation "{implementation}" cannot run here: {reason}; use None or "xla"')
        return implementation
    refused: list[tuple[str, str]] = []
    for name in IMPLEMENTATIONS:
        reason = why_not(name, mesh, ranks, dtype)
        if reason is None:
            logger.debug("moe runs %r%s", name, "".join(f"; {other}: {why}" for other, why in refused))
            return name
        refused.append((name, reason))
    raise AssertionError("unreachable: reference runs anywhere")


def why_not(
    implementation: str,
    mesh: AnyMesh | None = None,
    ranks: int = 1,
    dtype: Any = None,
) -> str | None:
    """Why an implementation cannot run on the devices of `mesh`, or None where it can.

    Raises:
      ValueError: an unknown name.
    """
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(f"moe: implementation must be one of {IMPLEMENTATIONS}, got {implementation!r}")
    if implementation not in ("cuda", "host"):
        return None
    platform, processes = _platform(mesh)
    if implementation == "cuda":
        return _why_not_cuda(platform, mesh, ranks, dtype)
    if platform != "cpu":
        return f"it needs CPU devices, these are {platform}"
    if processes > 1:
        return f"it needs all devices in one process, these are in {processes}"
    return None


def _why_not_cuda(platform: str, mesh: AnyMesh | None, ranks: int, dtype: Any) -> str | None:
    gpu = _gpu(mesh) if platform in ("gpu", "cuda") else None
    if gpu is None:
        return f"it needs CUDA devices, these are {platform}" if platform == "cpu" else "there is no CUDA device here"
    try:
        ops.cuda()
    except ImportError as error:
        return str(error)
    if gpu.capability < (8, 0):
        return "it needs compute capability 8.0 or later, this is {}.{}".format(*gpu.capability)
    if ranks > 1:
        reason = distributed.why_not(mesh, ranks)
        if reason is not None:
            return reason
    if dtype is not None and dtype.name == "float64":
        return "it has no float64"
    return None


def _gpu(mesh: AnyMesh | None) -> ops.Gpu | None:
    """The CUDA device that the call is planned for: one of this process in `mesh`, where that is concrete."""
    try:
        if isinstance(mesh, Mesh) and not mesh.empty:
            device = next(iter(mesh.local_devices), mesh.devices.flat[0])
        else:
            default = _default_device()
            concrete = default is not None and not isinstance(default, str) and (mesh is None or mesh.empty)
            device = default if concrete else jax.local_devices(backend="cuda")[0]
    except RuntimeError:  # no such backend
        return None
    return _gpu_of(device)


@functools.cache
def _gpu_of(device: Any) -> ops.Gpu | None:
    # Only CUDA's devices have one of this form.
    found = re.fullmatch(r"(\d+)\.(\d+)", str(getattr(device, "compute_capability", "")))
    if found is None:
        return None
    stats = device.memory_stats() if device.process_index == jax.process_index() else None
    return ops.Gpu((int(found[1]), int(found[2])), (stats or {}).get("bytes_limit"))


def _default_device() -> Any:
    config: Any = jax.config  # jax 0.10 declares its flags at run time only
    return config.jax_default_device


def _platform(mesh) -> tuple[str, int]:
    if isinstance(mesh, Mesh) and not mesh.empty:
        devices = mesh.devices.flat
        return devices[0].platform, len({device.process_index for device in devices})
    if mesh is not None and not mesh.empty:
        return mesh.abstract_device.platform, jax.process_count()
    default = _default_device()
    if default is None:
        return jax.default_backend(), 1
    return getattr(default, "platform", default), 1


def _table(placement: Placement, dims: ops.Dims, config: MoKConfig) -> int:
    """The table of peers for a call, made here where one process holds a concrete mesh; 0 where none is needed."""
    if config.virtual_ranks > 1 or (placement.ranks == 1 and not distributed.tables()):
        return 0
    wanted = dims.arena_bytes()
    found = distributed.find(placement.mesh, placement.expert_axis, wanted)
    if found is not None or placement.ranks == 1:
        return 0 if found is None else found.id
    if not isinstance(placement.mesh, Mesh) or jax.process_count() > 1:
        axis = placement.expert_axis
        raise ValueError(
            f'moe: implementation "cuda" needs arenas of {wanted} bytes for the {placement.ranks} ranks of this mesh; '
            f"call mok_jax.distributed.initialize(mesh, tokens={dims.tokens}, hidden={dims.hidden}, "
            f"top_k={dims.top_k}, dtype={dims.dtype.name!r}"
            + f", expert_axis={axis!r}" * (axis != DEFAULT_EXPERT_AXIS)
            + ") on every process first"
        )
    return distributed.initialize(
        placement.mesh,
        tokens=dims.tokens,
        hidden=dims.hidden,
        top_k=dims.top_k,
        dtype=dims.dtype,
        expert_axis=str(placement.expert_axis),
    ).id


# ---- the call ----


@dataclasses.dataclass(frozen=True)
class _Call:
    implementation: str
    config: MoKConfig
    placement: Placement
    gpu: ops.Gpu | None
    table: int = 0

    def dims(self, x, ids, experts, shared, shards: int = 1, expert_shards: int = 1) -> ops.Dims:
        """The sizes on one rank, from arrays that hold so many token and expert shards."""
        w_gate = experts[0].weight if isinstance(experts[0], Mxfp8Weight) else experts[0]
        return ops.Dims(
            tokens=x.shape[0] // shards,
            hidden=x.shape[1],
            intermediate=w_gate.shape[2],
            shared_intermediate=0 if shared is None else shared[0].shape[1],
            local_experts=w_gate.shape[0] // expert_shards,
            ranks=self.placement.ranks,
            top_k=ids.shape[1],
            dtype=x.dtype,
            config=self.config,
            implementation=self.implementation,
            gpu=self.gpu,
            table=self.table,
        )


@functools.partial(jax.jit, static_argnums=0)
def _moe(call: _Call, x, ids, weights, experts: Experts, shared: Weights | None):
    """Runs `_local` on every device: jitted, so that an eager call compiles once as a whole."""
    placement = call.placement
    if not placement.wrapped:
        return _local(call, x, ids, weights, experts, shared)
    tokens, by_expert = placement.specs()
    specs = (tokens, tokens, tokens, jax.tree.map(lambda _: by_expert, experts), None if shared is None else (P(),) * 3)
    local: Callable = functools.partial(_local, call)
    if placement.nested:
        # JAX gives the residuals of a nested shard_map specs that name the outer axes, which do not
        # lower. Recomputed residuals need none.
        local = jax.checkpoint(local)
    y = placement.shard_map(local, specs, tokens)(x, ids, weights, experts, shared)
    return placement.reshard(y, jax.typeof(x).sharding.spec)


def _local(call: _Call, x, ids, weights, experts: Experts, shared: Weights | None):
    """One device's share; every mesh axis is manual here."""
    ids = checkpoint_name(ids, "mok_ids")
    weights = checkpoint_name(weights, "mok_weights")
    x, ids, weights, experts, shared = vary_alike((x, ids, weights, experts, shared))
    if call.config.precision == "mxfp8":
        experts = tuple(_quantized(w) for w in experts)
    placement = call.placement
    expert_axis = placement.expert_axis if placement.ranks > 1 else None
    if call.implementation in ("cuda", "host"):
        dims = call.dims(x, ids, experts, shared)
        return ops.moe_ffi(dims, placement.index(), x, ids, weights, experts, shared)
    if call.implementation == "xla":
        return moe_xla(x, ids, weights, experts, shared, call.config.swiglu_limit, expert_axis)
    if expert_axis is not None:
        experts = jax.tree.map(lambda w: lax.all_gather(w, expert_axis, tiled=True), experts)
    if call.config.precision == "mxfp8":
        return moe_mxfp8_reference(x, ids, weights, experts, shared, call.config.swiglu_limit)
    w_gate, w_up, w_down = experts
    return moe_reference(x, ids, weights, w_gate, w_up, w_down, shared, call.config.swiglu_limit)


def _quantized(weight: jax.Array | Mxfp8Weight) -> Mxfp8Weight:
    """Here, where a device has its own experts only. Nothing but the weight itself has a gradient."""
    if not isinstance(weight, Mxfp8Weight):
        return quantize_weight(weight)
    forward, backward = lax.stop_gradient((weight.forward, weight.backward))
    return Mxfp8Weight(weight.weight, forward, backward)

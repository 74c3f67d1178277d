"""The only caller of jax.ffi: the "host" and "cuda" implementations as one differentiable call on one device.

Called by moe.py inside a fully manual region. Importing it loads the extension module for this CPU, and the
one for CUDA where JAX can use CUDA, and registers their targets.
"""

import contextlib
import dataclasses
import functools
import importlib
import importlib.util
import math
import os
import re
import sys
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jaxlib
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.custom_batching import custom_vmap
from jax.custom_derivatives import SymbolicZero
from jax.experimental.compute_on import compute_on

from mok_jax.config import DEFAULT_BARRIER_TIMEOUT_SECONDS, MoKConfig, check_multiple
from mok_jax.mxfp8 import NO_SECOND_DERIVATIVE, Mxfp8Weight, dequantized
from mok_jax.reference import accumulation_dtype, no_derivative

FORWARD, BACKWARD, PEERS = "mok_forward", "mok_backward", "_peers"
TARGETS = (FORWARD, BACKWARD, FORWARD + PEERS, BACKWARD + PEERS)
"""The FFI targets, for `jax.export.DisabledSafetyCheck.custom_call`."""


LEVEL_VARIABLE = "MOK_CPU_LEVEL"


def _load():
    """The host module built for the highest x86-64 level this CPU has; registers its targets.

    Raises:
      ImportError: no module for this Python, or a jaxlib older than the FFI headers: registering would
        then break the whole CPU backend.
      ValueError: MOK_CPU_LEVEL names no level, or one that this CPU lacks.
    """
    try:
        base = importlib.import_module("mok_jax._host_v2")
    except ModuleNotFoundError as error:
        raise ImportError(
            f"mok_jax: the extension modules for Python {sys.version_info[0]}.{sys.version_info[1]} are not installed; "
            "run python -m pip install . in the source tree"
        ) from error
    _check_version(base)
    levels = [level for level in ("v4", "v3", "v2") if base.cpu_has(f"x86-64-{level}")]
    level = os.environ.get(LEVEL_VARIABLE) or levels[0]
    if level not in levels:
        raise ValueError(f"{LEVEL_VARIABLE} must be one of {levels} on this CPU, got {level!r}; unset it for the first")
    module = importlib.import_module(f"mok_jax._host_{level}")
    for name, target in module.targets().items():
        jax.ffi.register_ffi_target(name, target, platform="cpu")
    return module


@functools.cache
def cuda():
    """The CUDA module; registers its targets. Needs no GPU, but plans for one.

    Raises:
      ImportError: mok_jax was built without it, or a jaxlib older than the FFI headers.
    """
    try:
        module = importlib.import_module("mok_jax._cuda")
    except ModuleNotFoundError as error:
        raise ImportError(
            "mok_jax was built without CUDA; reinstall it where a CUDA 13 compiler is found (nvcc on PATH, or CUDACXX)"
        ) from error
    _check_version(module)
    for name, target in module.targets().items():
        jax.ffi.register_ffi_target(name, target, platform="CUDA")
    return module


def _check_version(module) -> None:
    """Before any target is registered: one that the runtime refuses breaks the whole backend."""
    built, running = module.JAXLIB_VERSION, jaxlib.__version__
    if _version(running) < _version(built):
        raise ImportError(
            f"mok_jax was built for jaxlib {built} or newer, but jaxlib {running} is installed; upgrade jax and jaxlib"
        )


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", text)[:3])


_host: Any = _load()
# Now, not at the first call: a process may run nothing but what another one exported.
if any(importlib.util.find_spec(f"jax_cuda{version}_plugin") for version in (12, 13)):
    with contextlib.suppress(ImportError):  # which whoever asks for it gets
        cuda()


def _module(implementation: str):
    return cuda() if implementation == "cuda" else _host


def describe() -> dict[str, str]:
    """What `python -m mok_jax` says of the extension modules."""
    try:
        on_cuda = f"{cuda().__file__}, CUDA {cuda().CUDA_VERSION}"
    except ImportError as error:
        on_cuda = str(error)
    return {
        "extension module": _host.__file__,
        "FFI headers": f"jaxlib {_host.JAXLIB_VERSION}",
        "instruction set": _host.CPU_LEVEL,
        "CUDA module": on_cuda,
    }


class Gpu(NamedTuple):
    """What planning for a CUDA device must know of it."""

    capability: tuple[int, int]  # (9, 0)
    memory: int | None  # bytes that XLA may use, where it says so


@dataclasses.dataclass(frozen=True)
class Dims:
    """Sizes of one call on one device. `ranks` counts real ones, `config.virtual_ranks` those within.

    gpu: of implementation "cuda", else None. table: of the peers (distributed.Table.id), 0 for none.
    """

    tokens: int
    hidden: int
    intermediate: int
    shared_intermediate: int
    local_experts: int
    ranks: int
    top_k: int
    dtype: np.dtype
    config: MoKConfig
    implementation: str = "host"
    gpu: Gpu | None = None
    table: int = 0

    @property
    def portable(self) -> bool:
        """Whether "cuda" takes the kernels for any GPU: Hopper's own take bfloat16 in 16-byte pieces."""
        sizes = (self.hidden, self.intermediate, self.shared_intermediate)
        hopper = self.gpu is not None and self.gpu.capability == (9, 0)
        return self.config.portable or not hopper or self.dtype.name != "bfloat16" or any(s % 8 for s in sizes)

    @property
    def mxfp8(self) -> bool:
        return self.config.precision == "mxfp8"

    def plan(self, forward: bool = False):
        """The sizes of one (virtual) rank as the extension module computes them.

        Args:
          forward: for a forward pass, which has larger default minibatches; nothing else differs.

        Raises:
          TypeError: a dtype that the implementation lacks.
          ValueError: rows or tasks beyond int32, or tile sizes that are no multiples of each other or not there.
        """
        config, copies, module = self.config, self.config.virtual_ranks, _module(self.implementation)
        if self.implementation == "cuda":
            self._check_cuda(module)
        routes = self.ranks * self.tokens * self.top_k
        if routes >= 2**31:
            raise ValueError(
                "moe: ranks * tokens * top_k must be less than 2**31, got "
                f"{self.ranks} * {self.tokens} * {self.top_k}; split the tokens over several calls"
            )
        row_tile = config.row_tile or module.ROW_TILE
        check_multiple("minibatch", config.minibatch, "the row tile", row_tile)
        check_multiple("macrobatch", config.macrobatch, "the row tile", row_tile)
        plan = module.Dims(
            tokens=self.tokens // copies,
            hidden=self.hidden,
            intermediate=self.intermediate,
            shared_intermediate=self.shared_intermediate,
            local_experts=self.local_experts // copies,
            ranks=self.ranks * copies,
            top_k=self.top_k,
            row_tile=row_tile,
            minibatch=config.minibatch or 0,
            macrobatch=config.macrobatch or 0,
            portable=self.portable,
            forward=forward,
            peers=self.table != 0,
        )
        if plan.capacity >= 2**31:
            raise ValueError(
                f"moe: rows padded to the row tile must be less than 2**31, got {plan.capacity}; "
                "split the tokens over several calls, or use a smaller row_tile"
            )
        if self.implementation == "cuda":
            self._check_cuda_counts(plan)
        return plan

    def _check_cuda(self, module) -> None:
        if self.dtype.name not in ("float32", "bfloat16"):
            raise TypeError(
                f'moe: x must be float32 or bfloat16 for implementation "cuda", got {self.dtype.name}; '
                'cast x or use "xla"'
            )
        if self.config.row_tile not in (None, module.ROW_TILE):
            raise ValueError(
                f'moe: row_tile must be {module.ROW_TILE} or None for implementation "cuda", '
                f"got {self.config.row_tile}; leave it out"
            )
        if self.config.virtual_ranks > module.MAX_RANKS:
            raise ValueError(
                f'moe: virtual_ranks must be at most {module.MAX_RANKS} for implementation "cuda", '
                f"got {self.config.virtual_ranks}"
            )

    def _check_cuda_counts(self, plan) -> None:
        """Kernels count rows and tasks in 32 bits (Index in tasks.h)."""
        if plan.capacity + plan.macrobatch >= 2**31:  # where the last macrobatch would end
            raise ValueError(
                'moe: padded rows + macrobatch must be less than 2**31 for implementation "cuda", '
                f"got {plan.capacity} + {plan.macrobatch}; use a smaller macrobatch, or split the tokens over several "
                "calls"
            )
        limit = 2**31 - 2**16  # every multiprocessor takes a number or two beyond the last task
        if plan.most_tasks >= limit:
            raise ValueError(
                f'moe: tiles of a backward pass must be less than {limit} for implementation "cuda", got '
                f"{plan.most_tasks}; use a larger macrobatch than {plan.macrobatch}, or split the tokens over several "
                "calls"
            )

    def check(self) -> None:
        """Raises now what the call would raise when it is traced, and what XLA would when it compiles."""
        self.workspace_bytes(False, False, 0)
        self.config.timeout_seconds()
        if self.config.collective_stream and self.table != 0 and _version(jax.__version__) < (0, 11, 1):
            raise NotImplementedError(
                f"moe: collective_stream needs jax 0.11.1 or newer, this is {jax.__version__}; upgrade jax"
            )

    def workspace_bytes(self, backward: bool, context: bool, gradients: int) -> int:
        """Scratch of one call in bytes.

        Raises:
          ValueError: more than the GPU has; and as `plan`.
        """
        passed = plan, *_ = self._passed(backward, context, gradients)
        size = self.config.virtual_ranks * _module(self.implementation).workspace_bytes(*passed)
        if self.gpu is not None and self.gpu.memory is not None and size > self.gpu.memory:
            raise ValueError(
                f"moe: the scratch of the {'backward' if backward else 'forward'} pass must fit into the "
                f"{self.gpu.memory / 2**30:.2f} GiB of GPU memory that XLA may use, got {size / 2**30:.2f} GiB; "
                f"use a macrobatch smaller than {plan.macrobatch}, or split the tokens over several calls"
            )
        return size

    def arena_bytes(self) -> int:
        """Bytes of each rank's arena that this call needs."""
        return _module(self.implementation).arena_bytes(self.plan(), self.dtype.itemsize)

    def pulled_bytes(self, workspace, backward: bool, context: bool, gradients: int) -> jax.Array:
        """How many bytes of x and dy each (virtual) rank pulled, of the workspace that a call of "cuda" left.

        Returns: uint32 [virtual ranks, 2], the low word first.
        """
        at = cuda().pulled_bytes_offset(*self._passed(backward, context, gradients))
        words = workspace.reshape(self.config.virtual_ranks, -1)[:, at : at + 8]
        return lax.bitcast_convert_type(words.reshape(-1, 2, 4), jnp.uint32)

    def _passed(self, backward: bool, context: bool, gradients: int):
        """What sizes the ring, as the extension module takes it."""
        module = _module(self.implementation)
        pass_ = module.Pass(backward=backward, context=context, gradients=gradients, mxfp8=self.mxfp8)
        wide = jnp.dtype(accumulation_dtype(self.dtype)).itemsize
        return self.plan(forward=not backward), pass_, self.dtype.itemsize, wide

    def attributes(self, backward: bool, context: bool, gradients: int) -> dict[str, Any]:
        """A call's attributes, the same on every rank."""
        plan, config = self.plan(forward=not backward), self.config
        integers = dict(
            ranks=self.ranks,
            virtual_ranks=config.virtual_ranks,
            row_tile=plan.row_tile,
            minibatch=plan.minibatch,
            macrobatch=plan.macrobatch,
            context=int(context),
            gradients=gradients,
            mxfp8=int(self.mxfp8),
            num_threads=config.num_threads or 0,
            portable=int(self.portable),
            num_comm_sms=config.num_comm_sms or 0,
            random_order=-1 if config.random_order is None else config.random_order,
            stuck_counter=-1 if config.stuck_counter is None else config.stuck_counter,
            table=self.table,
        )
        limit = math.inf if config.swiglu_limit is None else config.swiglu_limit
        barrier = DEFAULT_BARRIER_TIMEOUT_SECONDS if config.barrier_timeout is None else config.barrier_timeout
        floats = dict(swiglu_limit=limit, timeout=config.timeout_seconds(), barrier_timeout=barrier)
        return {name: np.int64(v) for name, v in integers.items()} | {name: np.float64(v) for name, v in floats.items()}


class Residuals(NamedTuple):
    """What the forward pass leaves for the backward pass; sizes 0 where there is nothing to keep.

    row_source: int32 [virtual ranks, capacity], rank * tokens * top_k + route of each row, -1 for none.
    row_offset: int32 [virtual ranks, local experts + 1]; row_count: int32 [virtual ranks, local experts].
    x, gate, up: of the first macrobatch's rows; shared_gate, shared_up: of the tokens.
    """

    row_source: jax.Array
    row_offset: jax.Array
    row_count: jax.Array
    x: jax.Array
    gate: jax.Array
    up: jax.Array
    shared_gate: jax.Array
    shared_up: jax.Array


# Which weight gradients are wanted; GradientBit of decode.h.
GATE_UP, DOWN, SHARED_GATE_UP, SHARED_DOWN = 1, 2, 4, 8


def forward(
    dims: Dims, place, x, ids, router_weights, weights, *, context: bool
) -> tuple[jax.Array, Residuals, jax.Array]:
    """One forward call: y, the residuals, and the workspace as it was left.

    Args:
      place: int32 [2], this device's rank and group.
      weights: `_operands` of the forward pass.
      context: keep what the backward pass needs.
    """
    plan, copies = dims.plan(), dims.config.virtual_ranks
    kept = copies * plan.macrobatch if context else 0
    kept_tokens = dims.tokens if context else 0
    exchanges = dims.ranks * copies > 1 or dims.table != 0
    shapes = [
        (x.shape, x.dtype),
        ((copies, plan.capacity), jnp.int32),
        ((copies, dims.local_experts // copies + 1), jnp.int32),
        ((copies, dims.local_experts // copies), jnp.int32),
        ((kept if exchanges else 0, dims.hidden), x.dtype),
        ((kept, dims.intermediate), x.dtype),
        ((kept, dims.intermediate), x.dtype),
        ((kept_tokens, dims.shared_intermediate), x.dtype),
        ((kept_tokens, dims.shared_intermediate), x.dtype),
        ((dims.workspace_bytes(False, context, 0),), jnp.uint8),
    ]
    arguments = (place, x, ids, router_weights, *weights)
    y, *kept_arrays, workspace = _call(FORWARD, dims, context, 0, shapes, arguments)
    return y, Residuals(*kept_arrays), workspace


def backward(
    dims: Dims,
    place,
    d_y,
    x,
    ids,
    router_weights,
    weights,
    residuals: Residuals,
    *,
    context: bool,
    gradients: int,
    dtypes,
) -> list[jax.Array]:
    """One backward call: dx, the router weights' gradient, the six weight gradients, and the workspace as it was left.

    Args:
      weights: `_operands` of the backward pass.
      gradients: bits of the weight gradients wanted; the others come back with size 0.
      dtypes: of the six weight gradients.
    """
    copies = dims.config.virtual_ranks
    wanted = [gradients & bit for bit in (GATE_UP, GATE_UP, DOWN, SHARED_GATE_UP, SHARED_GATE_UP, SHARED_DOWN)]
    shapes = [(x.shape, x.dtype), (router_weights.shape, router_weights.dtype)]
    for i, (weight, want, dtype) in enumerate(zip(weights[:6], wanted, dtypes, strict=True)):
        if i >= 3 and copies > 1:  # one share for each virtual rank
            shapes.append(((copies if want else 0, *weight.shape), accumulation_dtype(x.dtype)))
        else:
            shapes.append((weight.shape if want else (0,), dtype))
    shapes.append(((dims.workspace_bytes(True, context, gradients),), jnp.uint8))
    arguments = (place, d_y, x, ids, router_weights, *weights, *residuals)
    d_x, d_router, *d_weights, workspace = _call(BACKWARD, dims, context, gradients, shapes, arguments)
    if copies > 1:
        d_weights[3:] = [w.sum(axis=0).astype(t) for w, t in zip(d_weights[3:], dtypes[3:], strict=True)]
    return [d_x, d_router, *d_weights, workspace]


def _call(target: str, dims: Dims, context: bool, gradients: int, shapes, arguments) -> list[jax.Array]:
    # The results vary over the mesh axes that x varies over; a plain ShapeDtypeStruct would claim that
    # they do not.
    like = jax.typeof(arguments[1])
    results = [like.update(shape=shape, dtype=jnp.dtype(dtype), weak_type=False) for shape, dtype in shapes]
    method = "sequential" if dims.ranks == 1 else None
    call = jax.ffi.ffi_call(target + PEERS * (dims.table != 0), results, vmap_method=method)
    run: Any = functools.partial(call, **dims.attributes(target == BACKWARD, context, gradients))
    if dims.config.collective_stream and dims.table != 0:
        on_stream: Any = compute_on  # jax 0.10 declares another one
        run = on_stream(run, compute_type="gpu_stream:collective", out_memory_spaces=jax.memory.Space.Device)
    # `moe_ffi` has the first derivative, nothing has the second.
    text = f'moe: implementation "{dims.implementation}" has no second derivative; '
    text += 'use implementation="xla" or "reference"'
    run = no_derivative(run, NO_SECOND_DERIVATIVE if dims.mxfp8 else text)
    return list((run if dims.ranks == 1 else _no_vmap(run, dims.implementation))(*arguments))


def _no_vmap(run, implementation: str):
    wrapped = custom_vmap(run)

    @wrapped.def_vmap
    def refuse(axis_size, in_batched, *arguments):
        raise NotImplementedError(
            f'moe: vmap across the ranks of an expert axis is not supported by implementation "{implementation}"; '
            'vmap inside the shard or use "xla"'
        )

    return wrapped


# ---- the differentiable call ----


def _bits(weights_wanted) -> int:
    """Which of the pairs that backward computes together hold a wanted weight."""
    gate, up, down, shared_gate, shared_up, shared_down = weights_wanted
    return (
        GATE_UP * (gate or up) + DOWN * down + SHARED_GATE_UP * (shared_gate or shared_up) + SHARED_DOWN * shared_down
    )


def _operands(dims: Dims, x, weights, quantized, backward: bool):
    """What a call reads of the weights, in its order.

    The six weights in x's dtype; the shared ones of width 0 where there is no shared expert. With MXFP8 the routed
    ones have the values of the forward pass, and in the backward pass three more follow, of the input gradient.
    """
    rounded = [w.astype(x.dtype) for w in weights[0 if not quantized else 3 :]]
    if not quantized:
        return rounded
    along_rows, along_columns = zip(*quantized, strict=True)
    if not backward:
        return [*map(dequantized, along_rows), *rounded]
    gate, up, down = map(dequantized, along_columns)
    plan = dims.plan()
    if dims.config.save_context and plan.macrobatch >= plan.capacity:
        return [gate, up, down, *rounded, gate, up, down]  # nothing is computed again: no forward weight is read
    return [*map(dequantized, along_rows[:2]), down, *rounded, gate, up, down]


def moe_ffi(dims: Dims, place, x, ids, router_weights, experts, shared):
    """y of one device's tokens; see `reference.moe_reference`. Weights may be float32 under a bfloat16 x.

    Args:
      place: int32 [2], this device's rank and group.
      experts: three arrays, or three `Mxfp8Weight`.
    """
    quantized: tuple = ()
    if isinstance(experts[0], Mxfp8Weight):
        quantized = tuple((w.forward, w.backward) for w in experts)
        experts = tuple(w.weight for w in experts)
    if shared is None:
        # Of x, not constants, which a scan's derivative would take out of its loop: as with residuals below, XLA of jax
        # 0.11.2 crashes on CPU over arrays of size 0 between two shard_maps.
        none = jax.lax.stop_gradient(x[:0])
        shared = (none.T, none.T, none)
    return _moe_ffi(dims, place, x, ids, router_weights, (*experts, *shared), quantized)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _moe_ffi(dims, place, x, ids, router_weights, weights, quantized):
    operands = _operands(dims, x, weights, quantized, False)
    return forward(dims, place, x, ids, router_weights, operands, context=False)[0]


def _moe_ffi_forward(dims, place, x, ids, router_weights, weights, quantized):
    wanted = [a.perturbed for a in (x, router_weights, *weights)]
    arguments = (place, x, ids, router_weights, weights, quantized)
    arguments = jax.tree.map(lambda a: a.value, arguments, is_leaf=lambda a: hasattr(a, "perturbed"))
    place, x, ids, router_weights, weights, quantized = arguments
    operands = _operands(dims, x, weights, quantized, False)
    y, residuals, _ = forward(dims, place, x, ids, router_weights, operands, context=dims.config.save_context)
    schedule = (checkpoint_name(a, "mok_schedule") for a in residuals[:3])
    context = (checkpoint_name(a, "mok_context") for a in residuals[3:])
    residuals = Residuals(*schedule, *context)
    # Careful: what differs from trace to trace must be in a residual's shape, never in its tree: a cached
    # jit keeps one tree for all traces, the last one's, and gradients that are wanted would come out zero.
    flags = jnp.zeros_like(x, shape=(sum(want << i for i, want in enumerate(wanted)), 0))
    return checkpoint_name(y, "mok_out"), (*arguments, residuals, flags)


def _moe_ffi_backward(dims, saved, d_y):
    place, x, ids, router_weights, weights, quantized, residuals, flags = saved
    x_wanted, router_wanted, *wanted = (bool(flags.shape[0] >> i & 1) for i in range(2 + len(weights)))
    if isinstance(d_y, SymbolicZero):
        return None, None, None, None, None, None
    # Careful: XLA of jax 0.11.2 crashes on CPU over a residual of size 0 that leaves one shard_map and enters another.
    weights, residuals = jax.tree.map(lambda a: a if a.size else jnp.zeros_like(a), (weights, residuals))
    d_x, d_router, *d_weights, _ = backward(
        dims,
        place,
        d_y,
        x,
        ids,
        router_weights,
        _operands(dims, x, weights, quantized, True),
        residuals,
        context=dims.config.save_context,
        gradients=_bits(wanted),
        dtypes=[w.dtype for w in weights],
    )
    d_weights = tuple(d if want else None for d, want in zip(d_weights, wanted, strict=True))
    return None, d_x if x_wanted else None, None, d_router if router_wanted else None, d_weights, None


_moe_ffi.defvjp(_moe_ffi_forward, _moe_ffi_backward, symbolic_zeros=True)

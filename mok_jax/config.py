"""The one frozen configuration of the layer; every limit that needs no shapes is checked here."""

import dataclasses
import math
import os

import numpy as np

DEFAULT_TIMEOUT_SECONDS = 20.0
DEFAULT_BARRIER_TIMEOUT_SECONDS = 300.0
TIMEOUT_VARIABLE = "MOK_TIMEOUT"


@dataclasses.dataclass(frozen=True)
class MoKConfig:
    """How `moe` computes: nothing here changes what it computes, except `swiglu_limit` and `precision`.

    The other fields are about the ring and the ranks of "cuda" and "host"; "xla" and "reference", which
    have neither, pay them no heed beyond these checks.

    Attributes:
      swiglu_limit: None, or a finite float >= 0. The gate is clamped to at most this value and the
        up projection to [-limit, limit]; the gradient is zero where a value lies outside.
      precision: None multiplies in x's dtype. "mxfp8", for a bfloat16 x: the routed experts multiply
        values of eight bits with a scale for each 32 (e4m3, e8m0), in the forward pass and the input
        gradient; `mok_jax.mxfp8_reference` is the definition.
      row_tile: rows of one tile, a multiple of 8; each expert's rows are padded to it. None takes
        the implementation's own, 128. "cuda" has no other.
      minibatch: rows, about, that each product of the expert FFN takes at a time, a multiple of the
        row tile; where balanced experts have fewer, rows of whole experts. None: two waves of tiles; on
        a GPU at least two balanced experts' rows, up to 4096; in a forward pass twice as many.
      macrobatch: rows that the ring buffer holds, a multiple of the row tile. Memory is bounded by
        it whatever the routing; rows beyond it are recomputed in the backward pass. None: all rows
        on one rank, the balanced load plus a quarter on several.
      save_context: keep the first macrobatch's activations for the backward pass; False recomputes
        them there.
      virtual_ranks: >= 1. Split one device into this many ranks of the expert axis, which exchange
        rows as real ranks do; tokens and experts must be divisible by it.
      num_threads: the most threads that "host" uses for one call, None for all of XLA's pool.
      portable: "cuda" takes the kernels that run on any GPU on Hopper too.
      num_comm_sms: the most multiprocessors that "cuda" gives to moving rows between ranks, None for
        its own choice.
      timeout: seconds > 0 that "host" waits for all ranks of a call to arrive before it reports the
        missing ones, and "cuda" for one tile inside a running kernel, whatever was queued before it,
        before it reports that; the next call raises the report. None: the environment variable
        MOK_TIMEOUT, else 20.
      barrier_timeout: seconds > 0 that "cuda" waits at a barrier for the other GPUs of a group, which may be
        compiling or saving a checkpoint. None: 300.
      collective_stream: put calls of several GPUs on the stream of XLA's own collectives, in order with them, so that
        the two never run at once: no kernel of NCCL's shares the multiprocessors, and none hides behind the layer.
        Of all layers of a program alike: calls on two streams may use the arenas at once, which ends in an error.
      random_order: None, or a seed in [0, 2**31): a test mode of "host" that runs its tasks in
        random order, driven by the readiness counters alone, over a ring filled with NaN. "cuda"
        fills what it leaves to be written with NaN, and several GPUs pause between their phases.
      stuck_counter: None, or the index of a readiness counter that "cuda" never fills: a test mode that
        shows what a wait does that is in vain.

    Raises:
      TypeError: a field of another type.
      ValueError: a field out of range.
    """

    swiglu_limit: float | None = None
    precision: str | None = None
    row_tile: int | None = None
    minibatch: int | None = None
    macrobatch: int | None = None
    save_context: bool = True
    virtual_ranks: int = 1
    num_threads: int | None = None
    portable: bool = False
    num_comm_sms: int | None = None
    timeout: float | None = None
    barrier_timeout: float | None = None
    collective_stream: bool = False
    random_order: int | None = None
    stuck_counter: int | None = None

    def __post_init__(self) -> None:
        if self.precision not in (None, "mxfp8"):
            wrong = ValueError if isinstance(self.precision, str) else TypeError
            raise wrong(f'MoKConfig: precision must be "mxfp8" or None, got {self.precision!r}')
        _check_number("swiglu_limit", self.swiglu_limit, "a finite number >= 0 or None", lambda v: v >= 0)
        for name in ("timeout", "barrier_timeout"):
            _check_number(name, getattr(self, name), "a finite number of seconds > 0 or None", lambda v: v > 0)
        for name in ("row_tile", "minibatch", "macrobatch", "num_threads", "num_comm_sms"):
            _check_integer(name, getattr(self, name), "an integer in [1, 2**31) or None", lambda v: 1 <= v < 2**31)
        for name in ("random_order", "stuck_counter"):
            _check_integer(name, getattr(self, name), "an integer in [0, 2**31) or None", lambda v: 0 <= v < 2**31)
        if self.virtual_ranks is None:
            raise TypeError("MoKConfig: virtual_ranks must be an integer >= 1, got None")
        _check_integer("virtual_ranks", self.virtual_ranks, "an integer >= 1", lambda v: v >= 1)
        for field in dataclasses.fields(self):  # NumPy's integers overflow
            if isinstance(getattr(self, field.name), np.integer):
                object.__setattr__(self, field.name, int(getattr(self, field.name)))
        for name in ("save_context", "portable", "collective_stream"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"MoKConfig: {name} must be True or False, got {getattr(self, name)!r}")
        if self.row_tile is not None and self.row_tile % 8:
            raise ValueError(f"MoKConfig: row_tile must be a multiple of 8, got {self.row_tile}")
        for name in ("minibatch", "macrobatch"):
            check_multiple(name, getattr(self, name), "row_tile", self.row_tile)

    def timeout_seconds(self) -> float:
        """The time limit in force: the field, else the environment variable, else 20 s."""
        if self.timeout is not None:
            return float(self.timeout)
        text = os.environ.get(TIMEOUT_VARIABLE)
        if not text:
            return DEFAULT_TIMEOUT_SECONDS
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not (math.isfinite(value) and value > 0):
            raise ValueError(f"{TIMEOUT_VARIABLE} must be a number of seconds > 0, got {text!r}; unset it for 20")
        return value


def check_multiple(name: str, value: int | None, of_name: str, of: int | None) -> None:
    """Raises ValueError where both are given and `value` is no multiple of `of`."""
    if value is not None and of is not None and value % of:
        raise ValueError(
            f"MoKConfig: {name} must be a multiple of {of_name}, got {name}={value} and {of_name}={of}; "
            f"use {name}={-(-value // of) * of}"
        )


def _check_number(name, value, requirement, holds):
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, (int, float, np.integer, np.floating)):
        raise TypeError(f"MoKConfig: {name} must be {requirement}, got {value!r}")
    try:
        finite = math.isfinite(value)
    except OverflowError:  # an integer that no float can hold
        finite = False
    if not (finite and holds(value)):
        raise ValueError(f"MoKConfig: {name} must be {requirement}, got {value!r}")


def _check_integer(name, value, requirement, holds):
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise TypeError(f"MoKConfig: {name} must be {requirement}, got {value!r}")
    if not holds(value):
        raise ValueError(f"MoKConfig: {name} must be {requirement}, got {value!r}")

"""MXFP8 in jnp: the codec, and weights quantised for both passes.

Called by moe.py and by users; ffi/numerics.h has the same codec, equal bit for bit. Values are float8_e4m3fn in
blocks of 32 along one axis, the last one short where 32 does not divide it; each block has a scale
2^ceil(log2(amax / 448)), a power of two of at least 2^-127, kept as its biased exponent (e8m0).

Source: OCP Microscaling Formats (MX) v1.0; the scale rounded up as in Mixture-of-Kittens.
"""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

BLOCK = 32
NO_SECOND_DERIVATIVE = (
    'moe: precision="mxfp8" has no second derivative; leave precision out and use implementation="xla" or "reference"'
)

_INFINITY = 0x7F800000
_MAGNITUDE = 0x7FFFFFFF
_BELOW_NORMAL = 2.0**14  # whose last bit is 2^-9, the least step of e4m3


@functools.partial(jax.tree_util.register_dataclass, data_fields=["values", "scales"], meta_fields=["axis"])
@dataclasses.dataclass(frozen=True)
class Mxfp8:
    """An array in MXFP8.

    Attributes:
      values: float8_e4m3fn [...].
      scales: uint8, the shape of `values` with n / 32, rounded up, for n along `axis`: biased exponents.
      axis: negative, the one that blocks run along.
    """

    values: jax.Array
    scales: jax.Array
    axis: int

    def dequantize(self, dtype=jnp.bfloat16) -> jax.Array:
        """values * scales as bfloat16 or float32.

        Exact in bfloat16 too, except that 2^128 and more is infinite, and that results below 2^-126 are zero on a
        backend that has no subnormal numbers (XLA's for CPUs).
        """
        if jnp.dtype(dtype).name not in ("bfloat16", "float32"):
            raise TypeError(f"Mxfp8.dequantize: dtype must be bfloat16 or float32, got {dtype!r}")
        n = self.values.shape[self.axis]
        exponents = jnp.repeat(self.scales, BLOCK, axis=self.axis)
        exponents = lax.slice_in_dim(exponents, 0, n, axis=self.axis % self.values.ndim).astype(jnp.uint32)
        # In two factors: the least scale is subnormal, which XLA takes for zero on some backends.
        half = exponents >> 1
        first, second = (lax.bitcast_convert_type(e << 23, jnp.float32) for e in (half + 64, exponents - half + 63))
        values = self.values.astype(jnp.float32) * first * second
        return jnp.where(exponents == 255, jnp.nan, values).astype(dtype)


def quantize_mxfp8(w: jax.Array, axis: int) -> Mxfp8:
    """MXFP8 values of `w` and one scale for each 32 of them along `axis`.

    Rounds to nearest even. A block with an infinity or a NaN has the scale 2^120: an infinity becomes 448, which
    dequantises to an infinity again, a NaN stays one, and the block's other values become small or 0. Nothing has a
    gradient: `quantize_weight` says how weights get theirs.

    Args:
      w: bfloat16 or float32, of any shape.
      axis: along which blocks run: the one that a product contracts.

    Raises:
      TypeError: another dtype.
      ValueError: no such axis.

    Example:
      >>> import jax.numpy as jnp, mok_jax
      >>> q = mok_jax.quantize_mxfp8(jnp.float32([[1, 100, 448, 500]]), axis=1)
      >>> q.dequantize(jnp.float32).tolist(), q.scales.tolist()
      ([[1.0, 96.0, 448.0, 512.0]], [[128]])
    """
    name = _dtype_of("quantize_mxfp8", w)
    if not isinstance(axis, (int, np.integer)) or isinstance(axis, bool) or not -w.ndim <= axis < w.ndim:
        raise ValueError(f"quantize_mxfp8: axis must be an integer, one of the {w.ndim} axes of w, got {axis!r}")
    axis = int(axis) % w.ndim
    w = _gathered(lax.stop_gradient(jnp.asarray(w)), axis)
    n = w.shape[axis]
    # All on integers: XLA takes subnormal numbers for zero on some backends.
    if name == "bfloat16":
        bits = lax.bitcast_convert_type(w, jnp.uint16).astype(jnp.uint32) << 16
    else:
        bits = lax.bitcast_convert_type(w, jnp.uint32)
    blocks = -(-n // BLOCK)
    padding = [(0, blocks * BLOCK - n if i == axis else 0) for i in range(w.ndim)]
    bits = jnp.pad(bits, padding).reshape(*w.shape[:axis], blocks, BLOCK, *w.shape[axis + 1 :])
    magnitude = bits & _MAGNITUDE
    amax = jnp.minimum(magnitude.max(axis=axis + 1, keepdims=True), _INFINITY)
    # 448 = 1.75 * 2^8: a significand above 1.75 carries into the exponent.
    scales = jnp.maximum(((amax + 0x1FFFFF) >> 23).astype(jnp.int32) - 8, 0)
    codes = _to_e4m3(magnitude, scales) | (bits >> 24 & 0x80)
    codes = codes.astype(jnp.uint8).reshape(*w.shape[:axis], blocks * BLOCK, *w.shape[axis + 1 :])
    values = lax.bitcast_convert_type(lax.slice_in_dim(codes, 0, n, axis=axis), jnp.float8_e4m3fn)
    return Mxfp8(values, scales.squeeze(axis + 1).astype(jnp.uint8), axis - w.ndim)


def _gathered(w: jax.Array, axis: int) -> jax.Array:
    """`w`, not split along `axis` where Explicit mesh axes split it: blocks may straddle devices."""
    sharding = jax.typeof(w).sharding
    parts = list(sharding.spec) + [None] * (w.ndim - len(sharding.spec))
    if parts[axis] is None:
        return w
    parts[axis] = None
    return jax.sharding.reshard(w, NamedSharding(sharding.mesh, P(*parts)))


def _dtype_of(who: str, w) -> str:
    name = getattr(getattr(w, "dtype", None), "name", type(w).__name__)
    if name not in ("bfloat16", "float32"):
        raise TypeError(f"{who}: w must be a bfloat16 or float32 array, got {name}; cast it")
    return name


def _to_e4m3(magnitude, scales):
    """uint32 codes of float32 magnitudes (as bits) over 2^(scales - 127), to nearest even, saturating."""
    exponent = (magnitude >> 23).astype(jnp.int32)
    fraction = magnitude & 0x7FFFFF
    # The significand as a float of its own has a leading bit, also that of a subnormal number.
    significand = jnp.where(exponent > 0, fraction | 0x800000, fraction)
    bits = lax.bitcast_convert_type(significand.astype(jnp.float32), jnp.uint32)
    scaled_exponent = (bits >> 23).astype(jnp.int32) + jnp.maximum(exponent, 1) - scales - 23
    scaled = jnp.where(
        scaled_exponent > 0, (jnp.maximum(scaled_exponent, 0).astype(jnp.uint32) << 23) | (bits & 0x7FFFFF), 0
    ).astype(jnp.uint32)
    normal = ((scaled + 0x7FFFF + (scaled >> 20 & 1)) >> 20) - (120 << 3)
    step = lax.bitcast_convert_type(jnp.float32(_BELOW_NORMAL), jnp.uint32)
    shifted = lax.bitcast_convert_type(scaled, jnp.float32) + jnp.float32(_BELOW_NORMAL)
    codes = jnp.where(scaled < 121 << 23, lax.bitcast_convert_type(shifted, jnp.uint32) - step, normal)
    codes = jnp.where(magnitude == _INFINITY, 0x7E, jnp.minimum(codes, 0x7E))
    return jnp.where(magnitude > _INFINITY, 0x7F, codes).astype(jnp.uint32)


class Mxfp8Weight(NamedTuple):
    """A weight [..., in, out] and what its products read in its stead; made by `quantize_weight`.

    Attributes:
      weight: the parameter itself, which gets the gradient; its values are not read.
      forward: quantised along `in`, which the forward pass contracts; or the same values as bfloat16.
      backward: quantised along `out`, which the input gradient contracts; likewise.
    """

    weight: jax.Array
    forward: Mxfp8 | jax.Array
    backward: Mxfp8 | jax.Array

    def dequantize(self) -> "Mxfp8Weight":
        """With the same values as bfloat16: four bytes an element instead of two, which "cuda" and "host", whose
        products take bfloat16, then need not make in every call."""
        return self._replace(forward=dequantized(self.forward), backward=dequantized(self.backward))


def dequantized(q: Mxfp8 | jax.Array) -> jax.Array:
    """The values of `forward` or `backward` of an `Mxfp8Weight`, as bfloat16."""
    return q.dequantize() if isinstance(q, Mxfp8) else q


def quantize_weight(w: jax.Array) -> Mxfp8Weight:
    """`w` with its MXFP8 values for both passes, which `moe` takes in place of `w`, or what `dequantize` makes of it.

    The gradient passes straight through to `w`, as if it had not been quantised. To quantise once for several
    calls (an optimiser step of many microbatches), do it outside of the loss and put the differentiated parameter
    back: `moe(..., q._replace(weight=w), ...)`. The pair belongs to the value of `w`: quantise again when it changes.

    Args:
      w: bfloat16 or float32 [..., in, out].

    Raises:
      TypeError: another dtype.
      ValueError: fewer than two axes.
    """
    _dtype_of("quantize_weight", w)
    if w.ndim < 2:
        raise ValueError(f"quantize_weight: w must be [..., in, out], got {w.dtype.name}{list(w.shape)}")
    return Mxfp8Weight(w, quantize_mxfp8(w, -2), quantize_mxfp8(w, -1))

"""The layer in plain jnp: the definition that every implementation must match.

Called by moe.py on one rank's tokens and all experts. It may assume checked arguments. It is written
to be read, not to be fast: every expert sees every token.
"""

import jax
import jax.numpy as jnp
from jax import lax

HIGHEST = lax.Precision.HIGHEST


def accumulation_dtype(dtype):
    """float64 for float64, else float32: the dtype of every sum."""
    return jnp.float64 if dtype == jnp.float64 else jnp.float32


def swiglu(gate, up, limit=None):
    """h = silu(g) * u, with g clamped above and u on both sides where `limit` is given.

    The gradient is zero outside the limits and passes where a value equals one.
    """
    if limit is not None:
        inside_gate = gate <= limit
        inside_up = jnp.abs(up) <= limit
        # A NaN is inside nothing and must stay one.
        gate = jnp.where(inside_gate | jnp.isnan(gate), gate, lax.stop_gradient(jnp.full_like(gate, limit)))
        up = jnp.where(inside_up | jnp.isnan(up), up, lax.stop_gradient(jnp.sign(up) * limit))
    return gate * jax.nn.sigmoid(gate) * up


def round_through(value, dtype):
    """Rounds to `dtype` and back; the gradient passes as if nothing had been rounded.

    So the gradient of a float32 weight under a bfloat16 x is never rounded to bfloat16.
    """
    if value.dtype == dtype:
        return value
    rounded = value.astype(dtype).astype(value.dtype)
    # `value + (rounded - value)` would not give the rounded bits, nor keep an infinity.
    return straight_through(value, rounded)


@jax.custom_jvp
def straight_through(value, rounded):
    """`rounded`; the gradient passes to `value` as if they were the same."""
    del value
    return rounded


@straight_through.defjvp
def _straight_through_jvp(primals, tangents):
    return straight_through(*primals), tangents[0]


def no_derivative(run, text):
    """`run`, which raises NotImplementedError with `text` where it is differentiated."""
    wrapped = jax.custom_jvp(run)

    @wrapped.defjvp
    def refuse(primals, tangents):
        raise NotImplementedError(text)

    return wrapped


def expert_ffn(x, w_gate, w_up, w_down, dtype, limit=None, routed=True):
    """One expert over rows: g = x Wg, u = x Wu, o = act(g, u) Wd, each rounded to `dtype`.

    Args:
      x: accumulation dtype [rows, hidden], already rounded to `dtype`.
      w_gate, w_up: [hidden, width]; w_down: [width, hidden]; any float dtype, rounded to `dtype`.
      routed: bool [rows, 1], False for rows that are zero and whose results are not used: they reach no gradient, even
        where they meet an infinite weight.

    Returns: accumulation dtype [rows, hidden], rounded to `dtype`.
    """
    w_gate, w_up, w_down = (round_through(w.astype(x.dtype), dtype) for w in (w_gate, w_up, w_down))
    gate = round_through(jnp.dot(x, w_gate, precision=HIGHEST), dtype)
    up = round_through(jnp.dot(x, w_up, precision=HIGHEST), dtype)
    gate, up = jnp.where(routed, gate, 0), jnp.where(routed, up, 0)
    h = round_through(swiglu(gate, up, limit), dtype)
    return round_through(jnp.dot(h, w_down, precision=HIGHEST), dtype)


def moe_reference(x, expert_ids, router_weights, w_gate, w_up, w_down, shared=None, limit=None):
    """y[t] = sum_k w[t,k] * FFN_{ids[t,k]}(x[t]) + FFN_shared(x[t]).

    Args:
      x: [tokens, hidden].
      expert_ids: int32 [tokens, top_k]; an id outside [0, experts) contributes nothing.
      router_weights: accumulation dtype [tokens, top_k].
      w_gate, w_up: [experts, hidden, intermediate]; w_down: [experts, intermediate, hidden].
      shared: None or (w_gate, w_up, w_down) without the leading axis and with a width of its own.
      limit: the clamp of `swiglu`.

    Returns: y, x.dtype [tokens, hidden], rounded once from sums in the accumulation dtype.
    """
    dtype = x.dtype
    wide_x = x.astype(accumulation_dtype(dtype))

    def visit(returned, expert):
        index, weights = expert
        routed = expert_ids == index
        # Rows of other experts are zeros, not merely unused: a NaN among them would reach this
        # expert's weight gradient as NaN * 0.
        here = routed.any(axis=1, keepdims=True)
        rows = jnp.where(here, wide_x, 0)
        # For the same reason an expert without rows has an exactly zero gradient whatever its weights hold.
        weights = [jnp.where(routed.any(), w, 0) for w in weights]
        out = expert_ffn(rows, *weights, dtype, limit, here)
        return jnp.where(routed[:, :, None], out[:, None, :], returned), None

    # zeros_like: inside a shard_map the carry must vary over the axes that x varies over.
    returned = jnp.zeros_like(wide_x, shape=(*expert_ids.shape, x.shape[1]))
    indices = jnp.arange(w_gate.shape[0], dtype=expert_ids.dtype)
    returned, _ = lax.scan(visit, returned, (indices, (w_gate, w_up, w_down)))
    valid = (expert_ids >= 0) & (expert_ids < w_gate.shape[0])
    y = (jnp.where(valid, router_weights, 0)[:, :, None] * returned).sum(axis=1)
    if shared is not None:
        y = y + expert_ffn(wide_x, *shared, dtype, limit)
    return y.astype(dtype)

"""The layer in MXFP8 in plain jnp: the definition of `MoKConfig(precision="mxfp8")`.

Called by moe.py; xla.py takes the experts' FFN and the sum over slots from here and has products of its own. Every
value that the routed experts multiply is rounded to MXFP8 once, where it is made, along the axis that the next
product contracts, and used everywhere as it is then:

    x  = Q(x)                    along H    gate, up; dWg, dWu
    h  = Q(act(x Wg, x Wu))      along I    down; dWd (as w * h), dw
    dY = Q(dY)                   along H    dh' = dY Wd^T; dWd
    dg, du = Q(act'(w * dh'))    along I    dx = dg Wg^T + du Wu^T; dWg, dWu
    W  = Q(W)                    along the rows in the forward pass, along the columns in the input gradient

Weight gradients multiply these values as bfloat16, which holds them exactly, and go straight through to the weights
that were quantised. All else is as in reference.py: outputs of products are rounded to bfloat16, sums are float32.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from mok_jax.mxfp8 import NO_SECOND_DERIVATIVE, dequantized, quantize_mxfp8
from mok_jax.reference import HIGHEST, accumulation_dtype, expert_ffn, no_derivative, straight_through, swiglu


class Products(NamedTuple):
    """How rows meet the weights of their experts; sums in float32.

    Attributes:
      dot: (rows [rows, m], weights [..., m, n], groups) -> [rows, n].
      outer: (rows [rows, m], d_out [rows, n], groups) -> [..., m, n], summed over an expert's rows.
    """

    dot: Callable[[jax.Array, jax.Array, Any], jax.Array]
    outer: Callable[[jax.Array, jax.Array, Any], jax.Array]


def round_to_mxfp8(rows):
    """bfloat16 [..., n] to MXFP8 and back; it has no gradient."""
    return quantize_mxfp8(rows, -1).dequantize()


def quantize_through(x):
    """x, bfloat16 values as float32 [tokens, hidden], rounded to MXFP8; the gradient passes as if it were not."""
    return straight_through(x, round_to_mxfp8(x.astype(jnp.bfloat16)).astype(x.dtype))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def quantized_ffn(products, limit, rows, weights, groups, experts):
    """o = act(x Wg, x Wu) Wd of each row.

    Its gradient is that of w * o with respect to what it takes, w included, if it is handed the gradient of w * o:
    so that dY need not be multiplied by w before it is quantised. `weighted_sum` hands it on so.

    Args:
      rows: bfloat16 [rows, hidden], MXFP8 values.
      weights: float32 [rows], the router weight of each.
      groups: what `products` need to know of the rows; no gradient.
      experts: three `Mxfp8Weight`.

    Returns: bfloat16 [rows, hidden].
    """
    return _ffn(products, limit, rows, groups, experts)[0]


def _ffn(products, limit, rows, groups, experts):
    gate, up, down = (dequantized(weight.forward) for weight in experts)
    gate = _round(products.dot(rows, gate, groups))
    up = _round(products.dot(rows, up, groups))
    return _round(products.dot(_activation(gate, up, limit), down, groups)), gate, up


def _round(value):
    """float32 to bfloat16, for certain: XLA may leave a conversion and its reverse out (xla_allow_excess_precision)."""
    return lax.reduce_precision(value, exponent_bits=8, mantissa_bits=7).astype(jnp.bfloat16)


def _activation(gate, up, limit):
    return round_to_mxfp8(swiglu(gate.astype(jnp.float32), up.astype(jnp.float32), limit).astype(jnp.bfloat16))


def _quantized_ffn_forward(products, limit, rows, weights, groups, experts):
    out, gate, up = _ffn(products, limit, rows, groups, experts)
    return out, (rows, weights, groups, experts, gate, up)


def _quantized_ffn_backward(products, limit, residuals, d_out):
    run = functools.partial(_input_and_weight_gradients, products, limit)
    return no_derivative(run, NO_SECOND_DERIVATIVE)(residuals, d_out)


def _input_and_weight_gradients(products, limit, residuals, d_out):
    rows, weights, groups, experts, gate, up = residuals
    w_gate, w_up, w_down = (dequantized(weight.backward).swapaxes(-1, -2) for weight in experts)
    weights = weights[:, None]
    h = _activation(gate, up, limit)
    d_h = products.dot(d_out, w_down, groups)
    d_weights = (d_h * h).sum(axis=-1)
    _, pull = jax.vjp(lambda gate, up: swiglu(gate, up, limit), *(a.astype(jnp.float32) for a in (gate, up)))
    d_gate, d_up = (round_to_mxfp8(d.astype(jnp.bfloat16)) for d in pull(weights * d_h))
    d_rows = products.dot(d_gate, w_gate, groups) + products.dot(d_up, w_up, groups)
    factors = ((rows, d_gate), (rows, d_up), (_round(weights * h), d_out))
    d_experts = tuple(
        weight._replace(weight=products.outer(*pair, groups).astype(weight.weight.dtype), forward=None, backward=None)
        for weight, pair in zip(experts, factors, strict=True)
    )
    return _round(d_rows), d_weights, None, d_experts


quantized_ffn.defvjp(_quantized_ffn_forward, _quantized_ffn_backward)


@jax.custom_vjp
def weighted_sum(returned, weights):
    """sum_k w[t,k] o[t,k] in float32; its gradient is what `quantized_ffn` takes: dY in MXFP8 for every slot.

    Args:
      returned: bfloat16 [tokens, top_k, hidden].
      weights: float32 [tokens, top_k], whose gradient comes through `quantized_ffn`.
    """
    return (weights[:, :, None] * returned.astype(jnp.float32)).sum(axis=1)


def _weighted_sum_forward(returned, weights):
    return weighted_sum(returned, weights), (returned, weights)


def _weighted_sum_backward(residuals, d_y):
    returned, weights = residuals
    d_y = round_to_mxfp8(d_y.astype(returned.dtype))
    return jnp.broadcast_to(d_y[:, None], returned.shape), jnp.zeros_like(weights)


weighted_sum.defvjp(_weighted_sum_forward, _weighted_sum_backward)


def _dot(rows, weights, routed):
    # An expert without rows is not read, and rows of others do not meet its infinite weights.
    weights = jnp.where(routed.any(), weights, 0).astype(jnp.float32)
    return jnp.where(routed[:, None], jnp.dot(rows.astype(jnp.float32), weights, precision=HIGHEST), 0)


def _outer(rows, d_out, routed):
    return jnp.dot(rows.astype(jnp.float32).T, d_out.astype(jnp.float32), precision=HIGHEST)


def moe_mxfp8_reference(x, expert_ids, router_weights, experts, shared=None, limit=None):
    """y[t] = sum_k w[t,k] * FFN_{ids[t,k]}(x[t]) + FFN_shared(x[t]), the routed experts in MXFP8.

    Args:
      x: bfloat16 [tokens, hidden]; expert_ids: int32 [tokens, top_k]; router_weights: float32 [tokens, top_k].
      experts: three `Mxfp8Weight`, [experts, ...]; shared: as in `moe_reference`.

    Returns: y, bfloat16 [tokens, hidden].
    """
    wide_x = x.astype(accumulation_dtype(x.dtype))
    top_k = expert_ids.shape[1]
    # A row for each route: two slots of a token with one expert are two rows.
    rows = jnp.repeat(quantize_through(wide_x), top_k, axis=0).astype(x.dtype)
    ids, weights = expert_ids.reshape(-1), router_weights.reshape(-1)

    def visit(returned, expert):
        index, expert_weights = expert
        routed = ids == index
        out = quantized_ffn(
            Products(_dot, _outer),
            limit,
            jnp.where(routed[:, None], rows, 0),
            jnp.where(routed, weights, 0),
            routed,
            expert_weights,
        )
        return jnp.where(routed[:, None], out, returned), None

    num_experts = experts[0].weight.shape[0]
    indices = jnp.arange(num_experts, dtype=ids.dtype)
    returned, _ = lax.scan(visit, jnp.zeros_like(rows), (indices, experts))
    valid = (expert_ids >= 0) & (expert_ids < num_experts)
    y = weighted_sum(returned.reshape(*expert_ids.shape, x.shape[1]), jnp.where(valid, router_weights, 0))
    if shared is not None:
        y = y + expert_ffn(wide_x, *shared, x.dtype, limit)
    return y.astype(x.dtype)

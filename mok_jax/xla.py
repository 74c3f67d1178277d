"""The layer in plain JAX for any backend: sort, ragged_dot, all-to-all.

Called by moe.py on one device's tokens and its own experts; it may assume checked arguments. Every
pair of ranks exchanges its worst case, so memory is ranks * tokens * top_k * hidden elements a rank.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import sequential_vmap

from mok_jax.mxfp8 import Mxfp8Weight
from mok_jax.mxfp8_reference import Products, quantize_through, quantized_ffn, weighted_sum
from mok_jax.reference import accumulation_dtype, expert_ffn, swiglu

# Contract the rows of each group: [rows, a] x [rows, b] -> [groups, a, b].
_WEIGHT_GRADIENT = lax.RaggedDotDimensionNumbers(
    dot_dimension_numbers=(((0,), (0,)), ((), ())), lhs_ragged_dimensions=[0], rhs_group_dimensions=[]
)


def moe_xla(x, ids, weights, experts, shared, limit, expert_axis):
    """As `reference.moe_reference`, over the ranks of `expert_axis` (None: one rank); with `Mxfp8Weight`s as
    `mxfp8_reference.moe_mxfp8_reference`.

    Args:
      x: [tokens, hidden]; ids: int32 [tokens, top_k]; weights: [tokens, top_k].
      experts: this rank's (w_gate, w_up, w_down), arrays or `Mxfp8Weight`s, [local experts, ...].
    """
    tokens, top_k = ids.shape
    hidden = x.shape[1]
    routes = tokens * top_k
    ranks = 1 if expert_axis is None else lax.axis_size(expert_axis)
    mxfp8 = isinstance(experts[0], Mxfp8Weight)
    local_experts = (experts[0].weight if mxfp8 else experts[0]).shape[0]
    wide = accumulation_dtype(x.dtype)
    valid = (ids >= 0) & (ids < ranks * local_experts)

    # Routes in order of their expert; those without one last, where no peer's window reaches them.
    flat = jnp.where(valid, ids, ranks * local_experts).reshape(routes)
    order = jnp.argsort(flat, stable=True)
    in_order = flat[order]
    peer = jnp.minimum(in_order // local_experts, ranks)
    first_of_peer = jnp.searchsorted(peer, jnp.arange(ranks + 1, dtype=jnp.int32)).astype(jnp.int32)
    slot = jnp.arange(routes, dtype=jnp.int32) - first_of_peer[peer]
    target = jnp.where(peer < ranks, peer * routes + slot, ranks * routes)  # out of range: dropped

    def exchange(value):
        if expert_axis is None:
            return value
        return lax.all_to_all(value.reshape(ranks, routes, *value.shape[1:]), expert_axis, 0, 0).reshape(value.shape)

    def scatter(value, fill):
        empty = jnp.full_like(value, fill, shape=(ranks * routes, *value.shape[1:]))
        return exchange(empty.at[target].set(value, mode="drop"))

    # MXFP8: quantised at the source. Wide, so that the gradients of a token's slots meet in one sum.
    wide_x = x.astype(wide)
    routed_x = quantize_through(wide_x) if mxfp8 else x
    rows = scatter(routed_x[order // top_k].astype(x.dtype), 0)
    expert_of_row = scatter(in_order % local_experts, local_experts)

    by_expert = jnp.argsort(expert_of_row, stable=True)
    counts = (expert_of_row[:, None] == jnp.arange(local_experts, dtype=jnp.int32)[None]).sum(axis=0, dtype=jnp.int32)
    if mxfp8:
        weight_of_row = scatter(weights.reshape(routes)[order], 0)
        products = Products(_rows_dot, _rows_outer)
        out = quantized_ffn(products, limit, rows[by_expert], weight_of_row[by_expert], counts, experts)
    else:
        out = _grouped_ffn(limit, rows[by_expert], counts, *experts)
    # Rows past the last group were never computed; they must not reach the sender as they are.
    out = jnp.where((expert_of_row < local_experts)[by_expert][:, None], out, 0)
    back = jnp.zeros_like(out).at[by_expert].set(out, unique_indices=True)

    returned = exchange(back).at[target].get(mode="fill", fill_value=0)
    returned = jnp.zeros_like(returned).at[order].set(returned, unique_indices=True).reshape(tokens, top_k, hidden)
    weights = jnp.where(valid, weights, 0)
    y = weighted_sum(returned, weights) if mxfp8 else (weights[:, :, None] * returned.astype(wide)).sum(axis=1)
    if shared is not None:
        y = y + expert_ffn(wide_x, *shared, x.dtype, limit)
    return y.astype(x.dtype)


def _grouped_ffn(limit, rows, counts, w_gate, w_up, w_down):
    """Each group of rows through its expert; counts: int32 [local experts], rows per expert in order."""
    dtype = rows.dtype
    # Wide, though every value is one of dtype: so that the gradients of gate and up meet in one sum.
    wide_rows = rows.astype(accumulation_dtype(dtype))
    gate = _ragged_dot(dtype, wide_rows, w_gate, counts).astype(dtype)
    up = _ragged_dot(dtype, wide_rows, w_up, counts).astype(dtype)
    h = swiglu(gate.astype(wide_rows.dtype), up.astype(wide_rows.dtype), limit).astype(dtype)
    return _ragged_dot(dtype, h, w_down, counts).astype(dtype)


def _rows_dot(rows, weights, counts):
    return _ragged_dot(rows.dtype, rows, weights, counts)


def _rows_outer(rows, d_out, counts):
    return _weight_gradient(rows.dtype, rows, d_out, counts)


# Two products that are each other's gradients, so that every order of derivative exists (JAX has no
# transpose of a contraction over ragged rows) and each gradient is rounded once, to its operand's own
# dtype: autodiff would round a float32 weight's gradient to bfloat16 on the way.


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _ragged_dot(dtype, rows, weights, counts):
    """Each group of rows times its expert's weights, operands rounded to dtype: accumulation dtype [rows, n]."""

    @sequential_vmap
    def run(rows, weights, counts):
        return lax.ragged_dot(
            rows.astype(dtype),
            weights.astype(dtype),
            counts,
            precision=lax.Precision.HIGHEST,
            preferred_element_type=accumulation_dtype(dtype),
        )

    return run(rows, weights, counts)


def _ragged_dot_forward(dtype, rows, weights, counts):
    return _ragged_dot(dtype, rows, weights, counts), (rows, weights, counts)


def _ragged_dot_backward(dtype, residuals, d_out):
    rows, weights, counts = residuals
    d_rows = _ragged_dot(dtype, d_out, weights.swapaxes(1, 2), counts).astype(rows.dtype)
    return d_rows, _weight_gradient(dtype, rows, d_out, counts).astype(weights.dtype), None


_ragged_dot.defvjp(_ragged_dot_forward, _ragged_dot_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _weight_gradient(dtype, rows, d_out, counts):
    """Sum over each group of the outer products of its rows: accumulation dtype [groups, m, n]."""

    @sequential_vmap
    def run(rows, d_out, counts):
        return lax.ragged_dot_general(
            rows.astype(dtype),
            d_out.astype(dtype),
            counts,
            _WEIGHT_GRADIENT,
            precision=lax.Precision.HIGHEST,
            preferred_element_type=accumulation_dtype(dtype),
        )

    return run(rows, d_out, counts)


def _weight_gradient_forward(dtype, rows, d_out, counts):
    return _weight_gradient(dtype, rows, d_out, counts), (rows, d_out, counts)


def _weight_gradient_backward(dtype, residuals, d_weights):
    rows, d_out, counts = residuals
    d_rows = _ragged_dot(dtype, d_out, d_weights.swapaxes(1, 2), counts).astype(rows.dtype)
    return d_rows, _ragged_dot(dtype, rows, d_weights, counts).astype(d_out.dtype), None


_weight_gradient.defvjp(_weight_gradient_forward, _weight_gradient_backward)

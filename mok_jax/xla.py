"""The layer in plain JAX for any backend: sort, ragged_dot, all-to-all.

Called by moe.py on one device's tokens and its own experts; it may assume checked arguments. Every
pair of ranks exchanges its worst case, so memory is ranks * tokens * top_k * hidden elements a rank.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from mok_jax.reference import accumulation_dtype, expert_ffn, swiglu

# Contract the rows of each group: [rows, a] x [rows, b] -> [groups, a, b].
_WEIGHT_GRADIENT = lax.RaggedDotDimensionNumbers(
    dot_dimension_numbers=(((0,), (0,)), ((), ())), lhs_ragged_dimensions=[0], rhs_group_dimensions=[]
)


def moe_xla(x, ids, weights, experts, shared, limit, expert_axis):
    """As `reference.moe_reference`, over the ranks of `expert_axis` (None: one rank).

    Args:
      x: [tokens, hidden]; ids: int32 [tokens, top_k]; weights: [tokens, top_k].
      experts: this rank's (w_gate, w_up, w_down), [local experts, ...].
    """
    tokens, top_k = ids.shape
    hidden = x.shape[1]
    routes = tokens * top_k
    ranks = 1 if expert_axis is None else lax.axis_size(expert_axis)
    local_experts = experts[0].shape[0]
    wide = accumulation_dtype(x.dtype)
    valid = (ids >= 0) & (ids < ranks * local_experts)

    # Routes in order of their expert; those without one last, where no peer's window reaches them.
    flat = jnp.where(valid, ids, ranks * local_experts).reshape(routes)
    order = jnp.argsort(flat, stable=True)
    in_order = flat[order]
    peer = jnp.minimum(in_order // local_experts, ranks)
    first_of_peer = jnp.searchsorted(peer, jnp.arange(ranks + 1)).astype(jnp.int32)
    slot = jnp.arange(routes, dtype=jnp.int32) - first_of_peer[peer]
    target = jnp.where(peer < ranks, peer * routes + slot, ranks * routes)  # out of range: dropped

    def exchange(value):
        if expert_axis is None:
            return value
        return lax.all_to_all(value.reshape(ranks, routes, *value.shape[1:]), expert_axis, 0, 0).reshape(value.shape)

    def scatter(value, fill):
        empty = jnp.full_like(value, fill, shape=(ranks * routes, *value.shape[1:]))
        return exchange(empty.at[target].set(value, mode="drop"))

    rows = scatter(x[order // top_k], 0)
    expert_of_row = scatter(in_order % local_experts, local_experts)

    by_expert = jnp.argsort(expert_of_row, stable=True)
    counts = (expert_of_row[:, None] == jnp.arange(local_experts)).sum(axis=0, dtype=jnp.int32)
    out = _grouped_ffn(limit, rows[by_expert], counts, *experts)
    # Rows past the last group were never computed; they must not reach the sender as they are.
    out = jnp.where((expert_of_row < local_experts)[by_expert][:, None], out, 0)
    back = jnp.zeros_like(out).at[by_expert].set(out, unique_indices=True)

    returned = exchange(back).at[target].get(mode="fill", fill_value=0)
    returned = jnp.zeros_like(returned).at[order].set(returned, unique_indices=True).reshape(tokens, top_k, hidden)
    y = (jnp.where(valid, weights, 0)[:, :, None] * returned.astype(wide)).sum(axis=1)
    if shared is not None:
        y = y + expert_ffn(x.astype(wide), *shared, x.dtype, limit)
    return y.astype(x.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _grouped_ffn(limit, rows, counts, w_gate, w_up, w_down):
    """Each group of rows through its expert; counts: int32 [local experts], rows per expert in order.

    It has a derivative of its own for the weight gradients: autodiff would round them to the rows'
    dtype before it widens them to a float32 weight.
    """
    return _grouped_ffn_forward(limit, rows, counts, w_gate, w_up, w_down)[0]


def _grouped_ffn_forward(limit, rows, counts, w_gate, w_up, w_down):
    gate = _ragged_dot(rows, w_gate, counts)
    up = _ragged_dot(rows, w_up, counts)
    h = _activate(limit, gate, up)
    return _ragged_dot(h, w_down, counts), (rows, counts, w_gate, w_up, w_down, gate, up)


def _grouped_ffn_backward(limit, residuals, d_out):
    rows, counts, w_gate, w_up, w_down, gate, up = residuals
    h, activation_gradient = jax.vjp(functools.partial(_activate, limit), gate, up)
    d_h = _ragged_dot(d_out, w_down.swapaxes(1, 2), counts)
    d_gate, d_up = activation_gradient(d_h)
    wide = accumulation_dtype(rows.dtype)
    d_rows = (
        _ragged_dot(d_gate, w_gate.swapaxes(1, 2), counts, wide) + _ragged_dot(d_up, w_up.swapaxes(1, 2), counts, wide)
    ).astype(rows.dtype)
    d_w_gate = _weight_gradient(rows, d_gate, counts, w_gate.dtype)
    d_w_up = _weight_gradient(rows, d_up, counts, w_up.dtype)
    d_w_down = _weight_gradient(h, d_out, counts, w_down.dtype)
    return d_rows, None, d_w_gate, d_w_up, d_w_down


_grouped_ffn.defvjp(_grouped_ffn_forward, _grouped_ffn_backward)


def _activate(limit, gate, up):
    wide = accumulation_dtype(gate.dtype)
    return swiglu(gate.astype(wide), up.astype(wide), limit).astype(gate.dtype)


def _ragged_dot(rows, weights, counts, dtype=None):
    """Sums in the accumulation dtype, rounded once to `dtype` (None: the rows' own)."""
    wide = accumulation_dtype(rows.dtype)
    out = lax.ragged_dot(
        rows, weights.astype(rows.dtype), counts, precision=lax.Precision.HIGHEST, preferred_element_type=wide
    )
    return out.astype(dtype or rows.dtype)


def _weight_gradient(rows, d_rows, counts, dtype):
    return lax.ragged_dot_general(
        rows,
        d_rows,
        counts,
        _WEIGHT_GRADIENT,
        precision=lax.Precision.HIGHEST,
        preferred_element_type=accumulation_dtype(rows.dtype),
    ).astype(dtype)

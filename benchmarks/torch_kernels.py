"""The Triton kernels of torch_layer.py: silu(g)*u*w, its gradient with <dh', h>, and the sum of a token's rows."""

import torch
import triton
import triton.language as tl


@triton.jit
def _swiglu(gate_up, weights, out, width, BLOCK: tl.constexpr):
    row, column = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    inside = column < width
    gate = tl.load(gate_up + row * 2 * width + column, inside).to(tl.float32)
    up = tl.load(gate_up + row * 2 * width + width + column, inside).to(tl.float32)
    h = gate * tl.sigmoid(gate) * up * tl.load(weights + row)
    tl.store(out + row * width + column, h.to(out.dtype.element_ty), inside)


@triton.jit
def _swiglu_gradient(gate_up, weights, d_weighted, d_gate_up, d_weights, weighted, width, BLOCK: tl.constexpr):
    row, column = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    inside = column < width
    gate = tl.load(gate_up + row * 2 * width + column, inside, other=0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * width + width + column, inside, other=0).to(tl.float32)
    d_h = tl.load(d_weighted + row * width + column, inside, other=0).to(tl.float32)
    weight = tl.load(weights + row)
    sigmoid = tl.sigmoid(gate)
    h = gate * sigmoid * up
    d_gate = d_h * up * sigmoid * (1 + gate * (1 - sigmoid)) * weight
    d_up = d_h * gate * sigmoid * weight
    kind = weighted.dtype.element_ty
    tl.store(d_gate_up + row * 2 * width + column, d_gate.to(kind), inside)
    tl.store(d_gate_up + row * 2 * width + width + column, d_up.to(kind), inside)
    tl.store(weighted + row * width + column, (h * weight).to(kind), inside)
    tl.store(d_weights + row, tl.sum(d_h * h, axis=0))


@triton.jit
def _sum_of_rows(rows, places, out, hidden, TOP_K: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < hidden
    total = tl.zeros([BLOCK], tl.float32)
    for slot in tl.static_range(TOP_K):
        row = tl.load(places + token * TOP_K + slot)
        total += tl.load(rows + row * hidden + column, inside, other=0).to(tl.float32)
    tl.store(out + token * hidden + column, total.to(out.dtype.element_ty), inside)


def swiglu(gate_up, weights):
    """w * silu(g) * u, rounded once."""
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(rows, width)
    _swiglu[(rows,)](gate_up, weights, out, width, BLOCK=triton.next_power_of_2(width))
    return out


def swiglu_gradient(gate_up, weights, d_weighted):
    """d_gate_up, dw = <dh', h>, and w * h again."""
    rows, width = d_weighted.shape
    d_gate_up, weighted = torch.empty_like(gate_up), torch.empty_like(d_weighted)
    d_weights = torch.empty_like(weights)
    block = triton.next_power_of_2(width)
    _swiglu_gradient[(rows,)](gate_up, weights, d_weighted, d_gate_up, d_weights, weighted, width, BLOCK=block)
    return d_gate_up, d_weights, weighted


def sum_of_rows(rows, places):
    """[M, H] -> [T, H], by gathering."""
    tokens, top_k = places.shape
    out = rows.new_empty(tokens, rows.shape[1])
    grid = (tokens, triton.cdiv(rows.shape[1], 1024))
    _sum_of_rows[grid](rows, places, out, rows.shape[1], TOP_K=top_k, BLOCK=1024)
    return out

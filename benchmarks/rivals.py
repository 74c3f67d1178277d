"""The layers that bench_layer.py measures: the package's, its JAX rivals, and the limit.

A rival is the layer as a JAX user would stitch it together from grouped products: sort by expert, gather, gate and
up as one product, silu(g)*u*w, down, and a sum over each token's rows by gathering (never by scattering), with a
backward pass of the same kind. Sources of the products, read at these versions: jax 0.11.2,
`jax.experimental.pallas.ops.gpu.ragged_dot_mgpu` and `transposed_ragged_dot_mgpu`; tokamax 0.0.14,
`tokamax._src.ops.ragged_dot`, with the tiles that its own autotuning database has for an H100 at such sizes (the last
version whose Triton kernel is Pallas; later ones need triton 3.7, and their Mosaic kernel is the same).
"""

import dataclasses
import functools
import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

import mok_jax

Array = jax.Array


# ---- layers of (ids, x, router_weights, w_gate, w_up, w_down) ----


def package(implementation: str, config: mok_jax.MoKConfig) -> Callable[..., Array]:
    """mok_jax.moe."""

    def layer(ids, x, router_weights, *experts):
        return mok_jax.moe(x, ids, router_weights, *experts, implementation=implementation, config=config)

    return layer


def package_mxfp8(implementation: str, config: mok_jax.MoKConfig) -> Callable[..., Array]:
    """mok_jax.moe in MXFP8, of weights that were quantised before: the first argument is (ids, those)."""
    config = dataclasses.replace(config, precision="mxfp8")

    def layer(fixed, x, router_weights, *experts):
        ids, quantized = fixed
        experts = [q._replace(weight=w) for q, w in zip(quantized, experts, strict=True)]
        return mok_jax.moe(x, ids, router_weights, *experts, implementation=implementation, config=config)

    return layer


@jax.jit
def quantize(weights: tuple[Array, ...]) -> tuple[mok_jax.Mxfp8Weight, ...]:
    """What a training step does once with the weights for all its microbatches."""
    return tuple(mok_jax.quantize_weight(w).dequantize()._replace(weight=None) for w in weights)


def ragged_dot_layer(ids, x, router_weights, w_gate, w_up, w_down):
    """The layer as a JAX user writes it at first: sort by expert, three ragged_dots, unsort, weighted sum."""
    tokens, top_k = ids.shape
    order = jnp.argsort(ids.reshape(-1))
    counts = jnp.bincount(ids.reshape(-1), length=w_gate.shape[0]).astype(jnp.int32)
    rows = x[order // top_k]
    h = jax.nn.silu(lax.ragged_dot(rows, w_gate, counts)) * lax.ragged_dot(rows, w_up, counts)
    out = lax.ragged_dot(h, w_down, counts)[jnp.argsort(order)].reshape(tokens, top_k, -1)
    return jnp.einsum("tkh,tk->th", out, router_weights, preferred_element_type=jnp.float32).astype(x.dtype)


def dense_layer(ids, x, router_weights, w_gate, w_up, w_down):
    """Every token through every expert, then a one-hot weighted sum: experts / top_k times the FLOPs."""
    combine = jnp.einsum("tk,tke->te", router_weights, jax.nn.one_hot(ids, w_gate.shape[0], dtype=router_weights.dtype))
    h = jax.nn.silu(jnp.einsum("th,ehi->eti", x, w_gate)) * jnp.einsum("th,ehi->eti", x, w_up)
    weighted = (h * combine.T[:, :, None]).astype(x.dtype)
    return jnp.einsum("eti,eih->th", weighted, w_down)


def matmuls(ids, rows, h, *weights):
    """The limit: nothing but the layer's matmuls, all rows through one expert; the last weight is w_down."""
    del ids
    return *(rows @ w for w in weights[:-1]), h @ weights[-1]


# ---- the stitched layer of (ids, x, router_weights, w_gate_up, w_down), w_gate_up: [E, H, 2I] ----


class Products(NamedTuple):
    """Grouped products over rows sorted by expert; counts: int32 [experts].

    dot: [M, A], [E, A, B] -> [M, B]. dot_transposed: [M, B], [E, A, B] -> [M, A].
    weight_gradient: [M, A], [M, B] -> [E, A, B], contracted over each expert's rows; zero without rows.
    """

    dot: Callable[[Array, Array, Array], Array]
    dot_transposed: Callable[[Array, Array, Array], Array]
    weight_gradient: Callable[[Array, Array, Array], Array]


def stitched(products: Products) -> Callable[..., Array]:
    """The layer out of these products, with the backward pass of the package: dw = <dh', h>."""

    @jax.custom_vjp
    def layer(ids, x, router_weights, w_gate_up, w_down):
        return forward(ids, x, router_weights, w_gate_up, w_down)[0]

    def forward(ids, x, router_weights, w_gate_up, w_down):
        flat = ids.reshape(-1)
        order = jnp.argsort(flat).astype(jnp.int32)
        edges = jnp.searchsorted(flat[order], jnp.arange(w_down.shape[0] + 1, dtype=flat.dtype))
        counts = jnp.diff(edges).astype(jnp.int32)
        places = jnp.zeros_like(order).at[order].set(jnp.arange(order.size, dtype=jnp.int32), unique_indices=True)
        places = places.reshape(ids.shape)
        rows = x[order // ids.shape[1]]
        gate_up = products.dot(rows, w_gate_up, counts)
        row_weights = router_weights.reshape(-1)[order]
        y = sum_of_rows(products.dot(_swiglu(gate_up, row_weights, x.dtype), w_down, counts), places)
        return y, (order, places, counts, rows, gate_up, row_weights, w_gate_up, w_down)

    def backward(saved, d_y):
        order, places, counts, rows, gate_up, row_weights, w_gate_up, w_down = saved
        d_out = d_y[order // places.shape[1]]
        d_weighted = products.dot_transposed(d_out, w_down, counts)
        weighted, pull = jax.vjp(lambda g, w: _swiglu(g, w, d_y.dtype), gate_up, row_weights)
        d_gate_up, d_row_weights = pull(d_weighted)
        d_x = sum_of_rows(products.dot_transposed(d_gate_up, w_gate_up, counts), places)
        d_w_gate_up = products.weight_gradient(rows, d_gate_up, counts)
        d_w_down = products.weight_gradient(weighted, d_out, counts)
        return None, d_x, d_row_weights[places], d_w_gate_up, d_w_down

    layer.defvjp(forward, backward)
    return layer


def _swiglu(gate_up, row_weights, dtype):
    """w * silu(g) * u, rounded once."""
    gate, up = jnp.split(gate_up.astype(jnp.float32), 2, axis=1)
    return (jax.nn.silu(gate) * up * row_weights[:, None]).astype(dtype)


def sum_of_rows(rows, places):
    """[M, H] -> [T, H]: one gather a slot, so that XLA makes one pass of it."""
    return sum(rows[places[:, k]].astype(jnp.float32) for k in range(places.shape[1])).astype(rows.dtype)


# ---- products ----

WEIGHT_GRADIENT = lax.RaggedDotDimensionNumbers(
    dot_dimension_numbers=(((0,), (0,)), ((), ())), lhs_ragged_dimensions=[0], rhs_group_dimensions=[]
)
TRANSPOSED = lax.RaggedDotDimensionNumbers(
    dot_dimension_numbers=(((1,), (2,)), ((), ())), lhs_ragged_dimensions=[0], rhs_group_dimensions=[0]
)


def xla_products() -> Products:
    """lax.ragged_dot: runs anywhere, so that `stitched` can be tested without a GPU."""

    def general(numbers):
        return lambda a, b, counts: lax.ragged_dot_general(a, b, counts, numbers)

    return Products(lax.ragged_dot, general(TRANSPOSED), general(WEIGHT_GRADIENT))


def mgpu_products() -> Products:
    """JAX's own Pallas kernels for Hopper; 128 x 128 x 64 tiles, as many stages as shared memory holds."""
    gpu = "jax.experimental.pallas.ops.gpu"
    ragged_dot = importlib.import_module(f"{gpu}.ragged_dot_mgpu").ragged_dot
    transposed = importlib.import_module(f"{gpu}.transposed_ragged_dot_mgpu").transposed_ragged_dot

    def tiles(columns: int) -> dict[str, int]:
        block = 128 if columns % 128 == 0 else 64
        wide = next(n for n in (8, 4, 2, 1) if columns // block % n == 0)
        return dict(block_m=128, block_n=block, block_k=64, max_concurrent_steps=5, grid_block_n=wide)

    def dot(a, b, counts):
        return ragged_dot(a, b, group_sizes=counts, **tiles(b.shape[2]))

    def dot_transposed(a, b, counts):
        return ragged_dot(a, b, group_sizes=counts, transpose_rhs=True, **tiles(b.shape[1]))

    def weight_gradient(a, b, counts):
        return transposed(a, b, group_sizes=counts, **tiles(b.shape[1]))

    return Products(dot, dot_transposed, weight_gradient)


def tokamax_products() -> Products:
    """tokamax's Mosaic kernel, and its Triton one for weight gradients, where it is three times as fast."""
    base, mosaic, triton = (
        importlib.import_module(f"tokamax._src.ops.ragged_dot.{name}")
        for name in ("base", "pallas_mosaic_gpu", "pallas_triton")
    )

    def run(op, numbers, a, b, counts):
        return op(a, b, group_sizes=counts, ragged_dot_dimension_numbers=numbers, preferred_element_type=a.dtype)

    def dot(numbers, a, b, counts):
        deep = a.shape[1] > 1024
        config = mosaic.Config(
            block_m=128,
            block_n=64,
            block_k=128,
            num_stages=4 if deep else 2,
            split_k=1,
            persistent=deep,
            grid_minor_dim=1 if deep else 0,
            grid_tile_width=8 if deep else 1,
        )
        return run(mosaic.PallasMosaicGpuRaggedDot(config=config), numbers, a, b, counts)

    config = triton.Config(block_m=128, block_n=256, block_k=64, num_warps=8, num_stages=3)
    weight_gradient = functools.partial(
        run, triton.PallasTritonRaggedDot(config=config), base.RAGGED_CONTRACTING_DOT_DIM_NUMS
    )
    return Products(
        functools.partial(dot, base.DEFAULT_RAGGED_DOT_DIM_NUMS),
        functools.partial(dot, base.TRANS_RHS_RAGGED_DOT_DIM_NUMS),
        weight_gradient,
    )


class Contender(NamedTuple):
    """make: MoKConfig -> layer. gate_up: it takes gate and up as one weight. routing: None for the one asked for.

    precision: MoKConfig's, of the layer and of the reference that it must agree with.
    """

    make: Callable[[mok_jax.MoKConfig], Callable[..., Any]]
    gate_up: bool = False
    routing: str | None = None
    of_package: bool = False
    precision: str | None = None


CONTENDERS = {
    "matmul": Contender(lambda config: matmuls),
    "cuda": Contender(functools.partial(package, "cuda"), of_package=True),
    "cuda_skewed": Contender(functools.partial(package, "cuda"), routing="skewed", of_package=True),
    "cuda_mxfp8": Contender(functools.partial(package_mxfp8, "cuda"), of_package=True, precision="mxfp8"),
    "host": Contender(functools.partial(package, "host"), of_package=True),
    "xla": Contender(functools.partial(package, "xla"), of_package=True),
    "pallas_mgpu": Contender(lambda config: stitched(mgpu_products()), gate_up=True),
    "tokamax": Contender(lambda config: stitched(tokamax_products()), gate_up=True),
    "ragged_dot": Contender(lambda config: ragged_dot_layer),
    "dense": Contender(lambda config: dense_layer),
    "reference": Contender(functools.partial(package, "reference"), of_package=True),
}

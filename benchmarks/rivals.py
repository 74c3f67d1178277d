"""The layers that bench_layer.py measures: the package's, its JAX rivals, and the limit.

A rival is the layer as a JAX user would stitch it together from grouped products: sort by expert, gather, gate and
up as one product, silu(g)*u*w, down, and a sum over each token's rows by gathering (never by scattering), with a
backward pass of the same kind. Over several GPUs the rows go to their experts and back through NCCL. Sources of the
products, read at these versions: jax 0.11.2, `jax.experimental.pallas.ops.gpu.ragged_dot_mgpu` and
`transposed_ragged_dot_mgpu`; tokamax 0.0.14, `tokamax._src.ops.ragged_dot`, with the tiles that its own autotuning
database has for an H100 at such sizes (the last version whose Triton kernel is Pallas; later ones need triton 3.7, and
their Mosaic kernel is the same).
"""

import dataclasses
import functools
import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import mok_jax

Array = jax.Array


def on_each(mesh: Mesh | None, function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` on every device's part of arrays that the mesh splits along their first axis."""
    if mesh is None:
        return function
    spec = P(mesh.axis_names)
    # Without the check: Pallas kernels do not say over what their results vary.
    return jax.shard_map(function, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)


# ---- layers of (ids, x, router_weights, w_gate, w_up, w_down) ----


def package(implementation: str, config: mok_jax.MoKConfig, mesh: Mesh | None = None) -> Callable[..., Array]:
    """mok_jax.moe."""
    options = dict(implementation=implementation, config=config, mesh=mesh)

    def layer(ids, x, router_weights, *experts):
        return mok_jax.moe(x, ids, router_weights, *experts, **options)

    return layer


def package_mxfp8(implementation: str, config: mok_jax.MoKConfig, mesh: Mesh | None = None) -> Callable[..., Array]:
    """mok_jax.moe in MXFP8, of weights that were quantised before: the first argument is (ids, those)."""
    layer = package(implementation, dataclasses.replace(config, precision="mxfp8"), mesh)

    def quantized_layer(fixed, x, router_weights, *experts):
        ids, quantized = fixed
        return layer(ids, x, router_weights, *(q._replace(weight=w) for q, w in zip(quantized, experts, strict=True)))

    return quantized_layer


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


class Exchange(NamedTuple):
    """How the rows of a rank, sorted by expert, reach their experts and return.

    there: (value, index) -> value[index], a row for each route of this rank, at the ranks of their experts: those that
      came to this one, sorted by expert, with finite values behind them. back: rows as they came -> an array in which
      the row that this rank had as number i, sorted by expert, is number positions[i].
    counts: int32 [local experts], rows that came.
    """

    there: Callable[[Array, Array], Array]
    back: Callable[[Array], Array]
    positions: Array
    counts: Array


def no_exchange(sent: Array, routes: int) -> Exchange:
    """On one rank."""
    return Exchange(lambda value, index: value[index], lambda rows: rows, jnp.arange(routes, dtype=jnp.int32), sent[0])


def stitched(products: Products, exchange: Callable[[Array, int], Exchange] = no_exchange) -> Callable[..., Array]:
    """The layer out of these products, with the backward pass of the package: dw = <dh', h>.

    exchange: (sent, routes of a rank) -> how rows travel; sent: int32 [ranks, experts], each rank's rows for each
      expert. But for `no_exchange` inside a shard_map over "expert".
    """

    @jax.custom_vjp
    def layer(ids, x, router_weights, w_gate_up, w_down):
        return forward(ids, x, router_weights, w_gate_up, w_down)[0]

    def forward(ids, x, router_weights, w_gate_up, w_down):
        flat, alone = ids.reshape(-1), exchange is no_exchange
        order = jnp.argsort(flat).astype(jnp.int32)
        experts = w_down.shape[0] * (1 if alone else lax.axis_size("expert"))
        edges = jnp.searchsorted(flat[order], jnp.arange(experts + 1, dtype=flat.dtype))
        mine = jnp.diff(edges).astype(jnp.int32)
        sent = mine[None] if alone else lax.all_gather(mine, "expert")
        path = exchange(sent, order.size)
        places = jnp.zeros_like(order).at[order].set(path.positions, unique_indices=True).reshape(ids.shape)
        rows = path.there(x, order // ids.shape[1])
        row_weights = path.there(router_weights.reshape(-1), order)
        gate_up = products.dot(rows, w_gate_up, path.counts)
        weighted = _swiglu(gate_up, row_weights, path.counts, x.dtype)
        y = sum_of_rows(path.back(products.dot(weighted, w_down, path.counts)), places)
        return y, (order, places, sent, rows, gate_up, row_weights, w_gate_up, w_down)

    def backward(saved, d_y):
        order, places, sent, rows, gate_up, row_weights, w_gate_up, w_down = saved
        path = exchange(sent, order.size)
        d_out = path.there(d_y, order // places.shape[1])
        d_weighted = products.dot_transposed(d_out, w_down, path.counts)
        weighted, pull = jax.vjp(lambda g, w: _swiglu(g, w, path.counts, d_y.dtype), gate_up, row_weights)
        d_gate_up, d_row_weights = pull(d_weighted)
        d_x = sum_of_rows(path.back(products.dot_transposed(d_gate_up, w_gate_up, path.counts)), places)
        d_w_gate_up = products.weight_gradient(rows, d_gate_up, path.counts)
        d_w_down = products.weight_gradient(weighted, d_out, path.counts)
        return None, d_x, path.back(d_row_weights)[places], d_w_gate_up, d_w_down

    layer.defvjp(forward, backward)
    return layer


def _swiglu(gate_up, row_weights, counts, dtype):
    """w * silu(g) * u, rounded once; zero behind the last expert's rows, where no product wrote anything."""
    behind = jnp.arange(gate_up.shape[0]) >= counts.sum()
    gate, up = jnp.split(jnp.where(behind[:, None], 0, gate_up).astype(jnp.float32), 2, axis=1)
    return jnp.where(behind[:, None], 0, jax.nn.silu(gate) * up * row_weights[:, None]).astype(dtype)


def sum_of_rows(rows, places):
    """[M, H] -> [T, H]: one gather a slot, so that XLA makes one pass of it."""
    return sum(rows[places[:, k]].astype(jnp.float32) for k in range(places.shape[1])).astype(rows.dtype)


# ---- exchanges over NCCL ----

ROOM = 17 / 16  # rows that a rank has room for, of the balanced load, which uniform routing keeps to


def ragged_exchange(sent: Array, routes: int) -> Exchange:
    """By lax.ragged_all_to_all, a slice for each expert: rows arrive sorted."""
    ranks = sent.shape[0]
    rank, by_rank = lax.axis_index("expert"), sent.reshape(ranks, ranks, -1)  # [from, to, expert there]
    firsts = jnp.cumsum(by_rank.sum(axis=0), axis=1) - by_rank.sum(axis=0)  # [to, expert]
    firsts = firsts + jnp.cumsum(by_rank, axis=0) - by_rank  # [from, to, expert]: where they begin there
    starts = (jnp.cumsum(sent, axis=1) - sent).reshape(by_rank.shape)  # and here
    out, into = by_rank[rank].reshape(-1), by_rank[:, rank].reshape(-1)
    out_from, out_to = starts[rank].reshape(-1), firsts[rank].reshape(-1)
    into_from, into_to = starts[:, rank].reshape(-1), firsts[:, rank].reshape(-1)

    def there(value, index):
        empty = jnp.zeros((rows_of_room(routes), *value.shape[1:]), value.dtype)
        return lax.ragged_all_to_all(value[index], empty, out_from, out, out_to, into, axis_name="expert")

    def back(rows):
        empty = jnp.zeros((routes, *rows.shape[1:]), rows.dtype)
        return lax.ragged_all_to_all(rows, empty, into_to, into, into_from, out, axis_name="expert")

    return Exchange(there, back, jnp.arange(routes, dtype=jnp.int32), by_rank[:, rank].sum(axis=0))


def dense_exchange(sent: Array, routes: int) -> Exchange:
    """By lax.all_to_all of as many rows to each rank, and a gather that sorts what came."""
    ranks = sent.shape[0]
    window = rows_of_room(routes) // ranks
    rank, by_rank = lax.axis_index("expert"), sent.reshape(ranks, ranks, -1)
    to_rank = by_rank[rank].sum(axis=1)
    first = jnp.cumsum(to_rank) - to_rank
    slots = jnp.minimum(first[:, None] + jnp.arange(window), routes - 1).reshape(-1)  # of my rows, what a slot holds
    peer = jnp.searchsorted(jnp.cumsum(to_rank), jnp.arange(routes), side="right")
    positions = (peer * window + jnp.arange(routes) - first[peer]).astype(jnp.int32)

    came = by_rank[:, rank].T  # [expert, from]
    places = jnp.arange(ranks) * window + jnp.cumsum(came, axis=0) - came  # where each piece begins in the windows
    ends = jnp.cumsum(came.reshape(-1))
    row = jnp.arange(ranks * window)
    piece = jnp.minimum(jnp.searchsorted(ends, row, side="right"), ends.size - 1)
    place = places.reshape(-1)[piece] + row - (ends - came.reshape(-1))[piece]
    there_is = row < ends[-1]
    source = jnp.where(there_is, place, 0)
    target = jnp.zeros_like(row).at[jnp.where(there_is, place, row.size)].set(row, mode="drop")

    def swap(value):
        return lax.all_to_all(value.reshape(ranks, window, *value.shape[1:]), "expert", 0, 0).reshape(value.shape)

    return Exchange(
        lambda value, index: swap(value[index[slots]])[source],
        lambda rows: swap(rows[target]),
        positions,
        came.sum(axis=1),
    )


def rows_of_room(routes: int) -> int:
    """In whole tiles of the products, up to eight ranks' windows too."""
    return -(-int(routes * ROOM) // 1024) * 1024


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


def best_products() -> Products:
    """JAX's own kernels on a GPU; elsewhere what runs there."""
    return xla_products() if jax.default_backend() == "cpu" else mgpu_products()


class Contender(NamedTuple):
    """make: (MoKConfig, mesh or None) -> layer. gate_up: it takes gate and up as one weight. routing: None for the one
    asked for.

    precision: MoKConfig's, of the layer and of the reference that it must agree with. several: it runs over several
    GPUs. alone: there each of them has the layer to itself, all at once: what the exchange is measured against. (One of
    them while the others rest would not do: what follows meets the power limiter's overshoot, see protocol.py.)
    """

    make: Callable[[mok_jax.MoKConfig, Mesh | None], Callable[..., Any]]
    gate_up: bool = False
    routing: str | None = None
    of_package: bool = False
    precision: str | None = None
    several: bool = False
    alone: bool = False


def _of_package(implementation: str, **options) -> Contender:
    make = functools.partial(package_mxfp8 if "precision" in options else package, implementation)
    if "alone" not in options:
        return Contender(make, of_package=True, several=True, **options)

    def alone(config: mok_jax.MoKConfig, mesh: Mesh) -> Callable[..., Any]:
        return on_each(Mesh(mesh.devices, ("data",)), make(config))  # without an axis of experts

    return Contender(alone, of_package=True, several=True, **options)


def _over_nccl(exchange: Callable[[Array, int], Exchange]) -> Contender:
    return Contender(
        lambda config, mesh: on_each(mesh, stitched(best_products(), exchange)), gate_up=True, several=True
    )


NCCL = ("nccl_ragged", "nccl_dense", "xla")
CONTENDERS = {
    "matmul": Contender(lambda config, mesh: on_each(mesh, matmuls), several=True),
    "cuda": _of_package("cuda"),
    "cuda_alone": _of_package("cuda", alone=True),
    "cuda_skewed": _of_package("cuda", routing="skewed"),
    "cuda_remote": _of_package("cuda", routing="remote"),
    "cuda_mxfp8": _of_package("cuda", precision="mxfp8"),
    "host": _of_package("host"),
    "host_alone": _of_package("host", alone=True),
    "xla": _of_package("xla"),
    "nccl_ragged": _over_nccl(ragged_exchange),
    "nccl_dense": _over_nccl(dense_exchange),
    "pallas_mgpu": Contender(lambda config, mesh: stitched(mgpu_products()), gate_up=True),
    "tokamax": Contender(lambda config, mesh: stitched(tokamax_products()), gate_up=True),
    "ragged_dot": Contender(lambda config, mesh: ragged_dot_layer),
    "dense": Contender(lambda config, mesh: dense_layer),
    "reference": _of_package("reference"),
    "reference_alone": _of_package("reference", alone=True),
}

"""One of several processes of a group, for test_cuda_peers.py: python peers_worker.py rank ranks port mode.

All of them may share one GPU: a program without XLA's collectives runs there. Modes: "equal" compares values and
gradients with virtual ranks on one device, bit for bit, over many routings; "shapes" traces other shapes on the
last rank; "dies" lets the last rank exit after a few steps.
"""

import os
import sys

import cases
import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import mok_jax
from mok_jax import distributed

SIZES = dict(hidden=136, intermediate=264, experts=8, top_k=2)
CONFIG = mok_jax.MoKConfig(minibatch=128, macrobatch=256, timeout=10.0, barrier_timeout=5.0)
STEPS = int(os.environ.get("MOK_STEPS", "12"))


def compare(rank, mesh, seed, tokens):
    """One routing over the mesh; the names of this rank's results that differ from those of virtual ranks."""
    rng = np.random.default_rng(seed)
    pattern = list(cases.PATTERNS)[int(rng.integers(len(cases.PATTERNS)))]
    pattern = "distinct" if pattern in ("tile_counts", "out_of_range") else pattern  # which need many tokens
    case = cases.make_case("bf16", pattern, seed=seed, tokens=tokens, **SIZES)
    d_y = cases.cotangent_of(case.x)

    def spread(array):
        return jax.make_array_from_callback(
            array.shape, NamedSharding(mesh, P("expert")), lambda index: np.asarray(array)[index]
        )

    wide = cases.compiled(jax.tree.map(spread, case), spread(d_y), "cuda", (("config", CONFIG), ("mesh", mesh)))
    result = {name: np.asarray(value.addressable_shards[0].data) for name, value in wide.items()}
    config = mok_jax.MoKConfig(minibatch=128, macrobatch=256, virtual_ranks=mesh.size, timeout=10.0)
    exact = {
        name: np.asarray(value) for name, value in cases.compiled(case, d_y, "cuda", (("config", config),)).items()
    }
    wrong = []
    for name, value in result.items():
        part = exact[name][rank * len(value) : (rank + 1) * len(value)]
        if not np.array_equal(value.view(np.uint8), part.view(np.uint8)):
            wrong.append(f"{pattern} tokens {tokens}: {name}")
    return wrong


def main(rank, ranks, port, mode):
    jax.distributed.initialize(
        f"127.0.0.1:{port}",
        ranks,
        rank,
        local_device_ids=[0],
        heartbeat_timeout_seconds=20,
        shutdown_timeout_seconds=10,
    )
    jax.config.update("jax_default_device", jax.local_devices()[0])
    mesh = jax.make_mesh((ranks,), ("expert",))
    distributed.initialize(mesh, tokens=300, hidden=136, top_k=2)
    for seed in range(STEPS):
        tokens = ranks * (300, 1, 127, 128)[seed % 4]
        if mode == "shapes" and seed == 3 and rank == ranks - 1:
            tokens = ranks * 64
        if mode == "dies" and seed == 3 and rank == ranks - 1:
            os._exit(7)
        wrong = compare(rank, mesh, seed, tokens)
        if wrong:
            raise SystemExit(f"rank {rank}: {wrong}")
    print(f"rank {rank}: {STEPS} steps equal", flush=True)
    distributed.finalize()
    assert not distributed.tables()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4])

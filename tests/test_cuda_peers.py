"""Real ranks: arenas, peer tables and barriers, on one GPU.

A mesh of one device with its table forced on must equal the direct way bit for bit; so must two and four processes
that share the GPU under jax.distributed, whose arenas they map by CUDA IPC. A rank that dies, or traces other
shapes, must end every other one with a diagnosis and in time.
"""

import contextlib
import os
import pathlib
import re
import socket
import subprocess
import sys

import cases
import jax
import numpy as np
import pytest
from cases import assert_same_bits, make_case, run
from jax.sharding import Mesh

from mok_jax import MoKConfig, distributed

SIZES = dict(tokens=300, hidden=136, intermediate=264, shared=72, experts=6, top_k=3)
KERNELS = {
    "hopper": ("bf16", {}),
    "hopper_mxfp8": ("bf16", dict(precision="mxfp8")),
    "portable": ("bf16", dict(portable=True)),
    "portable_mxfp8": ("bf16", dict(portable=True, precision="mxfp8")),
    "f32": ("f32", {}),
}
kernels = pytest.mark.parametrize(("dtype", "options"), KERNELS.values(), ids=KERNELS)


@contextlib.contextmanager
def table(dtype, way="pointers"):
    mesh = Mesh(np.array(jax.devices("cuda")[:1]), ("expert",))
    sizes = dict(tokens=SIZES["tokens"], hidden=SIZES["hidden"], top_k=SIZES["top_k"])
    yield mesh, distributed.initialize(mesh, dtype=cases.DTYPES[dtype][0], way=way, **sizes)
    distributed.finalize()


@kernels
@pytest.mark.parametrize("routing", ["distinct", "padding_slots", "one_expert", "no_expert"])
def test_a_table_of_one_device_gives_the_bits_of_the_direct_way(dtype, options, routing):
    case = make_case(dtype, routing, **SIZES)
    config = MoKConfig(**options, minibatch=128, macrobatch=512)
    direct = run(case, "cuda", config=config)
    with table(dtype) as (mesh, made):
        assert made.ranks == 1 and made.way == "pointers"
        for _ in range(3):  # staging and window are used again
            assert_same_bits(run(case, "cuda", config=config, mesh=mesh), direct)


def test_other_shapes_share_the_arena():
    with table("bf16") as (mesh, _):
        for tokens in (300, 1, 128, 300):
            case = make_case("bf16", **SIZES | dict(tokens=tokens))
            config = MoKConfig(minibatch=128)
            assert_same_bits(run(case, "cuda", config=config, mesh=mesh), run(case, "cuda", config=config))


def test_a_call_that_waits_in_vain_does_not_give_the_group_up():
    case, config = make_case("bf16", **SIZES), MoKConfig(minibatch=128, timeout=0.3)
    with table("bf16") as (mesh, _):
        good = run(case, "cuda", config=config, mesh=mesh)
        stuck = MoKConfig(minibatch=128, timeout=0.3, stuck_counter=3)
        result = run(case, "cuda", config=stuck, mesh=mesh)
        assert all(np.isnan(value.astype(np.float32)).any() for value in result.values() if value.size)
        with pytest.raises(jax.errors.JaxRuntimeError, match="in vain for counter 3"):
            run(case, "cuda", config=config, mesh=mesh)
        assert_same_bits(run(case, "cuda", config=config, mesh=mesh), good)


def test_a_call_after_finalize_says_so():
    case = make_case("bf16", **SIZES)
    with table("bf16") as (mesh, _):
        run(case, "cuda", config=MoKConfig(minibatch=128), mesh=mesh)
        compiled = jax.jit(lambda case: cases.call(case, "cuda", config=MoKConfig(minibatch=128), mesh=mesh))
        jax.block_until_ready(compiled(case))
    with pytest.raises(jax.errors.JaxRuntimeError, match="this device is in no table of peers"):
        jax.block_until_ready(compiled(case))


# ---- several processes ----


def work(ranks, mode, seconds, **environment):
    """Runs the worker's processes; their exit codes and outputs."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    worker = pathlib.Path(__file__).with_name("peers_worker.py")
    running = [
        subprocess.Popen(
            [sys.executable, str(worker), str(rank), str(ranks), str(port), mode],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=os.environ | {"JAX_PLATFORMS": "cuda,cpu"} | environment,
        )
        for rank in range(ranks)
    ]
    outputs = []
    try:
        for process in running:
            outputs.append(process.communicate(timeout=seconds)[0])
    finally:
        for process in running:
            process.kill()
    return [process.returncode for process in running], outputs


@pytest.mark.parametrize("ranks", [2, 4])
def test_processes_that_share_a_gpu_equal_virtual_ranks(ranks):
    codes, outputs = work(ranks, "equal", 100)
    assert codes == [0] * ranks, outputs
    assert all(f"rank {rank}: 12 steps equal" in output for rank, output in enumerate(outputs))


def test_a_rank_that_dies_ends_the_others():
    codes, outputs = work(2, "dies", 100)
    assert codes[1] == 7 and codes[0] != 0, outputs
    assert re.search(r"rank 0 of 2 in group 0: at the barrier .* ranks 1 did not come within 5 s", outputs[0]), outputs


def test_ranks_that_trace_different_shapes_are_told_both():
    codes, outputs = work(2, "shapes", 100)
    assert all(codes), outputs
    for rank, output in enumerate(outputs):
        assert re.search(rf"rank {1 - rank} came to the barrier .* with another call: here .*, there ", output), output
        assert "tokens 64" in output and "tokens 128" in output

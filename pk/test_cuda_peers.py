"""Real ranks: arenas, peer tables and barriers, on one GPU; test_cuda_gpus.py has what needs several.

A mesh of one device with its table forced on must equal the direct way bit for bit; so must two and four processes
that share the GPU under jax.distributed, whose arenas they map by CUDA IPC. A rank that dies, or traces other
shapes, must end every other one with a diagnosis and in time.
"""

import contextlib
import dataclasses
import faulthandler
import functools
import math
import os
import pathlib
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time

import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import assert_same_bits, make_case, run
from jax.sharding import Mesh

from mok_jax import MoKConfig, distributed, ops

SIZES = dict(tokens=300, hidden=136, intermediate=264, shared=72, experts=6, top_k=3)
KERNELS = {
    "hopper": ("bf16", {}),
    "hopper_mxfp8": ("bf16", dict(precision="mxfp8")),
    "portable": ("bf16", dict(portable=True)),
    "portable_mxfp8": ("bf16", dict(portable=True, precision="mxfp8")),
    "f32": ("f32", {}),
}
kernels = pytest.mark.parametrize(("dtype", "options"), KERNELS.values(), ids=KERNELS)


def need(count):
    if len(jax.devices("cuda")) < count:
        pytest.skip(f"needs {count} CUDA devices, there are {len(jax.devices('cuda'))}")


@contextlib.contextmanager
def table(dtype, way=None, axes=(("expert", 1),), **sizes):
    names, shape = zip(*axes, strict=True)
    devices = jax.devices("cuda")[: math.prod(shape)]
    for device in devices if len(devices) > 1 else ():
        reserve(device)
    mesh = Mesh(np.array(devices).reshape(shape), names)
    sizes = {name: SIZES[name] for name in ("tokens", "hidden", "top_k")} | sizes
    try:
        yield mesh, distributed.initialize(mesh, dtype=cases.DTYPES[dtype][0], way=way, **sizes)
    finally:
        distributed.finalize()


@functools.cache
def reserve(device, gibibytes=2):
    """XLA keeps what it had once: it must not map memory while a GPU waits for another one."""
    jax.block_until_ready(jnp.zeros(gibibytes * 2**28, jnp.float32, device=device))


@functools.cache
def why_not(way):
    return distributed.probe((way,))[way]


@pytest.mark.parametrize("way", distributed.WAYS)
def test_a_way_that_is_refused_says_why(way):
    reason = why_not(way)
    if reason is None:
        assert distributed.probe((way,)) == {way: None}  # what it took is given back
        return
    with (
        pytest.raises(RuntimeError, match=re.escape(f"{way}: process 0: {reason}; use implementation=")),
        table("f32", way, axes=(("expert", len(jax.devices("cuda"))),)),  # all, as they are probed
    ):
        pass
    assert not distributed.tables()


@kernels
@pytest.mark.parametrize("way", distributed.WAYS)
@pytest.mark.parametrize("routing", ["distinct", "padding_slots", "one_expert", "no_expert"])
def test_a_table_of_one_device_gives_the_bits_of_the_direct_way(dtype, options, way, routing):
    if why_not(way) is not None:
        pytest.skip(f"{way}: {why_not(way)}")
    case = make_case(dtype, routing, **SIZES)
    config = MoKConfig(**options, minibatch=128, macrobatch=512)
    direct = run(case, "cuda", config=config)
    with table(dtype, way) as (mesh, made):
        assert made.ranks == 1 and made.way == way
        for _ in range(3):  # staging and window are used again
            assert_same_bits(run(case, "cuda", config=config, mesh=mesh), direct)


def test_the_collective_stream_gives_the_same_bits():
    case, config = make_case("bf16", **SIZES), MoKConfig(minibatch=128)
    direct = run(case, "cuda", config=config)
    with table("bf16") as (mesh, _):
        got = run(case, "cuda", config=dataclasses.replace(config, collective_stream=True), mesh=mesh)
        assert_same_bits(got, direct)


def test_other_shapes_share_the_arena():
    with table("bf16") as (mesh, _):
        for tokens in (300, 1, 128, 300):
            case = make_case("bf16", **SIZES | dict(tokens=tokens))
            config = MoKConfig(minibatch=128)
            assert_same_bits(run(case, "cuda", config=config, mesh=mesh), run(case, "cuda", config=config))


@pytest.mark.parametrize("way", distributed.WAYS)
def test_a_larger_arena_takes_the_place_of_a_smaller_one(way):
    if why_not(way) is not None:
        pytest.skip(f"{way}: {why_not(way)}")
    config = MoKConfig(minibatch=128)
    with table("bf16", way, tokens=64) as (mesh, small):
        first = make_case("bf16", **SIZES | dict(tokens=64))
        expected = run(first, "cuda", config=config, mesh=mesh)
        large = distributed.initialize(mesh, tokens=300, hidden=SIZES["hidden"], top_k=SIZES["top_k"])
        assert distributed.tables() == (large,) and (large.id, large.way) == (small.id, way)
        case = make_case("bf16", **SIZES)
        assert_same_bits(run(case, "cuda", config=config, mesh=mesh), run(case, "cuda", config=config))
        assert_same_bits(run(first, "cuda", config=config, mesh=mesh), expected)  # compiled before


def test_a_call_that_waits_in_vain_does_not_give_the_group_up():
    case, config = make_case("bf16", **SIZES), MoKConfig(minibatch=128, timeout=0.3)
    with table("bf16") as (mesh, _):
        good = run(case, "cuda", config=config, mesh=mesh)
        stuck = dataclasses.replace(config, stuck_counter=cases.first_block_of_h(case, config))
        result = run(case, "cuda", config=stuck, mesh=mesh)
        assert [name for name, value in result.items() if not np.isnan(value.astype(np.float32)).all()] == []
        with pytest.raises(jax.errors.JaxRuntimeError, match=r"on rank 0 waited 0\.3 s in vain for counter \d+: found"):
            run(case, "cuda", config=config, mesh=mesh)
        assert_same_bits(run(case, "cuda", config=config, mesh=mesh), good)


def test_an_expert_axis_larger_than_a_domain_is_refused(monkeypatch):
    monkeypatch.setattr(ops.cuda(), "MAX_RANKS", 0)
    with pytest.raises(
        ValueError, match="'expert' must have at most 0 devices, as one NVLink domain has, got 1; put a data"
    ):
        distributed.initialize(Mesh(np.array(jax.devices("cuda")[:1]), ("expert",)), tokens=8, hidden=8, top_k=1)


def test_compiled_calls_outlive_finalize():
    case, config = make_case("bf16", **SIZES), MoKConfig(minibatch=128)
    compiled = jax.jit(lambda case, mesh: cases.call(case, "cuda", config=config, mesh=mesh), static_argnums=1)
    with table("bf16", "pointers") as (mesh, first):
        y = jax.device_get(compiled(case, mesh))
    with pytest.raises(jax.errors.JaxRuntimeError, match="this device is in no table of peers"):
        jax.block_until_ready(compiled(case, mesh))
    # A program is traced once for all ways.
    with table("bf16", "ipc" if why_not("ipc") is None else "pointers") as (mesh, second):
        assert first.id == second.id
        assert distributed.initialize(mesh, tokens=300, hidden=136, top_k=3) is second
        assert_same_bits(jax.device_get(compiled(case, mesh)), y)


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_the_exchange_alone_moves_every_row_to_its_place(ranks):
    bench = pytest.importorskip("bench_exchange", reason="without the benchmarks")
    need(ranks)
    shape = bench.Shape(tokens=24, hidden=136, intermediate=0, experts=0, top_k=2, dtype="bfloat16")
    with table("bf16", axes=(("expert", ranks),)) as (mesh, made):
        exchange = bench.Exchange(mesh, made, shape)
        for sms in (2, 32):
            exchange.check(sms)
        pulled, returned = exchange.call("none", repeats=1, barriers=66, sms=2)()
        assert jax.block_until_ready(pulled).shape == (ranks * 48, 136) and returned.size == 0


# ---- several processes; MOK_GPUS says over how many GPUs those that fail are spread ----


IMPORTS = 20  # seconds that a worker may take before its own limit begins


def work(ranks, mode, seconds=90, **environment):
    """Runs the worker's processes; their exit codes and outputs. One that hangs says where, and is killed.

    A worker's own limit begins once it has imported what it needs; up to 16 of them do so at once.
    """
    need(int(os.environ.get("MOK_GPUS") or 1))
    deadline = time.monotonic() + seconds + IMPORTS
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    # XLA must not exchange anything of its own between programs that differ.
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_gpu_shard_autotuning=false"
    environment |= {"JAX_PLATFORMS": "cuda", "XLA_FLAGS": flags, "MOK_SECONDS": str(seconds)}
    worker = pathlib.Path(__file__).with_name("peers_worker.py")
    with contextlib.ExitStack() as stack:
        outputs = [stack.enter_context(tempfile.TemporaryFile("w+")) for _ in range(ranks)]
        running = [
            subprocess.Popen(
                [sys.executable, str(worker), str(rank), str(ranks), str(port), mode],
                stdout=outputs[rank],
                stderr=subprocess.STDOUT,
                env=os.environ | environment,
            )
            for rank in range(ranks)
        ]
        for process in running:
            stack.callback(process.kill)
        codes = [ended(process, deadline) for process in running]
        for output in outputs:
            output.seek(0)
        return codes, [
            f"---- rank {rank} ended with {codes[rank]}\n{output.read()}" for rank, output in enumerate(outputs)
        ]


def ended(process, deadline):
    """The exit code of a process, which is killed at the deadline: what all of them printed must not be lost."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        return process.wait(max(0.0, deadline - time.monotonic()))
    process.kill()
    process.wait()
    return None  # which is neither 0 nor a failure of its own


def raises(text, output):
    """Whether the call or the next one raised this, beside the line printed at once, and no result was a number."""
    nan = re.findall(r"NaN: (\d) of 6", output)
    return re.search(rf"raised: .*{re.escape(text)}", output) and output.count(text) >= 2 and nan in ([], ["6"])


@pytest.mark.parametrize(("ranks", "way"), [(2, "ipc"), (4, "ipc"), (2, "fabric")])
def test_processes_that_share_a_gpu_equal_virtual_ranks(ranks, way):
    check_equal(ranks, way, gpus=1)


@pytest.mark.parametrize("way", distributed.WAYS[1:])
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_processes_of_a_gpu_each_equal_virtual_ranks(ranks, way):
    need(ranks)
    check_equal(ranks, way, gpus=ranks)


def check_equal(ranks, way, gpus):
    if why_not(way) is not None:
        pytest.skip(f"{way}: {why_not(way)}")
    codes, outputs = work(ranks, "equal", MOK_WAY=way, MOK_GPUS=str(gpus))
    assert codes == [0] * ranks, "\n".join(outputs)
    for rank, output in enumerate(outputs):
        assert f"rank {rank}: 8 steps equal" in output
        assert (f"rank {rank}: 200 steps beside all-reduces equal" in output) == (gpus == ranks)


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_rank_that_is_killed_ends_the_others(ranks):
    codes, outputs = work(ranks, "dies")
    everything = "\n".join(outputs)
    assert codes[-1] == -signal.SIGKILL and all(codes), everything
    missing = rf"ranks {ranks - 1} did not come within 10 s for (forward|backward)\(dtype bfloat16, .*tokens \d"
    assert re.search(rf"rank \d of {ranks} in group 0: at the barrier .* {missing}", everything), everything
    for output in outputs[:-1]:
        # The call may have lost its rank between its passes.
        assert re.search(r"NaN: [1-6] of 6 results", output), everything
        assert re.search("raised: .*the group is given up", output), everything


def test_ranks_that_trace_different_shapes_are_told_both():
    codes, outputs = work(2, "shapes")
    everything = "\n".join(outputs)
    assert all(codes), everything
    for rank, output in enumerate(outputs):
        assert re.search(rf"rank {1 - rank} came to the barrier .* with another call: here .*, there ", output), output
        assert "tokens 64" in output and "tokens 128" in output
        assert raises("with another call", output), output


def test_another_order_of_devices_ends_every_rank():
    codes, outputs = work(2, "order")
    everything = "\n".join(outputs)
    assert all(codes), everything
    for rank, output in enumerate(outputs):
        assert "refused: moe: the mesh must have its devices in the order [0, 1] that" in output, everything
        text = f"rank {rank} of 2 in group 0: the device is rank {1 - rank} of the mesh that runs"
        assert raises(text, output), everything


@pytest.mark.skipif("MOK_STRESS" not in os.environ, reason="takes minutes; MOK_STRESS says how many steps, say 2000")
def test_stress():
    """Random routings; four shapes, with and without a context, on both paths; pauses between the phases.

    A rank may stop for half a second between any two phases, but no task of a megakernel waits 0.2 s: none waits for
    a peer.
    """
    faulthandler.cancel_dump_traceback_later()
    steps = os.environ["MOK_STRESS"]
    codes, outputs = work(2, "equal", 520, MOK_STEPS=steps, MOK_TIMEOUT="0.2")
    assert codes == [0, 0], "\n".join(outputs)
    assert all(f"{steps} steps equal" in output for output in outputs)

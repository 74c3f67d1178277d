"""One of several processes of a group, for test_cuda_peers.py: python peers_worker.py rank ranks port mode.

All of them may share one GPU: a program without XLA's collectives runs there. Every step of one routing compares
values and gradients with those of virtual ranks on one device, bit for bit. What the last rank does after some
steps is the mode: "equal" nothing else; "shapes" traces other shapes; "dies" is killed while its forward pass runs;
and in "order" all ranks run over a mesh whose devices stand in another order than in the table. In "equal", where each
has a GPU of its own (MOK_GPUS), two layers beside sums by NCCL follow, many times, none awaited.
"""

import dataclasses
import faulthandler
import functools
import os
import signal
import sys

import cases
import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import mok_jax
from mok_jax import distributed

SIZES = dict(hidden=136, intermediate=264, experts=8, top_k=2)
TOKENS = (300, 1, 127, 128)  # of a rank
PLAIN = mok_jax.MoKConfig(minibatch=128, macrobatch=256, barrier_timeout=60.0)
PAUSES = dataclasses.replace(PLAIN, random_order=0)
CONFIGS = (PLAIN, PAUSES, dataclasses.replace(PAUSES, save_context=False), dataclasses.replace(PAUSES, portable=True))
STEPS = int(os.environ.get("MOK_STEPS", "8"))
GPUS = int(os.environ.get("MOK_GPUS") or 1)  # that the ranks are spread over
FAULT = 3  # the step of the other modes


def problem(seed, tokens):
    rng = np.random.default_rng(seed)
    patterns = [name for name in cases.PATTERNS if name not in ("tile_counts", "out_of_range")]  # need many tokens
    case = cases.make_case("bf16", patterns[int(rng.integers(len(patterns)))], seed=seed, tokens=tokens, **SIZES)
    return case, cases.cotangent_of(case.x)


def spread(tree, over):
    """Arrays that every process has, split over a mesh along their first axis."""
    sharding = NamedSharding(over, P("expert"))
    return jax.tree.map(
        lambda array: jax.make_array_from_callback(array.shape, sharding, lambda index: np.asarray(array)[index]), tree
    )


def launch(problem, over, **options):
    """Values and gradients over a mesh, by name."""
    case, d_y = spread(problem, over)
    return cases.compiled(case, d_y, "cuda", tuple(sorted(options.items())))


def differing(rank, ranks, problem, results, config):
    """The names of this rank's results that differ from those of virtual ranks."""
    virtual = dataclasses.replace(config, virtual_ranks=ranks, random_order=None)
    return parts_that_differ(rank, results, cases.compiled(*problem, "cuda", (("config", virtual),)))


def parts_that_differ(rank, results, exact):
    wrong = []
    for name, value in results.items():
        mine = np.asarray(value.addressable_shards[0].data)
        part = np.asarray(exact[name])[rank * len(mine) : (rank + 1) * len(mine)]
        if not np.array_equal(mine.view(np.uint8), part.view(np.uint8)):
            wrong.append(name)
    return wrong


def check_beside_all_reduces(rank, ranks, mesh, steps):
    """Two layers and sums by NCCL in one program: right at first, and then the same."""
    case, d_y = problem(0, TOKENS[0] * ranks)
    numbers = [np.arange(ranks * n, dtype=np.float32).reshape(ranks, 1, n) % 1000 for n in (2**20, 2**22)]
    virtual = dataclasses.replace(PLAIN, virtual_ranks=ranks)
    exact, _ = cases.hidden_all_reduces(case, d_y, [], None, implementation="cuda", config=virtual)
    arguments = spread((case, d_y, numbers), mesh)

    def call():
        return cases.hidden_all_reduces(*arguments, mesh, implementation="cuda", config=PLAIN)

    first = call()
    wrong = parts_that_differ(rank, first[0], exact)
    sums = zip(first[1], numbers, strict=True)
    if wrong or not all(np.array_equal(got.addressable_data(0), part.sum(axis=0, keepdims=True)) for got, part in sums):
        raise SystemExit(f"rank {rank}: beside all-reduces results differ: {wrong or 'the sums'}")
    differ = [cases.rows_that_differ(call(), first) for _ in range(steps)]
    if any(np.asarray(rows.addressable_data(0)).any() for rows in jax.tree.leaves(differ)):
        raise SystemExit(f"rank {rank}: beside all-reduces results change from step to step")
    print(f"rank {rank}: {steps} steps beside all-reduces equal", flush=True)


@functools.partial(jax.jit, static_argnums=(1, 2))
def half_of_it(case, mesh, config):
    """The forward pass that a backward pass would follow."""
    return jax.vjp(lambda x: cases.call(case._replace(x=x), "cuda", config=config, mesh=mesh), case.x)


def faulty(fault, last, given, mesh, config):
    """The call of the step in which something goes wrong; it may raise by itself."""
    if fault != "order":
        if fault == "dies" and last:  # without a backward pass, which the others then miss however fast this one is
            half_of_it(spread(given[0], mesh), mesh, config)
            os.kill(os.getpid(), signal.SIGKILL)
        return launch(given, mesh, config=config, mesh=mesh)
    turned = Mesh(mesh.devices[::-1], mesh.axis_names, axis_types=mesh.axis_types)
    try:
        launch(given, turned, config=config, mesh=turned)
    except ValueError as error:
        print(f"refused: {error}", flush=True)
    with jax.set_mesh(turned):
        return launch(given, turned, config=config)


def main(rank, ranks, port, mode):
    jax.distributed.initialize(
        f"127.0.0.1:{port}",
        ranks,
        rank,
        local_device_ids=[rank % GPUS],
        heartbeat_timeout_seconds=40,
        shutdown_timeout_seconds=10,
    )
    jax.config.update("jax_default_device", jax.local_devices()[0])
    mesh = jax.make_mesh((ranks,), ("expert",))
    way = os.environ.get("MOK_WAY")
    sizes = dict(hidden=SIZES["hidden"], top_k=SIZES["top_k"], way=way)
    small = distributed.initialize(mesh, tokens=1, **sizes)
    made = distributed.initialize(mesh, tokens=max(TOKENS), **sizes)
    assert way in (None, made.way) and distributed.tables() == (made,) and made.id == small.id
    last = rank == ranks - 1
    for seed in range(STEPS):
        config = CONFIGS[seed // len(TOKENS) % len(CONFIGS)]
        tokens = TOKENS[seed % len(TOKENS)] * ranks
        fault = mode if seed == FAULT and mode != "equal" else None
        if fault == "dies":  # in the steps before, one rank may compile for longer than that
            config = dataclasses.replace(config, barrier_timeout=10.0)
        given = problem(seed, tokens // 2 if fault == "shapes" and last else tokens)
        if fault is not None:
            try:  # what went wrong may be known before the backward call, or the next one, which then raises it
                results = faulty(fault, last, given, mesh, config)
                parts = [np.asarray(value.addressable_shards[0].data, np.float32) for value in results.values()]
                print(f"NaN: {sum(np.isnan(part).all() for part in parts)} of {len(parts)} results", flush=True)
                differing(rank, ranks, given, results, config)
            except jax.errors.JaxRuntimeError as error:
                raise SystemExit(f"raised: {error}") from error
            raise SystemExit("nothing was raised")
        results = launch(given, mesh, config=config, mesh=mesh)
        wrong = differing(rank, ranks, given, results, config)
        if wrong:
            raise SystemExit(f"rank {rank}: step {seed} differs: {wrong}")
    print(f"rank {rank}: {STEPS} steps equal", flush=True)
    if ranks <= GPUS:
        check_beside_all_reduces(rank, ranks, mesh, 200)
    if ranks == 2:  # else what the process ends with is given back by its end
        distributed.finalize()
        assert not distributed.tables()


if __name__ == "__main__":
    faulthandler.enable()
    faulthandler.dump_traceback_later(float(os.environ["MOK_SECONDS"]), exit=True)
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4])

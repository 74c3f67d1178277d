"""Expert parallelism, from one process with all devices to one process a GPU: a layer learns a fixed teacher.

    python examples/expert_parallel.py                       # all devices of this machine; 8 virtual ones on a CPU
    python examples/expert_parallel.py --data 2              # two groups of ranks, data-parallel to each other

One process a GPU, here two on one machine (on several machines --coordinator names the first one, and the expert
axis stays inside a machine, or an NVLink domain: choose --data accordingly):

    python examples/expert_parallel.py --coordinator 127.0.0.1:12345 --processes 2 --process 0 --device 0 &
    python examples/expert_parallel.py --coordinator 127.0.0.1:12345 --processes 2 --process 1 --device 1

Every process runs the same program. What differs is `jax.distributed.initialize`, and on GPUs
`mok_jax.distributed.initialize`, which maps the peers' buffers before anything compiles.
"""

import argparse
import os
import sys

if not any(os.path.exists(path) for path in ("/dev/nvidia0", "/dev/nvidiactl")):
    devices = 8 if not any(argument.startswith("--coordinator") for argument in sys.argv) else 1
    flag, flags = "--xla_force_host_platform_device_count", os.environ.get("XLA_FLAGS", "")
    if "JAX_NUM_CPU_DEVICES" not in os.environ and flag not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} {flag}={devices}".strip()

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import mok_jax

HIDDEN, INTERMEDIATE, TOP_K = 128, 256, 2


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--data", type=int, default=1, help="size of the data axis; the rest is the expert axis")
    parser.add_argument("--tokens", type=int, default=128, help="tokens a device in a step")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--coordinator", help="address:port of process 0; without it there is one process")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--process", type=int, default=0, help="this one's number")
    # Not by CUDA_VISIBLE_DEVICES, which would hide the peers' GPUs from CUDA.
    parser.add_argument("--device", type=int, help="the one GPU of this machine that this process takes; else all")
    options = parser.parse_args()
    if options.coordinator is None and (options.processes, options.process, options.device) != (1, 0, None):
        parser.error("--processes, --process and --device need --coordinator")
    if min(options.data, options.tokens, options.steps, options.processes) < 1:
        parser.error("--data, --tokens, --steps and --processes must be at least 1")
    if not 0 <= options.process < options.processes:
        parser.error(f"--process must be less than --processes {options.processes}, got {options.process}")
    if options.coordinator is not None and not options.coordinator.rpartition(":")[2].isdecimal():
        parser.error(f"--coordinator must be address:port, got {options.coordinator}")
    return options


def batches(mesh, tokens: int, steps: int):
    """Random tokens, each process making those of its devices."""
    sharding = NamedSharding(mesh, P(mesh.axis_names))
    for step in range(steps):
        shape = (tokens * mesh.size, HIDDEN)

        def part(index, step=step, shape=shape):
            rows = range(*index[0].indices(shape[0]))
            return np.random.default_rng((step, rows.start)).normal(size=(len(rows), HIDDEN)).astype(np.float32)

        yield jax.make_array_from_callback(shape, sharding, part)


def main() -> None:
    options = parse()
    if options.coordinator:
        # A process that dies is noticed after the heartbeat's time-out, and the others end.
        jax.distributed.initialize(
            options.coordinator,
            options.processes,
            options.process,
            local_device_ids=None if options.device is None else [options.device],
            heartbeat_timeout_seconds=30,
        )
    if jax.device_count() % options.data:
        raise SystemExit(f"--data must divide the {jax.device_count()} devices, got {options.data}")
    ranks = jax.device_count() // options.data
    mesh = jax.make_mesh((options.data, ranks), ("data", "expert"), axis_types=(AxisType.Auto,) * 2)
    if mesh.devices.flat[0].platform == "gpu" and ranks > 1:
        mok_jax.distributed.initialize(mesh, tokens=options.tokens, hidden=HIDDEN, top_k=TOP_K, dtype=jnp.float32)
    with jax.set_mesh(mesh):
        layer = mok_jax.MoKMoE(HIDDEN, INTERMEDIATE, num_experts=4 * ranks, top_k=TOP_K, rngs=nnx.Rngs(0))
        optimizer = nnx.Optimizer(layer, optax.adam(3e-3), wrt=nnx.Param)
        teacher = jnp.asarray(np.random.default_rng(1).normal(size=(HIDDEN, HIDDEN)) / HIDDEN**0.5, jnp.float32)

        @nnx.jit
        def step(layer, optimizer, x):
            def loss(layer):
                return jnp.mean((layer(x) - jnp.tanh(x @ teacher)) ** 2)

            value, gradients = nnx.value_and_grad(loss)(layer)
            optimizer.update(layer, gradients)
            return value

        for number, x in enumerate(batches(mesh, options.tokens, options.steps)):
            value = float(step(layer, optimizer, x))
            if options.process == 0 and (number % 10 == 0 or number == options.steps - 1):
                print(f"step {number}: loss {value:.4f}", flush=True)
    if jax.process_index() == 0:
        chosen = mok_jax.choose_implementation(None, mesh, ranks, jnp.dtype("float32"))
        platform = mesh.devices.flat[0].platform
        print(f"{chosen!r} over {dict(mesh.shape)} {platform} devices, {jax.process_count()} process(es)")


if __name__ == "__main__":
    main()

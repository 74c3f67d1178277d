"""Small layers on the GPU, for NVIDIA's compute-sanitizer; pytest does not collect it.

    compute-sanitizer --tool memcheck python tests/sanitize.py
    compute-sanitizer --tool racecheck python tests/sanitize.py      # shared memory only
    compute-sanitizer --tool synccheck python tests/sanitize.py

What racecheck cannot see (ring, counters): the host's random-order mode, the tests of dirty scratch.
"""

import os

os.environ["XLA_PYTHON_CLIENT_ALLOCATOR"] = "platform"  # one cudaMalloc a buffer: memcheck sees its end
os.environ.setdefault("MOK_TIMEOUT", "600")  # the tools are slow
os.environ.setdefault("JAX_PLATFORMS", "cuda,cpu")

import cases
import numpy as np

import mok_jax

SIZES = dict(tokens=150, hidden=136, intermediate=264, shared=72, experts=4, top_k=2)
LONG = dict(tokens=40, hidden=3080, intermediate=64, experts=4, top_k=2)
ODD = dict(tokens=37, hidden=23, intermediate=41, shared=57, experts=6, top_k=3)
RUNS = [
    ("bf16", SIZES, {}),
    ("bf16-f32", SIZES, dict(minibatch=128, macrobatch=128)),
    ("bf16", SIZES, dict(portable=True)),
    ("bf16", ODD, {}),
    ("f32", ODD, dict(minibatch=128, macrobatch=256)),
    ("bf16", SIZES, dict(virtual_ranks=2, minibatch=128, macrobatch=128)),
    ("f32", SIZES, dict(virtual_ranks=2)),
    ("bf16", SIZES, dict(precision="mxfp8")),
    ("bf16-f32", SIZES, dict(precision="mxfp8", virtual_ranks=2, minibatch=128, macrobatch=128)),
    ("bf16", ODD, dict(precision="mxfp8")),
    ("bf16", LONG, dict(precision="mxfp8")),
    ("bf16", LONG, dict(precision="mxfp8", portable=True, virtual_ranks=2)),
]

if __name__ == "__main__":
    for dtype, sizes, options in RUNS:
        case = cases.make_case(dtype, "padding_slots", **sizes)
        result = cases.run(case, "cuda", config=mok_jax.MoKConfig(**options))
        wrong = [name for name, value in result.items() if not np.isfinite(value.astype(np.float32)).all()]
        if wrong:
            raise SystemExit(f"{dtype} {sizes} {options}: not finite: {wrong}")
        print(dtype, sizes, options, "finite")

"""Both modules over meshes: what one device gives, whatever is sharded and how."""

import contextlib
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import GPU, TINY, assert_near, bound, kinds, mesh_of, tiny
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from layers import RECORDED, by_hand, layer_of, parameters_of, results_of, run, sharpest_of, x_of

import mok_jax

OTHERWISE = {  # as FSDP leaves them
    "router": P("data"),
    "w_gate": P("expert", "data"),
    "w_up": P("data"),
    "w_down": P(None, None, "expert"),
    "shared_gate": P("data", "expert"),
    "shared_up": P(None, "data"),
    "shared_down": P("expert"),
}


def placed(mesh, spec, x, specs=None):
    """The parameters as the modules make them or as in `specs`, and x as in `spec`."""
    specs = specs or {name: P("expert") if name.startswith("w_") else P() for name in OTHERWISE}
    parameters = {
        name: jax.device_put(value, NamedSharding(mesh, specs[name]))
        for name, value in parameters_of(experts=8).items()
    }
    return parameters, jax.device_put(x, NamedSharding(mesh, spec))


def residual_of(layer):
    def residual(parameters, x, mask):
        y, recorded = layer(parameters, x, mask)
        return x + y, recorded  # under Explicit axes y must have x's sharding

    return residual


EVERY = ("data", "expert")
# Both losses and all gradients on each mesh and kind of axes; frameworks, implementations, x's sharding and
# the ways to name the mesh are spread over them.
MATRIX = [
    ("nnx", "xla", "e8", "auto", P("expert"), "named"),
    ("linen", "host", "e8", "explicit", P("expert"), "ambient"),
    ("nnx", "host", "d2_e4", "auto", P("data"), "ambient"),
    ("linen", "xla", "d2_e4", "auto", P(EVERY), "arguments"),
    ("nnx", "reference", "d2_e4", "explicit", P("data", "expert"), "ambient"),
    ("nnx", "xla", "d2_e4", "explicit", P(None, EVERY), "named"),
    ("linen", "host", "d2_e4", "explicit", P(EVERY), "ambient"),
    ("nnx", "host", "d2_e4", "explicit", P("data", None, "expert"), "ambient"),
    ("linen", "reference", "d4_e2", "auto", P("data", "expert"), "named"),
    ("nnx", "host", "d4_e2", "explicit", P(), "ambient"),
]


def name_of_row(framework, implementation, mesh, kind, spec, how):
    axes = "_".join("".join(part if isinstance(part, str) else "".join(part or "-")) for part in spec) or "replicated"
    return "-".join([framework, implementation, mesh, kind, axes, how])


@pytest.mark.parametrize(
    ("framework", "implementation", "name", "kind", "spec", "how"), MATRIX, ids=[name_of_row(*row) for row in MATRIX]
)
def test_mesh_is_one_device(framework, implementation, name, kind, spec, how):
    mesh, x, mask = mesh_of(name, kind), x_of(8, 16), mask_of(8, 16)
    named = dict(mesh=mesh) if how == "named" else {}
    layer = layer_of(framework, implementation=implementation, config=TINY, num_experts=8, **named)
    with jax.set_mesh(mesh) if how == "ambient" else contextlib.nullcontext():
        results = run(residual_of(layer), *placed(mesh, spec, x), mask)
    assert_near(results, expected_on_a_mesh(), 1e-12)


@kinds
def test_parameters_sharded_otherwise(kind):
    layer = layer_of("nnx", implementation="host", config=TINY, num_experts=8)
    mesh = mesh_of(kind=kind)
    results = run(residual_of(layer), *placed(mesh, P("data", None, "expert"), x_of(8, 16), OTHERWISE), mask_of(8, 16))
    assert_near(results, expected_on_a_mesh(), 1e-12)


@pytest.mark.parametrize("token_axes", [["expert", "data"], "expert"], ids=["list", "name"])
def test_token_axes_as_moe_takes_them(token_axes):
    mesh = mesh_of()
    layer = layer_of("nnx", implementation="host", num_experts=8, mesh=mesh, token_axes=token_axes)
    y, _ = jax.jit(residual_of(layer))(parameters_of(experts=8), x_of(8, 16), mask_of(8, 16))
    assert_near({"y": y}, {"y": expected_on_a_mesh()["y"]}, 1e-12)


@pytest.mark.parametrize("implementation", ["host", "cuda"] if GPU else ["host"])
def test_steps_on_two_ranks_are_those_of_one_device(implementation):
    devices = jax.devices("cuda" if implementation == "cuda" else "cpu")[:2]
    if len(devices) < 2:
        pytest.skip("needs 2 CUDA devices")
    dtype, config = sharpest_of(implementation), dataclasses.replace(tiny(implementation), barrier_timeout=20.0)
    start, x, mask = parameters_of(dtype, experts=8), x_of(8, 16, dtype=dtype), mask_of(8, 16)

    def trained(mesh):
        layer = layer_of("nnx", implementation=implementation, config=config, num_experts=8, mesh=mesh)

        def step(parameters, _):
            results = results_of(layer, parameters, x, mask)
            return {name: p - 0.01 * results[f"d_{name}"] for name, p in parameters.items()}, results["y"]

        return jax.device_get(jax.jit(lambda p: jax.lax.scan(step, p, None, 3))(start))

    try:
        (one, y), (two, y_of_two) = trained(None), trained(jax.make_mesh((2,), ("expert",), devices=devices))
    finally:
        if implementation == "cuda":
            mok_jax.distributed.finalize()
    assert_near(two | {"y": y_of_two}, one | {"y": y}, bound(implementation, 1e-12))
    assert all(np.abs(one[name] - value).max() > 1e-3 for name, value in start.items())


def mask_of(*leading):
    return jnp.asarray(np.random.default_rng(3).random(leading) < 0.8)


@functools.cache
def expected_on_a_mesh():
    return run(residual_of(by_hand), parameters_of(experts=8), x_of(8, 16), mask_of(8, 16))


# (framework, manual axes, those that split the tokens, check_vma)
MANUAL = {
    "nnx-all-vma": ("nnx", EVERY, EVERY, True),
    "linen-all-no_vma": ("linen", EVERY, EVERY, False),
    "nnx-all-replicated_over_data": ("nnx", EVERY, ("expert",), True),
    "nnx-data-no_vma": ("nnx", ("data",), ("data",), False),
    "linen-data-vma": ("linen", ("data",), ("data",), True),
    "linen-expert-vma": ("linen", ("expert",), ("expert",), True),
}


@pytest.mark.parametrize(("framework", "manual", "split", "check_vma"), MANUAL.values(), ids=MANUAL)
def test_inside_a_shard_map(framework, manual, split, check_vma):
    mesh = mesh_of()
    layer = layer_of(framework, implementation="xla", num_experts=8)
    tokens, by_expert = P(split), P("expert" if "expert" in manual else None)
    specs = {name: by_expert if name.startswith("w_") else P() for name in parameters_of()}
    inside = jax.shard_map(
        layer,
        mesh=mesh,
        in_specs=(specs, tokens, tokens),
        out_specs=(tokens, {name: P() for name in RECORDED}),
        axis_names=set(manual),
        check_vma=check_vma,
    )

    with jax.set_mesh(mesh):
        results = run(residual_of(inside), parameters_of(experts=8), x_of(8, 16), mask_of(8, 16))
    assert_near(results, expected_on_a_mesh(), 1e-12)


@kinds
def test_no_device_reads_the_scores_of_others(kind):
    # XLA cannot split a top-k: by itself it gathers all scores on every device.
    mesh = mesh_of(kind=kind)
    layer = layer_of("nnx", implementation="xla", num_experts=8)
    x = jax.device_put(x_of(8, 16, dtype=jnp.float32), NamedSharding(mesh, P(EVERY)))
    parameters = {name: value.astype(jnp.float32) for name, value in parameters_of(experts=8).items()}
    with jax.set_mesh(mesh):
        text = jax.jit(lambda x: layer(parameters, x)[0]).lower(x).compile().as_text()
    assert "all-to-all" in text and "all-gather" not in text

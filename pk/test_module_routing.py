"""What both modules route by beside the logits: the token mask and the selection bias."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from cases import assert_near, assert_same_bits, bound, tiny
from flax import nnx
from layers import (
    RANDOM,
    by_hand,
    frameworks,
    implementations,
    layer_of,
    module_of,
    parameters_of,
    run,
    sharpest_of,
    x_of,
)

from mok_jax.nnx import SelectionBias

# ---- masked tokens ----


MASK = np.random.default_rng(3).random((4, 9)) < 0.6


@functools.cache
def expected_of_the_unmasked():
    return run(by_hand, parameters_of(), x_of(4, 9)[MASK])


@implementations
def test_masked_tokens_take_no_part(implementation):
    # The masked rows hold NaN, and so does their cotangent.
    dtype = sharpest_of(implementation)
    parameters, x = parameters_of(dtype), jnp.where(MASK[..., None], x_of(4, 9, dtype=dtype), jnp.nan)
    layer = layer_of("nnx", implementation=implementation, config=tiny(implementation))

    def with_bad_cotangents(parameters, x, mask):
        y, recorded = layer(parameters, x, mask)
        return y * jnp.where(mask[..., None], 1, jnp.nan), recorded

    actual = run(with_bad_cotangents, parameters, x, jnp.asarray(MASK))
    expected = expected_of_the_unmasked()
    y, d_x = (actual.pop(name) for name in ("y", "d_x"))
    short = {"y": y[MASK], "d_x": d_x[MASK]}
    assert_near(actual | short, expected, bound(implementation, 1e-12))
    assert (d_x[~MASK] == 0).all()
    clean, _ = jax.jit(layer)(parameters, x, jnp.asarray(MASK))
    assert (np.asarray(clean)[~MASK] == 0).all()


# ---- the selection bias ----


@frameworks
def test_selection_bias_is_no_parameter(framework):
    module = module_of(framework, use_selection_bias=True)
    if framework == "nnx":
        names = set(nnx.to_pure_dict(nnx.state(module, nnx.Param)))
        bias = nnx.state(module, SelectionBias)["selection_bias"]
    else:
        variables = module.init(jax.random.key(0), x_of(2, dtype=jnp.float32))
        assert variables.keys() == {"params", "router_state"}
        names, bias = set(variables["params"]), variables["router_state"]["selection_bias"]
    assert bias.shape == (6,) and bias.dtype == jnp.float32
    assert {"router", "w_gate", "w_up", "w_down"} <= names and "selection_bias" not in names


def test_selection_bias_is_updated_by_the_trainer():
    module = module_of("nnx", use_selection_bias=True, implementation="reference", dtype=jnp.float32, **RANDOM)
    optimizer = nnx.Optimizer(module, optax.adamw(1e-3, weight_decay=0.1), wrt=nnx.Param)

    @nnx.jit
    def step(module, optimizer, x):
        def loss(module):
            y, recorded = nnx.capture(module, nnx.Intermediate)(x)
            return (y**2).mean(), recorded["tokens_per_expert"][0]

        gradients, counts = nnx.grad(loss, has_aux=True)(module)
        module.selection_bias[...] += 100.0 * (counts == counts.min())
        optimizer.update(module, gradients)
        return gradients, counts

    router = module.router[...]
    gradients, before = step(module, optimizer, x_of(37, dtype=jnp.float32))
    assert "selection_bias" not in gradients and (module.router[...] != router).all()
    assert_same_bits(module.selection_bias[...], 100 * np.float32(before == before.min()))
    _, after = step(module, optimizer, x_of(37, dtype=jnp.float32))
    assert before.min() < 37 and after[before.argmin()] == 37

"""Which experts a token goes to: router logits -> ids, weights and auxiliary losses.

Called by modules.py, and by anyone with a layer of their own. Everything is float32 (float64 for
float64), and the losses are over all tokens of the mesh.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from mok_jax.moe import describe, show

SCORES = ("softmax", "sigmoid")


class Routing(NamedTuple):
    """What `route` decides.

    Attributes:
      expert_ids: int32 [tokens, top_k], best first; -1 in every slot of a masked token.
      router_weights: logits' dtype [tokens, top_k]; 0 for a masked token.
      load_balance_loss: logits' dtype scalar, experts * sum_e f_e P_e over the unmasked tokens, with
        f_e the expert's share of the routes (no gradient) and P_e its mean score, scores divided by
        their sum over the experts. 1 where either is uniform, whatever top_k and the number of experts.
      router_z_loss: logits' dtype scalar, the mean over the unmasked tokens of logsumexp(logits)^2.
      tokens_per_expert: int32 [experts], routes to each expert; their sum is top_k * unmasked tokens.
    """

    expert_ids: jax.Array
    router_weights: jax.Array
    load_balance_loss: jax.Array
    router_z_loss: jax.Array
    tokens_per_expert: jax.Array


def route(
    logits: jax.Array,
    top_k: int,
    *,
    scores: str = "softmax",
    renormalize: bool = True,
    scaling: float = 1.0,
    selection_bias: jax.Array | None = None,
    token_mask: jax.Array | None = None,
    axis_names: str | tuple[str, ...] = (),
    on_each_device: Callable = lambda function: function,
) -> Routing:
    """Chooses each token's top_k experts and weighs them by their scores.

    Of equal experts the one of the lowest index comes first. Ids and weights carry the names "mok_ids"
    and "mok_weights", so that under `save_moe_residuals` nothing is chosen twice.

    A logit of -inf means "never this expert". Any other row without a largest finite logit (a NaN,
    +inf, or nothing but -inf) is broken: its ids are 0 to top_k - 1 and its weights NaN, so that its
    row of y and the z-loss show it; ids and weights of the other rows do not change by a bit.

    Args:
      logits: float32 or float64 [tokens, experts].
      top_k: experts of a token, 1 to experts.
      scores: "softmax" over the experts, or "sigmoid" of each logit.
      renormalize: divide a token's weights by their sum. It is computed in log space, so that scores
        that underflow keep their ratio. With top_k 1 the weight is then always `scaling`, and the
        output teaches the router nothing: use False, or the auxiliary losses.
      scaling: a finite factor on every weight, after renormalising.
      selection_bias: None, or float [experts], added to the scores for the choice alone: it is in no
        weight and has no gradient.
      token_mask: None, or bool [tokens]; False means no expert and no share in losses and counts.
      axis_names: inside a `shard_map`, its axes over which the tokens are split; losses and counts are
        summed over them. On arrays of a whole mesh they are global anyway. With check_vma=False take
        gradients outside that shard_map: JAX then sums a psum's cotangent over the ranks within it.
      on_each_device: makes a function of [tokens, ...] one that each device runs on its own tokens. XLA
        cannot split a top-k: without it, a mesh gathers the scores of all tokens on every device.

    Raises:
      TypeError: a wrong dtype.
      ValueError: a wrong rank, size, range or name.

    Example:
      >>> import jax, mok_jax.routing
      >>> logits = jax.random.normal(jax.random.key(0), (10, 4))
      >>> routing = mok_jax.routing.route(logits, 2, scores="sigmoid")
      >>> routing.expert_ids.shape, int(routing.tokens_per_expert.sum())
      ((10, 2), 20)
    """
    logits = jnp.asarray(logits)
    _check_route(logits, top_k, scores, renormalize, scaling, selection_bias, token_mask)
    unmasked = None if token_mask is None else jnp.asarray(token_mask)[:, None]
    if unmasked is not None:
        logits = jnp.where(unmasked, logits, 0)  # so that what it was cannot reach a gradient as 0 * NaN
    finite = jnp.isfinite(logits.max(axis=1, keepdims=True))
    log_scores = jax.nn.log_softmax(logits) if scores == "softmax" else jax.nn.log_sigmoid(logits)

    # Without a bias by the logits themselves: scores that round to the same number would tie.
    selection = logits
    if selection_bias is not None:
        selection = jnp.where(jnp.isneginf(logits), -jnp.inf, jnp.exp(log_scores) + jnp.asarray(selection_bias)[None])
    choose = on_each_device(lambda selection: lax.top_k(selection, top_k)[1].astype(jnp.int32))
    ids = choose(lax.stop_gradient(jnp.where(finite, selection, 0)))
    if unmasked is not None:
        ids = jnp.where(unmasked, ids, -1)
    ids = checkpoint_name(ids, "mok_ids")

    chosen = jnp.take_along_axis(log_scores, jnp.maximum(ids, 0), axis=1)
    weights = jax.nn.softmax(chosen) if renormalize else jnp.exp(chosen)
    weights = jnp.where(finite, scaling * weights, jnp.nan)
    if unmasked is not None:
        weights = jnp.where(unmasked, weights, 0)
    weights = checkpoint_name(weights, "mok_weights")
    return Routing(ids, weights, *_statistics(logits, log_scores, ids, unmasked, axis_names))


def _statistics(logits, log_scores, ids, unmasked, axis_names):
    """load_balance_loss, router_z_loss, tokens_per_expert."""
    experts = logits.shape[1]
    shares = jax.nn.softmax(log_scores)  # each score over the sum of the row's, without 0 / 0
    squares = jnp.square(jax.nn.logsumexp(logits, axis=1, keepdims=True))
    if unmasked is not None:
        shares, squares = jnp.where(unmasked, shares, 0), jnp.where(unmasked, squares, 0)
    counts = (ids[:, :, None] == jnp.arange(experts, dtype=ids.dtype)[None, None]).sum(axis=(0, 1), dtype=jnp.int32)
    tokens = (ids[:, 0] >= 0).sum(dtype=jnp.int32)
    sums = shares.sum(axis=0), squares.sum(), counts, tokens
    if axis_names:
        sums = lax.psum(sums, axis_names)
    shares, squares, counts, tokens = sums
    tokens = jnp.maximum(tokens, 1).astype(logits.dtype)
    routes = ids.shape[1] * tokens
    load_balance_loss = experts * jnp.sum(counts.astype(logits.dtype) / routes * (shares / tokens))
    return load_balance_loss, squares / tokens, counts


def _check_route(logits, top_k, scores, renormalize, scaling, selection_bias, token_mask) -> None:
    if logits.dtype.name not in ("float32", "float64"):
        raise TypeError(
            f"route: logits must be float32 or float64[tokens, experts], got {show(logits)}; "
            "compute them in float32: a small error changes the choice"
        )
    if logits.ndim != 2 or logits.shape[1] == 0:
        remedy = "reshape them" if logits.ndim != 2 else "it needs one expert at least"
        raise ValueError(f"route: logits must be {logits.dtype.name}[tokens, experts], got {show(logits)}; {remedy}")
    tokens, experts = logits.shape
    check_integer("route", "top_k", top_k, f"an integer from 1 to the number of experts {experts}", 1, experts)
    check_scoring("route", scores, renormalize, scaling)
    if selection_bias is not None:
        bias = jnp.asarray(selection_bias)
        if not jnp.issubdtype(bias.dtype, jnp.floating):
            raise TypeError(
                f"route: selection_bias must be float[experts={experts}], got {show(bias)}; cast it to float32"
            )
        if bias.shape != (experts,):
            raise ValueError(
                f"route: selection_bias must be float[experts={experts}], got {show(bias)}; give each expert a value"
            )
    if token_mask is not None:
        check_mask("route", jnp.asarray(token_mask), f"bool[tokens={tokens}]", (tokens,))


def check_scoring(who: str, scores, renormalize, scaling) -> None:
    if scores not in SCORES:
        raise ValueError(f"{who}: scores must be one of {SCORES}, got {scores!r}")
    if not isinstance(renormalize, bool):
        raise TypeError(f"{who}: renormalize must be True or False, got {describe(renormalize)}")
    if isinstance(scaling, bool) or not isinstance(scaling, (int, float, np.integer, np.floating)):
        raise TypeError(f"{who}: scaling must be a finite number, got {describe(scaling)}")
    if not math.isfinite(scaling):
        raise ValueError(f"{who}: scaling must be a finite number, got {scaling!r}")


def check_mask(who: str, mask: jax.Array, requirement: str, shape: tuple[int, ...]) -> None:
    if mask.dtype != jnp.bool_:
        raise TypeError(f"{who}: token_mask must be {requirement}, got {show(mask)}; True keeps a token")
    if mask.shape != shape:
        raise ValueError(f"{who}: token_mask must be {requirement}, got {show(mask)}; give each token a value")


def check_integer(who: str, name: str, value, requirement: str, low: int, high: float = math.inf) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise TypeError(f"{who}: {name} must be {requirement}, got {describe(value)}")
    if not low <= value <= high:
        raise ValueError(f"{who}: {name} must be {requirement}, got {value}")

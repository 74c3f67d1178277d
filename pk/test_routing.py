"""route(): choice, weights, losses and counts against NumPy in float64, on one device and inside shard_map."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import assert_near, assert_same_bits, mesh_of, refuse
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from jax.test_util import check_grads

import mok_jax
from mok_jax.routing import Routing, route

TOKENS, EXPERTS, TOP_K = 37, 7, 3
SCORES = ("softmax", "sigmoid")

scores_of = pytest.mark.parametrize("scores", SCORES)
renormalized = pytest.mark.parametrize("renormalize", [True, False], ids=["renormalized", "raw"])


def logits_of(seed=0, tokens=TOKENS, experts=EXPERTS, dtype="float64"):
    return jnp.asarray(3 * np.random.default_rng(seed).normal(size=(tokens, experts)), dtype)


def bias_of(experts=EXPERTS):
    return jnp.asarray(np.random.default_rng(5).normal(size=experts))


def mask_of(tokens=TOKENS):
    return jnp.asarray(np.random.default_rng(6).random(tokens) < 0.6)


def run(logits, selection_bias=None, token_mask=None, **options) -> tuple[Routing, jax.Array, jax.Array | None]:
    """The routing, and the gradients of all that has one. Not jitted: few shapes compile faster op by op."""

    def loss(logits, selection_bias):
        routing = route(logits, selection_bias=selection_bias, token_mask=token_mask, **dict(top_k=TOP_K) | options)
        weights = routing.router_weights * jnp.arange(1, routing.router_weights.shape[1] + 1)
        return (weights**2).sum() + routing.load_balance_loss + routing.router_z_loss, routing

    gradients, routing = jax.grad(loss, argnums=0 if selection_bias is None else (0, 1), has_aux=True)(
        logits, selection_bias
    )
    return routing, *((gradients, None) if selection_bias is None else gradients)


def exactly(logits, top_k, scores="softmax", renormalize=True, scaling=1.0, selection_bias=None, token_mask=None):
    """The formulas of `Routing`, one token after the other."""
    logits = np.asarray(logits, np.float64)
    tokens, experts = logits.shape
    ids, weights = np.full((tokens, top_k), -1, np.int32), np.zeros((tokens, top_k))
    shares, squares, counts = np.zeros(experts), 0.0, np.zeros(experts, np.int32)
    kept = range(tokens) if token_mask is None else np.flatnonzero(token_mask)
    for t in kept:
        exponentials = np.exp(logits[t])
        score = exponentials / exponentials.sum() if scores == "softmax" else exponentials / (1 + exponentials)
        biased = score if selection_bias is None else score + np.asarray(selection_bias)
        ids[t] = np.argsort(-biased, kind="stable")[:top_k]
        weights[t] = scaling * score[ids[t]] / (score[ids[t]].sum() if renormalize else 1)
        shares += score / score.sum()
        squares += np.log(exponentials.sum()) ** 2
        counts[ids[t]] += 1
    n = len(kept)
    balance = experts * (counts / (n * top_k) * shares / n).sum()
    return dict(Routing(ids, weights, balance, squares / n, counts)._asdict())


OPTIONS = {"plain": (False, False), "bias": (True, False), "mask": (False, True), "bias-mask": (True, True)}


# (scores, renormalize, bias, mask, dtype): all of it in float64, each value once more in float32.
FORMULAS = [
    *itertools.product(SCORES, [True, False], [False, True], [False, True], ["float64"]),
    ("softmax", True, False, True, "float32"),
    ("softmax", False, True, False, "float32"),
    ("sigmoid", True, True, True, "float32"),
    ("sigmoid", False, False, False, "float32"),
]


def name_of(scores, renormalize, bias, mask, dtype):
    return "-".join([scores, *["raw"] * (not renormalize), *["bias"] * bias, *["mask"] * mask, dtype])


@pytest.mark.parametrize(
    ("scores", "renormalize", "bias", "mask", "dtype"), FORMULAS, ids=[name_of(*row) for row in FORMULAS]
)
def test_formulas(scores, renormalize, bias, mask, dtype):
    logits, options = logits_of(dtype=dtype), dict(scores=scores, renormalize=renormalize)
    arrays = dict(selection_bias=bias_of() if bias else None, token_mask=mask_of() if mask else None)
    expected = exactly(logits, TOP_K, **options, **arrays)
    routing, d_logits, d_bias = run(logits, **arrays, **options)
    actual = routing._asdict()
    assert {name: value.dtype.name for name, value in actual.items()} == dict(
        expert_ids="int32",
        router_weights=dtype,
        load_balance_loss=dtype,
        router_z_loss=dtype,
        tokens_per_expert="int32",
    )
    integers = ("expert_ids", "tokens_per_expert")
    assert_same_bits([actual.pop(n) for n in integers], [expected.pop(n) for n in integers])
    assert_near(jax.device_get(actual), expected, 2e-6 if dtype == "float32" else 1e-14)
    assert d_logits.dtype == logits.dtype and (d_bias is None or (d_bias == 0).all())
    assert ((d_logits != 0).all(axis=1) == (mask_of() if mask else True)).all()


def test_scaling():
    scaled, plain = (run(logits_of(), scaling=scaling)[0].router_weights for scaling in (2.5, 1.0))
    assert_same_bits(scaled, 2.5 * plain)


SIZES = {
    "one_token": (1, 5, 2),
    "no_token": (0, 5, 2),
    "one_expert": (4, 1, 1),
    "every_expert": (5, 6, 6),
    "many": (3, 1025, 11),
}


@pytest.mark.parametrize(("tokens", "experts", "top_k"), SIZES.values(), ids=SIZES)
def test_sizes(tokens, experts, top_k):
    routing, d_logits, _ = run(logits_of(0, tokens, experts), top_k=top_k)
    assert routing.expert_ids.shape == routing.router_weights.shape == (tokens, top_k)
    assert int(routing.tokens_per_expert.sum()) == tokens * top_k
    assert all(np.isfinite(leaf).all() for leaf in (*routing, d_logits))


def test_nothing_but_masked_tokens():
    routing, d_logits, _ = run(logits_of(), token_mask=jnp.zeros(TOKENS, bool))
    expected = [
        np.full((TOKENS, TOP_K), -1),
        np.zeros((TOKENS, TOP_K)),
        0,
        0,
        np.zeros(EXPERTS),
        np.zeros((TOKENS, EXPERTS)),
    ]
    assert all((leaf == value).all() for leaf, value in zip((*routing, d_logits), expected, strict=True))


# ---- the choice ----


@scores_of
def test_ties_go_to_the_lowest_index(scores):
    routing, *_ = run(jnp.zeros((TOKENS, EXPERTS)), scores=scores)
    assert (np.asarray(routing.expert_ids) == np.arange(TOP_K)).all()


# Scores that round to one number, in float32: the larger logit wins all the same.
CLOSE = {"last_bit": (1.0, 1.0000001), "near_1": (30.0, 40.0), "underflow": (-200.0, -150.0)}


@scores_of
@pytest.mark.parametrize("pair", CLOSE.values(), ids=CLOSE)
def test_the_larger_logit_wins(scores, pair):
    logits = jnp.asarray([[-300.0, pair[0], -250.0, pair[1], 50.0]], jnp.float32)
    assert run(logits, scores=scores, top_k=2)[0].expert_ids.tolist() == [[4, 3]]


# ---- weights far from the ordinary ----


@pytest.mark.parametrize("level", [-120.0, -50.0, 120.0])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_scores_that_underflow_keep_their_ratio(level, dtype):
    routing, d_logits, _ = run(jnp.full((TOKENS, EXPERTS), level, dtype), scores="sigmoid", top_k=2)
    assert (routing.router_weights == 0.5).all()
    assert np.isfinite(d_logits).all() and (d_logits != 0).any()


def test_balance_loss_of_scores_that_underflow():
    near, far = (run(logits_of(dtype="float32") - shift, scores="sigmoid")[0].load_balance_loss for shift in (30, 400))
    assert abs(near - far) < 1e-5


@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
@scores_of
@renormalized
def test_minus_infinity_means_never(scores, renormalize, bias):
    # Fewer experts than top_k are left in row 3: the rest have weight 0.
    logits = logits_of().at[:, 1].set(-jnp.inf).at[3].set(-jnp.inf).at[3, 5].set(0.0)
    results = run(logits, bias_of() + 9 if bias else None, scores=scores, renormalize=renormalize)
    ids, weights = (np.asarray(leaf) for leaf in results[0][:2])
    assert (np.delete(ids, 3, axis=0) != 1).all()
    assert ids[3, 0] == 5 and (weights[3, 1:] == 0).all()
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(results))


BROKEN = {
    "one_nan": {3: np.nan},
    "all_nan": dict.fromkeys(range(EXPERTS), np.nan),
    "plus_infinity": {2: np.inf},
    "nan_and_infinity": {2: np.inf, 5: np.nan},
    "all_minus_infinity": dict.fromkeys(range(EXPERTS), -np.inf),
}
ROW = 11


def with_broken_row(values):
    logits = np.array(logits_of())
    logits[ROW, list(values)] = list(values.values())
    return jnp.asarray(logits)


@scores_of
@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("values", BROKEN.values(), ids=BROKEN)
def test_a_broken_row_shows_and_stays_in_its_row(scores, bias, values):
    arguments = dict(selection_bias=bias_of() if bias else None, scores=scores)
    expected, actual = (jax.device_get(run(logits, **arguments)) for logits in (logits_of(), with_broken_row(values)))
    rest = np.arange(TOKENS) != ROW
    assert_same_bits([leaf[rest] for leaf in actual[0][:2]], [leaf[rest] for leaf in expected[0][:2]])
    assert np.isfinite(actual[1][rest]).all()
    assert actual[0].expert_ids[ROW].tolist() == list(range(TOP_K))
    assert np.isnan(actual[0].router_weights[ROW]).all()
    assert not np.isfinite(actual[0].router_z_loss)


@scores_of
@pytest.mark.parametrize("values", BROKEN.values(), ids=BROKEN)
def test_a_broken_row_that_is_masked_does_not_show(scores, values):
    mask = jnp.arange(TOKENS) != ROW
    expected, actual = (
        run(logits, token_mask=mask, scores=scores) for logits in (logits_of(), with_broken_row(values))
    )
    assert_same_bits(actual, expected)
    assert (actual[1][ROW] == 0).all()


# ---- gradients ----


@scores_of
def test_with_one_expert_a_renormalized_weight_teaches_nothing(scores):
    def gradient(logits, renormalize):
        return jax.grad(lambda x: route(x, 1, scores=scores, renormalize=renormalize).router_weights.sum())(logits)

    assert (np.asarray(gradient(logits_of(), True)) == 0).all()
    assert (np.abs(gradient(logits_of(), False)).max(axis=1) > 0).all()


@pytest.mark.parametrize(("scores", "renormalize"), [("softmax", False), ("sigmoid", True)], ids=SCORES)
def test_gradients(scores, renormalize):
    def value(logits):
        routing = route(logits, TOP_K, scores=scores, renormalize=renormalize, token_mask=mask_of())
        return routing.router_weights, routing.load_balance_loss, routing.router_z_loss

    check_grads(value, (logits_of(),), order=1, modes=["rev"], eps=1e-6, atol=1e-6, rtol=1e-6)


@scores_of
def test_counts_have_no_share_in_the_gradient_of_the_balance_loss(scores):
    counts = np.asarray(run(logits_of(), scores=scores)[0].tokens_per_expert, np.float64)

    def plain(logits):
        score = jax.nn.softmax(logits) if scores == "softmax" else jax.nn.sigmoid(logits)
        share = (score / score.sum(axis=1, keepdims=True)).mean(axis=0)
        return EXPERTS * (counts / counts.sum() * share).sum()

    def balance(logits):
        return route(logits, TOP_K, scores=scores).load_balance_loss

    results = ({"d": jax.jit(jax.grad(loss))(logits_of())} for loss in (balance, plain))
    assert_near(*results, 1e-13)


# ---- the balance loss ----


@scores_of
@pytest.mark.parametrize("uniform", ["scores", "routes"])
@pytest.mark.parametrize("top_k", [1, 4, 6])
def test_balance_loss_of_a_uniform_router_is_1(scores, uniform, top_k):
    row = np.arange(6.0) * (uniform == "routes")
    logits = np.stack([np.roll(row, shift) for shift in range(24)])  # each row skewed, all together even
    loss = run(jnp.asarray(logits), top_k=top_k, scores=scores)[0].load_balance_loss
    assert abs(loss - 1) < 1e-14


def test_balance_loss_of_a_collapsed_router_is_the_number_of_experts():
    logits = jnp.zeros((TOKENS, EXPERTS)).at[:, 2].set(1000.0)
    assert run(logits, top_k=1)[0].load_balance_loss == EXPERTS


# ---- masks ----


@scores_of
def test_masked_tokens_have_no_share(scores):
    logits, mask = logits_of(), mask_of()
    short, full = run(logits[mask], scores=scores)[0], run(logits, token_mask=mask, scores=scores)[0]
    assert_same_bits([full.expert_ids[mask], full.router_weights[mask]], [short.expert_ids, short.router_weights])
    assert_same_bits(full.tokens_per_expert, short.tokens_per_expert)
    losses = (dict(balance=r.load_balance_loss, z=r.router_z_loss) for r in (full, short))
    assert_near(*losses, 1e-14)
    assert (full.expert_ids[~mask] == -1).all() and (full.router_weights[~mask] == 0).all()


# ---- inside shard_map ----


def weighted(routing):
    return 0.3 * routing.load_balance_loss + 0.1 * routing.router_z_loss


def losses_of_a_router(kernel, x, mask, axis_names=()):
    """Losses and counts of a linear router: its kernel is replicated where the tokens are split."""
    routing = route(x @ kernel, 2, token_mask=mask, axis_names=axis_names)
    return weighted(routing), routing.tokens_per_expert


ROUTER = {"kernel": logits_of(1, 5, EXPERTS), "x": logits_of(2, 24, 5), "mask": mask_of(24)}


@functools.cache
def expected_of_the_router():
    return jax.jit(jax.value_and_grad(losses_of_a_router, has_aux=True))(*ROUTER.values())


WHERE = list(itertools.product(["inside", "outside"], [True, False]))


@pytest.mark.parametrize(("where", "check_vma"), WHERE, ids=[f"grad_{w}-{'vma' if c else 'no_vma'}" for w, c in WHERE])
def test_losses_over_the_axes_of_a_shard_map(where, check_vma):
    axes, mesh = ("data", "expert"), mesh_of()
    grad = functools.partial(jax.value_and_grad, has_aux=True)
    split = dict(mesh=mesh, in_specs=(P(), P(axes), P(axes)), check_vma=check_vma)
    local = functools.partial(losses_of_a_router, axis_names=axes)
    if where == "inside":

        def step(kernel, x, mask):
            result, gradient = grad(local)(kernel, x, mask)
            # check_vma=False: each device has its own share times the number of devices, as with any psum.
            return result, gradient if check_vma else jax.lax.pmean(gradient, axes)

        function = jax.shard_map(step, out_specs=P(), **split)
    else:
        function = grad(jax.shard_map(local, out_specs=P(), **split))
    (loss, counts), gradient = jax.device_get(jax.jit(function)(*ROUTER.values()))
    (expected_loss, expected_counts), expected = expected_of_the_router()
    assert_same_bits(counts, expected_counts)
    assert_near(dict(loss=loss, d=gradient), dict(loss=expected_loss, d=expected), 1e-13)


def test_balance_is_over_the_whole_batch():
    # Four shards, each with an expert of its own.
    logits = jnp.repeat(10 * jnp.eye(4), 6, axis=0)

    def balance(logits, axis_names=()):
        return route(logits, 1, axis_names=axis_names).load_balance_loss[None]

    def over_shards(**options):
        mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:4])
        local = functools.partial(balance, **options)
        return jax.jit(jax.shard_map(local, mesh=mesh, in_specs=P("data"), out_specs=P("data")))(logits)

    assert (over_shards() > 3.9).all()
    assert_near({"loss": over_shards(axis_names="data")}, {"loss": np.ones(4)}, 1e-14)


# ---- checkpoints ----


def count_of(primitive, jaxpr):
    """How often a primitive is in a jaxpr and all that it calls."""
    inner = (leaf for eqn in jaxpr.eqns for leaf in jax.tree.leaves(list(eqn.params.values()), is_leaf=is_jaxpr))
    nested = sum(count_of(primitive, getattr(leaf, "jaxpr", leaf)) for leaf in inner if is_jaxpr(leaf))
    return nested + sum(eqn.primitive.name == primitive for eqn in jaxpr.eqns)


def is_jaxpr(value):
    return hasattr(getattr(value, "jaxpr", value), "eqns")


POLICIES = {"residuals": (mok_jax.save_moe_residuals, 1), "nothing": (jax.checkpoint_policies.nothing_saveable, 2)}


@pytest.mark.parametrize(("policy", "times"), POLICIES.values(), ids=POLICIES)
@pytest.mark.parametrize(("scores", "bias"), [("softmax", None), ("sigmoid", bias_of())], ids=SCORES)
def test_a_checkpoint_that_saves_the_routing_does_not_choose_again(policy, times, scores, bias):
    def loss(logits):
        routing = route(logits, TOP_K, scores=scores, selection_bias=bias)
        return (jnp.sin(routing.router_weights) * routing.expert_ids).sum() + weighted(routing)

    step = jax.jit(jax.grad(jax.checkpoint(loss, policy=policy)))
    assert count_of("top_k", jax.make_jaxpr(step)(logits_of()).jaxpr) == times
    assert_near({"d": step(logits_of())}, {"d": jax.jit(jax.grad(loss))(logits_of())}, 1e-14)


# ---- errors ----

GOOD = dict(logits=jnp.zeros((8, 5)), top_k=2)

# name: (arguments, error, text)
WRONG = {
    "logits_dtype": (
        dict(logits=jnp.zeros((8, 5), jnp.bfloat16)),
        TypeError,
        "route: logits must be float32 or float64[tokens, experts], got bfloat16[8, 5]; "
        "compute them in float32: a small error changes the choice",
    ),
    "logits_rank": (
        dict(logits=jnp.zeros((2, 4, 5))),
        ValueError,
        "route: logits must be float64[tokens, experts], got float64[2, 4, 5]; reshape them",
    ),
    "no_expert": (
        dict(logits=jnp.zeros((8, 0))),
        ValueError,
        "route: logits must be float64[tokens, experts], got float64[8, 0]; it needs one expert at least",
    ),
    "top_k_0": (dict(top_k=0), ValueError, "route: top_k must be an integer from 1 to the number of experts 5, got 0"),
    "top_k_6": (dict(top_k=6), ValueError, "route: top_k must be an integer from 1 to the number of experts 5, got 6"),
    "top_k_type": (
        dict(top_k=2.0),
        TypeError,
        "route: top_k must be an integer from 1 to the number of experts 5, got float 2.0",
    ),
    "scores": (
        dict(scores="relu"),
        ValueError,
        "route: scores must be one of ('softmax', 'sigmoid'), got 'relu'",
    ),
    "scaling": (dict(scaling=float("inf")), ValueError, "route: scaling must be a finite number, got inf"),
    "scaling_type": (dict(scaling="1"), TypeError, "route: scaling must be a finite number, got str '1'"),
    "renormalize": (dict(renormalize=1), TypeError, "route: renormalize must be True or False, got int 1"),
    "bias_dtype": (
        dict(selection_bias=jnp.zeros(5, jnp.int32)),
        TypeError,
        "route: selection_bias must be float[experts=5], got int32[5]; cast it to float32",
    ),
    "bias_size": (
        dict(selection_bias=jnp.zeros(4, jnp.float32)),
        ValueError,
        "route: selection_bias must be float[experts=5], got float32[4]; give each expert a value",
    ),
    "mask_dtype": (
        dict(token_mask=jnp.zeros(8, jnp.int32)),
        TypeError,
        "route: token_mask must be bool[tokens=8], got int32[8]; True keeps a token",
    ),
    "mask_size": (
        dict(token_mask=jnp.zeros(5, bool)),
        ValueError,
        "route: token_mask must be bool[tokens=8], got bool[5]; give each token a value",
    ),
}


@pytest.mark.parametrize(("arguments", "error", "text"), WRONG.values(), ids=WRONG)
def test_refusal(arguments, error, text):
    refuse(error, text, route, **GOOD | arguments)

"""route() against a loop over tokens in NumPy: choice, weights, losses, counts, and what they teach the router."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import assert_near, assert_same_bits
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.test_util import check_grads

import mok_jax

TOKENS, EXPERTS, TOP_K, SCALING = 13, 7, 3, 2.5

routed = jax.jit(mok_jax.route, static_argnames=("top_k", "scores", "renormalize", "scaling", "axis_names"))


def named(routing):
    return jax.device_get(routing)._asdict()


def random_logits(tokens=TOKENS, experts=EXPERTS, seed=0):
    return np.random.default_rng(seed).normal(size=(tokens, experts)) * 2


def route_in_numpy(logits, top_k, *, scores, renormalize, scaling=1.0, bias=None, mask=None):
    """The docstring of `Routing`, one token after the other, in float64."""
    tokens, experts = logits.shape
    ids, weights = np.full((tokens, top_k), -1, np.int32), np.zeros((tokens, top_k))
    counts, mean_scores, squares = np.zeros(experts, np.int32), np.zeros(experts), 0.0
    kept = [t for t in range(tokens) if mask is None or mask[t]]
    for t in kept:
        total = np.exp(logits[t]).sum()
        score = np.exp(logits[t]) / total if scores == "softmax" else 1 / (1 + np.exp(-logits[t]))
        wanted = score if bias is None else score + bias
        ids[t] = sorted(range(experts), key=lambda e, wanted=wanted: (-wanted[e], e))[:top_k]
        weights[t] = scaling * score[ids[t]] / (score[ids[t]].sum() if renormalize else 1)
        counts[ids[t]] += 1
        mean_scores += score / score.sum() / len(kept)
        squares += np.log(total) ** 2 / len(kept)
    balance = experts * (counts / (top_k * len(kept)) * mean_scores).sum()
    return mok_jax.Routing(ids, weights, np.float64(balance), np.float64(squares), counts)._asdict()


BIAS = np.linspace(0.4, -0.4, EXPERTS)
MASK = np.arange(TOKENS) % 3 != 1

MATRIX = list(itertools.product(("softmax", "sigmoid"), (True, False), (None, BIAS), (None, MASK)))
IDS = [
    "-".join([s, "renormalized" if r else "plain", *["bias"][: b is not None], *["mask"][: m is not None]])
    for s, r, b, m in MATRIX
]
matrix = pytest.mark.parametrize(("scores", "renormalize", "bias", "mask"), MATRIX, ids=IDS)


@matrix
def test_is_a_loop_over_tokens(scores, renormalize, bias, mask):
    options = dict(scores=scores, renormalize=renormalize, scaling=SCALING)
    actual = routed(random_logits(), TOP_K, **options, selection_bias=bias, token_mask=mask)
    expected = route_in_numpy(random_logits(), TOP_K, **options, bias=bias, mask=mask)
    assert_near(named(actual), expected, 1e-14)
    assert actual.expert_ids.dtype == actual.tokens_per_expert.dtype == np.int32


GRADIENTS = [row for row, name in zip(MATRIX, IDS, strict=True) if name.endswith("bias-mask")]


@pytest.mark.parametrize(
    ("scores", "renormalize", "bias", "mask"), GRADIENTS, ids=[name for name in IDS if name.endswith("bias-mask")]
)
def test_gradients(scores, renormalize, bias, mask):
    def results(logits):
        options = dict(scores=scores, renormalize=renormalize, scaling=SCALING)
        return mok_jax.route(logits, TOP_K, **options, selection_bias=bias, token_mask=mask)[1:4]

    check_grads(jax.jit(results), (random_logits(),), order=1, modes=["rev"], atol=1e-7, rtol=1e-7)


@pytest.mark.parametrize("top_k", [1, 2, EXPERTS], ids=lambda k: f"k{k}")
@pytest.mark.parametrize("scores", ["softmax", "sigmoid"])
def test_top_k_from_one_to_all(scores, top_k):
    options = dict(scores=scores, renormalize=False)
    expected = route_in_numpy(random_logits(), top_k, **options)
    assert_near(named(routed(random_logits(), top_k, **options)), expected, 1e-14)


def test_many_experts_and_one():
    options = dict(scores="softmax", renormalize=True)
    logits = random_logits(3, 1025)
    assert_near(named(routed(logits, 8, **options)), route_in_numpy(logits, 8, **options), 1e-14)
    assert_near(named(routed(logits[:, :1], 1, **options)), route_in_numpy(logits[:, :1], 1, **options), 1e-14)


def test_float32_stays_float32():
    logits = random_logits().astype(np.float32)
    bias = BIAS.astype(np.float64)
    routing = routed(logits, TOP_K, selection_bias=bias)
    assert {value.dtype.name for value in routing[1:4]} == {"float32"}
    expected = route_in_numpy(logits.astype(np.float64), TOP_K, scores="softmax", renormalize=True, bias=bias)
    assert_near(named(routing), expected, 1e-6)


# ---- the choice ----


@pytest.mark.parametrize("bias", [None, 0.0], ids=["", "bias"])
@pytest.mark.parametrize("scores", ["softmax", "sigmoid"])
def test_ties_go_to_the_lower_id(scores, bias):
    logits = np.array([[0, 0, 0, 0, 0.0], [1, 5, 1, 5, 5], [-3, 2, 2, 7, 2]])
    bias = None if bias is None else np.full(5, bias)
    ids = routed(logits, 3, scores=scores, selection_bias=bias).expert_ids
    np.testing.assert_array_equal(ids, [[0, 1, 2], [1, 3, 4], [3, 1, 2]])


@pytest.mark.parametrize("scores", ["softmax", "sigmoid"])
@pytest.mark.parametrize("level", [-200.0, 100.0], ids=["underflow", "saturation"])
def test_scores_that_round_to_the_same_number_do_not_tie(scores, level):
    logits = np.array([[0, 1, 3, 2]], np.float32) + np.float32(level)
    np.testing.assert_array_equal(routed(logits, 3, scores=scores).expert_ids, [[2, 3, 1]])


def test_the_smallest_difference_decides():
    logits = np.array([[0, 1, np.nextafter(np.float32(1), np.float32(2))]], np.float32)
    np.testing.assert_array_equal(routed(logits, 1).expert_ids, [[2]])


@pytest.mark.parametrize("scores", ["softmax", "sigmoid"])
def test_the_bias_affects_the_choice_only(scores):
    bias = np.array([9, 0, 0, -9, 0, 9, 0.0])

    def results(logits, bias):
        return mok_jax.route(logits, 2, scores=scores, renormalize=False, selection_bias=bias)[:4]

    (ids, weights, *_), pull = jax.vjp(jax.jit(results), random_logits(), bias)
    assert set(np.unique(ids)) == {0, 5}
    unbiased = routed(random_logits(), EXPERTS, scores=scores, renormalize=False)
    everywhere = np.zeros((TOKENS, EXPERTS))
    np.put_along_axis(everywhere, np.asarray(unbiased.expert_ids), np.asarray(unbiased.router_weights), 1)
    np.testing.assert_array_equal(weights, np.take_along_axis(everywhere, np.asarray(ids), 1))
    d_logits, d_bias = pull((np.zeros(ids.shape, jax.dtypes.float0), np.ones(weights.shape), 1.0, 1.0))
    assert not np.asarray(d_bias).any() and np.asarray(d_logits).all()


# ---- the edges of the numbers ----


@functools.partial(jax.jit, static_argnames=("top_k", "scores", "renormalize"))
def weight_gradient(logits, **options):
    """Of a sum in which each slot counts differently."""

    def loss(logits):
        weights = mok_jax.route(logits, **options).router_weights
        return (weights * (1 + jnp.arange(weights.size, dtype=weights.dtype).reshape(weights.shape))).sum()

    return jax.grad(loss)(logits)


@pytest.mark.parametrize(("renormalize", "learns"), [(True, False), (False, True)], ids=["renormalized", "plain"])
@pytest.mark.parametrize("scores", ["softmax", "sigmoid"])
def test_what_one_expert_of_a_token_teaches(scores, renormalize, learns):
    options = dict(top_k=1, scores=scores, renormalize=renormalize)
    gradient = np.asarray(weight_gradient(random_logits(), **options))
    assert gradient.any(axis=1).all() if learns else not gradient.any()
    weights = np.asarray(routed(random_logits(), **options).router_weights)
    assert (weights < 1).all() if learns else (weights == 1).all()


@pytest.mark.parametrize("level", [-50.0, -120.0, -1e4])
def test_sigmoid_underflow(level):
    logits = np.full((4, 6), level, np.float32)
    routing = routed(logits, 2, scores="sigmoid")
    np.testing.assert_array_equal(routing.router_weights, np.full((4, 2), 0.5))
    assert np.isfinite(weight_gradient(logits, top_k=2, scores="sigmoid")).all()
    assert np.isfinite(weight_gradient(logits, top_k=2, scores="sigmoid", renormalize=False)).all()
    assert abs(routing.load_balance_loss - 1) < 1e-6


def test_small_sigmoid_scores_keep_their_shares():
    small, tiny = (routed(random_logits() + level, TOP_K, scores="sigmoid") for level in (-40, -600))
    for name in ("router_weights", "load_balance_loss"):
        assert_near({name: getattr(tiny, name)}, {name: getattr(small, name)}, 1e-12)


BROKEN = {"nan": [4, 1, 0, 3, np.nan, 2, 5.0], "inf": [0, np.inf, 0, 0, 0, 9, 0], "nothing": [-np.inf] * EXPERTS}


@pytest.mark.parametrize("options", [{}, dict(scores="sigmoid", selection_bias=BIAS)], ids=["softmax", "sigmoid-bias"])
@pytest.mark.parametrize("row", BROKEN.values(), ids=BROKEN)
def test_a_broken_row_stays_alone(row, options):
    clean, broken = random_logits(), random_logits()
    broken[5] = row
    others = np.arange(TOKENS) != 5
    want, got = (routed(logits, TOP_K, **options) for logits in (clean, broken))
    assert_same_bits(jax.tree.map(lambda v: v[others], got[:2]), jax.tree.map(lambda v: v[others], want[:2]))
    np.testing.assert_array_equal(got.expert_ids[5], range(TOP_K))
    assert np.isnan(got.router_weights[5]).all()
    assert not np.isfinite(got.router_z_loss)
    gradients = [np.asarray(weight_gradient(logits, top_k=TOP_K, **options))[others] for logits in (clean, broken)]
    assert_same_bits(*gradients)


@pytest.mark.parametrize("scores", ["softmax", "sigmoid"])
def test_minus_infinity_means_never(scores):
    logits = random_logits()
    logits[:, 2] = -np.inf
    without = route_in_numpy(np.delete(logits, 2, axis=1), TOP_K, scores=scores, renormalize=True)
    routing = routed(logits, TOP_K, scores=scores, selection_bias=np.zeros(EXPERTS))
    np.testing.assert_array_equal(routing.expert_ids, without["expert_ids"] + (without["expert_ids"] >= 2))
    assert_near({"weights": routing.router_weights}, {"weights": without["router_weights"]}, 1e-14)
    assert np.isfinite(routing.load_balance_loss) and np.isfinite(routing.router_z_loss)
    gradient = np.asarray(weight_gradient(logits, top_k=TOP_K, scores=scores))
    assert np.isfinite(gradient).all() and not gradient[:, 2].any()


# ---- losses and counts ----


@pytest.mark.parametrize("top_k", [1, 2, 8], ids=lambda k: f"k{k}")
@pytest.mark.parametrize("scores", ["softmax", "sigmoid"])
def test_balanced_routing_has_loss_one(scores, top_k):
    # Each row is the one before, rolled: every expert has the same routes and the same mean score.
    logits = np.stack([np.roll(np.linspace(2, 0, 16), t) for t in range(32)]).astype(np.float32)
    routing = routed(logits, top_k, scores=scores)
    np.testing.assert_array_equal(routing.tokens_per_expert, np.full(16, 2 * top_k))
    assert abs(routing.load_balance_loss - 1) < 1e-6
    assert routed(logits * 0, top_k, scores=scores).load_balance_loss == 1  # only the scores are uniform


def test_masked_rows_are_as_absent():
    def results(logits, mask):
        routing = mok_jax.route(logits, TOP_K, token_mask=mask)
        return routing.load_balance_loss + 3 * routing.router_z_loss, routing

    gradient = jax.jit(jax.value_and_grad(results, has_aux=True))
    half = np.arange(TOKENS) % 2 == 0
    padded = np.where(half[:, None], random_logits(), np.nan)
    (_, routing), d_logits = gradient(padded, half)
    (_, short), d_short = gradient(random_logits()[half], None)
    assert_near(named(jax.tree.map(lambda v: v[half] if v.ndim == 2 else v, routing)), named(short), 1e-15)
    assert_near({"d": d_logits[half]}, {"d": d_short}, 1e-15)
    assert (routing.expert_ids[~half] == -1).all()
    assert not routing.router_weights[~half].any() and not np.asarray(d_logits)[~half].any()


@pytest.mark.parametrize(("tokens", "mask"), [(0, None), (4, np.zeros(4, bool))], ids=["no_tokens", "all_masked"])
def test_without_tokens_the_losses_are_zero(tokens, mask):
    routing = routed(np.zeros((tokens, EXPERTS)), TOP_K, token_mask=mask)
    assert routing.load_balance_loss == routing.router_z_loss == routing.tokens_per_expert.sum() == 0
    loss = lambda logits: sum(mok_jax.route(logits, TOP_K, token_mask=mask)[2:4])  # noqa: E731
    assert not np.asarray(jax.jit(jax.grad(loss))(np.zeros((tokens, EXPERTS)))).any()


SHARDS = jax.make_mesh((4,), ("data",), devices=jax.devices()[:4], axis_types=(AxisType.Auto,))


def skewed():
    """Four shards of six tokens, each for two experts of its own; the eight experts are loaded alike."""
    logits = np.zeros((24, 8))
    for token in range(24):
        logits[token, token // 6 * 2 : token // 6 * 2 + 2] = 4
    return logits


def losses_and_gradient(function, logits):
    def loss(logits):
        routing = function(logits)
        return routing.load_balance_loss + 3 * routing.router_z_loss, routing

    (_, routing), gradient = jax.jit(jax.value_and_grad(loss, has_aux=True))(logits)
    return named(routing) | {"d_logits": np.asarray(gradient)}


@functools.cache
def on_one_device():
    return losses_and_gradient(functools.partial(mok_jax.route, top_k=2), skewed() + random_logits(24, 8))


def inside(check_vma, axis_names):
    return jax.shard_map(
        functools.partial(mok_jax.route, top_k=2, axis_names=axis_names),
        mesh=SHARDS,
        in_specs=P("data"),
        out_specs=mok_jax.Routing(P("data"), P("data"), P(), P(), P()),
        check_vma=check_vma,
    )


@pytest.mark.parametrize(
    ("check_vma", "axis_names"), [(True, "data"), (False, ("data",))], ids=["vma-name", "no_vma-tuple"]
)
def test_losses_are_global_inside_a_shard_map(check_vma, axis_names):
    function = inside(check_vma, axis_names)
    assert_near(losses_and_gradient(function, skewed() + random_logits(24, 8)), on_one_device(), 1e-14)
    assert abs(jax.jit(function)(skewed()).load_balance_loss - 1) < 1e-14
    assert routed(skewed()[:6], 2).load_balance_loss > 3  # what one shard alone would say


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
def test_losses_are_global_on_a_mesh(kind):
    mesh = jax.make_mesh((4,), ("data",), devices=jax.devices()[:4], axis_types=(kind,))
    logits = jax.device_put(skewed() + random_logits(24, 8), NamedSharding(mesh, P("data")))
    assert_near(losses_and_gradient(functools.partial(mok_jax.route, top_k=2), logits), on_one_device(), 1e-14)


# ---- errors ----

ZEROS = np.zeros((4, 6), np.float32)
ERRORS = {
    "bfloat16": (
        (ZEROS.astype(jnp.bfloat16), 2),
        {},
        TypeError,
        "route: logits must be float32 or float64[tokens, experts], got bfloat16[4, 6]; "
        "compute them in float32: a small error changes the choice",
    ),
    "rank": (
        (ZEROS[None], 2),
        {},
        ValueError,
        "route: logits must be float32[tokens, experts], got float32[1, 4, 6]; reshape them",
    ),
    "no_experts": (
        (ZEROS[:, :0], 1),
        {},
        ValueError,
        "route: logits must be float32[tokens, experts], got float32[4, 0]; it needs one expert at least",
    ),
    "top_k_0": (
        (ZEROS, 0),
        {},
        ValueError,
        "route: top_k must be an integer from 1 to the number of experts 6, got 0",
    ),
    "top_k_7": (
        (ZEROS, 7),
        {},
        ValueError,
        "route: top_k must be an integer from 1 to the number of experts 6, got 7",
    ),
    "top_k_float": (
        (ZEROS, 2.0),
        {},
        TypeError,
        "route: top_k must be an integer from 1 to the number of experts 6, got float 2.0",
    ),
    "top_k_bool": (
        (ZEROS, True),
        {},
        TypeError,
        "route: top_k must be an integer from 1 to the number of experts 6, got bool True",
    ),
    "scores": (
        (ZEROS, 2),
        dict(scores="relu"),
        ValueError,
        "route: scores must be one of ('softmax', 'sigmoid'), got 'relu'",
    ),
    "renormalize": (
        (ZEROS, 2),
        dict(renormalize=None),
        TypeError,
        "route: renormalize must be True or False, got NoneType None",
    ),
    "scaling_type": (
        (ZEROS, 2),
        dict(scaling="2"),
        TypeError,
        "route: scaling must be a finite number, got str '2'",
    ),
    "scaling_nan": (
        (ZEROS, 2),
        dict(scaling=float("nan")),
        ValueError,
        "route: scaling must be a finite number, got nan",
    ),
    "bias_dtype": (
        (ZEROS, 2),
        dict(selection_bias=np.zeros(6, np.int32)),
        TypeError,
        "route: selection_bias must be float[experts=6], got int32[6]; cast it to float32",
    ),
    "bias_shape": (
        (ZEROS, 2),
        dict(selection_bias=np.zeros(5, np.float32)),
        ValueError,
        "route: selection_bias must be float[experts=6], got float32[5]; give each expert a value",
    ),
    "mask_dtype": (
        (ZEROS, 2),
        dict(token_mask=np.zeros(4, np.int32)),
        TypeError,
        "route: token_mask must be bool[tokens=4], got int32[4]; True keeps a token",
    ),
    "mask_shape": (
        (ZEROS, 2),
        dict(token_mask=np.zeros((4, 1), bool)),
        ValueError,
        "route: token_mask must be bool[tokens=4], got bool[4, 1]; give each token a value",
    ),
}


@pytest.mark.parametrize(("arguments", "options", "kind", "message"), ERRORS.values(), ids=ERRORS)
def test_error(arguments, options, kind, message):
    with pytest.raises(kind) as caught:
        mok_jax.route(*arguments, **options)
    assert str(caught.value) == message

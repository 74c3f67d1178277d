"""The schedule's invariants, for any routing (property-based), and the sizes that follow from the shapes."""

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

from mok_jax import ops

host = ops._host


def make_dims(*, tokens=8, top_k=2, experts=3, ranks=1, row_tile=8, minibatch=0, macrobatch=0, **sizes):
    defaults = dict(hidden=4, intermediate=4, shared_intermediate=0)
    return host.Dims(
        tokens=tokens,
        top_k=top_k,
        local_experts=experts,
        ranks=ranks,
        row_tile=row_tile,
        minibatch=minibatch,
        macrobatch=macrobatch,
        **(defaults | sizes),
    )


@st.composite
def routings(draw):
    tokens, top_k = draw(st.integers(0, 20)), draw(st.integers(1, 4))
    experts, ranks = draw(st.integers(1, 5)), draw(st.integers(1, 4))
    row_tile = draw(st.sampled_from([8, 16, 24]))
    wrong = [-(2**31), -1, experts * ranks, 2**31 - 1]
    # A small range makes skew likely.
    highest = draw(st.integers(0, experts * ranks - 1))
    ids = draw(
        st.lists(
            st.one_of(st.integers(0, highest), st.sampled_from(wrong)),
            min_size=ranks * tokens * top_k,
            max_size=ranks * tokens * top_k,
        )
    )
    dims = dict(tokens=tokens, top_k=top_k, experts=experts, ranks=ranks, row_tile=row_tile)
    return dims, np.asarray(ids, np.int64).astype(np.int32).reshape(ranks, tokens * top_k)


def segments(sizes, ids):
    """(rank, expert, count, row_source of the padded segment) of every expert, and each rank's tail."""
    dims = make_dims(**sizes)
    parts, tails = [], []
    for rank in range(sizes["ranks"]):
        source, offset, count = host.build_schedule(dims, rank, ids)
        assert offset[0] == 0
        parts += [(rank, e, count[e], source[offset[e] : offset[e + 1]]) for e in range(sizes["experts"])]
        tails.append(source[offset[-1] :])
    return parts, tails


@hypothesis.given(routings())
@hypothesis.settings(deadline=None)
def test_every_route_has_exactly_its_row(routing):
    sizes, ids = routing
    routes = sizes["tokens"] * sizes["top_k"]
    placed = np.full(ids.shape, -1)
    for rank, expert, count, source in segments(sizes, ids)[0]:
        rows = source[:count]
        assert (placed.reshape(-1)[rows] == -1).all() and len(set(rows)) == count
        placed[rows // max(routes, 1), rows % max(routes, 1)] = rank * sizes["experts"] + expert
    valid = (ids >= 0) & (ids < sizes["experts"] * sizes["ranks"])
    np.testing.assert_array_equal(placed, np.where(valid, ids, -1))


@hypothesis.given(routings())
@hypothesis.settings(deadline=None)
def test_segments_are_padded_to_the_row_tile_and_fit(routing):
    sizes, ids = routing
    parts, tails = segments(sizes, ids)
    for _, _, count, source in parts:
        assert len(source) == -(-count // sizes["row_tile"]) * sizes["row_tile"]
        assert (source[:count] >= 0).all() and (source[count:] == -1).all()
    for tail in tails:  # what lies behind the last row is within the capacity, and empty
        assert (tail == -1).all()


@hypothesis.given(routings())
@hypothesis.settings(deadline=None)
def test_rows_come_from_the_ranks_in_turn_beginning_with_this_one(routing):
    sizes, ids = routing
    routes = max(sizes["tokens"] * sizes["top_k"], 1)
    for rank, _, count, source in segments(sizes, ids)[0]:
        queues = [sorted(r for r in source[:count] if r // routes == peer) for peer in range(sizes["ranks"])]
        queues = queues[rank:] + queues[:rank]
        turns = [queue[i] for i in range(routes) for queue in queues if i < len(queue)]
        assert turns == source[:count].tolist()


@pytest.mark.parametrize(
    "tokens, experts, worst",
    [
        pytest.param(16, 4, [1, 1, 1, 13], id="three experts with one row"),
        pytest.param(2, 5, [1, 1, 0, 0, 0], id="more experts than rows"),
        pytest.param(24, 1, [24], id="no padding"),
    ],
)
def test_capacity_is_reached_and_not_larger_than_a_tile_more(tokens, experts, worst):
    dims = make_dims(tokens=tokens, top_k=1, experts=experts)
    used = sum(-(-rows // 8) * 8 for rows in worst)
    assert used <= dims.capacity < used + 8


def test_capacity_without_tokens_is_one_tile():
    assert make_dims(tokens=0).capacity == 8


def test_minibatch_estimate_is_the_originals():
    # 148 SMs in pairs, 256x256 tiles, I = 2048.
    assert host.minibatch_estimate(units=74, row_tile=256, columns=256, intermediate=2048) == 2368


@pytest.mark.parametrize(
    "given, expected",
    [
        pytest.param({}, dict(minibatch=1024, macrobatch=8320), id="defaults"),
        pytest.param(dict(minibatch=256), dict(minibatch=256, macrobatch=8320), id="minibatch"),
        pytest.param(
            dict(macrobatch=1536),
            dict(minibatch=1024, macrobatch=1536),
            id="a macrobatch of one and a half minibatches",
        ),
        pytest.param(
            dict(minibatch=2**30), dict(minibatch=8320, macrobatch=8320), id="a minibatch of more than all rows"
        ),
        pytest.param(
            dict(minibatch=2**20, macrobatch=2**30),
            dict(minibatch=8320, macrobatch=8320),
            id="both of more than all rows",
        ),
        pytest.param(dict(minibatch=128, macrobatch=512), dict(minibatch=128, macrobatch=512), id="both"),
        pytest.param(
            dict(minibatch=512, macrobatch=2**20), dict(minibatch=512, macrobatch=8320), id="more than all rows"
        ),
    ],
)
def test_defaults_on_one_rank_hold_all_rows(given, expected):
    dims = make_dims(tokens=4096, top_k=2, experts=2, row_tile=128, hidden=256, intermediate=256, **given)
    assert dims.capacity == 8192 + 2 * 127 - (2 * 127) % 128
    assert dict(minibatch=dims.minibatch, macrobatch=dims.macrobatch) == expected


@pytest.mark.parametrize(
    "tokens, forward", [pytest.param(1024, 512, id="many rows"), pytest.param(64, 256, id="few rows")]
)
def test_a_forward_pass_has_twice_the_minibatch(tokens, forward):
    sizes = dict(tokens=tokens, top_k=4, experts=2, hidden=64, intermediate=2048, row_tile=128)
    assert make_dims(**sizes).minibatch == 256
    assert make_dims(**sizes, forward=True).minibatch == forward


@pytest.mark.parametrize("macrobatch", [0, 128, 1536, 8320])
def test_a_macrobatch_changes_no_minibatch(macrobatch):
    sizes = dict(tokens=4096, top_k=2, experts=2, hidden=256, intermediate=256, row_tile=128, macrobatch=macrobatch)
    assert [make_dims(**sizes, forward=forward).minibatch for forward in (False, True)] == [1024, 2048]


def test_the_macrobatch_suits_both_passes():
    rng = np.random.default_rng(0)
    for _ in range(300):
        tokens, hidden, intermediate, experts, top_k, ranks = (int(2**x) for x in rng.uniform(0, [14, 8, 12, 8, 4, 4]))
        sizes = dict(tokens=tokens, top_k=top_k, experts=experts, hidden=hidden, intermediate=intermediate)
        sizes |= dict(ranks=ranks, row_tile=128, macrobatch=int(rng.choice([0, 128, 1280, 4096])))
        backward, forward = make_dims(**sizes), make_dims(**sizes, forward=True)
        assert backward.macrobatch == forward.macrobatch, sizes
        for dims in (backward, forward):
            assert dims.minibatch % 128 == dims.macrobatch % 128 == 0, sizes
            assert max(dims.minibatch, dims.macrobatch) <= dims.capacity, sizes


def test_default_macrobatch_on_several_ranks_is_bounded_by_the_balanced_load():
    dims = make_dims(tokens=4096, top_k=2, experts=4, ranks=8, row_tile=128, minibatch=128)
    assert dims.capacity > 8 * 8192
    assert dims.macrobatch == 8192 + 8192 // 4 + 4 * 64


def test_workspace_of_a_bounded_ring_does_not_grow_with_the_ranks():
    """Only the schedule does, 4 bytes a row, and the counters."""

    def ring_bytes(ranks):
        dims = make_dims(tokens=512, top_k=2, experts=2, ranks=ranks, hidden=64, intermediate=128, macrobatch=512)
        return host.workspace_bytes(dims, host.Pass(backward=True, context=True, gradients=15), 4, 4)

    assert ring_bytes(32) < 1.05 * ring_bytes(2)


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
def test_a_table_of_one_rank_has_no_ring_for_results(backward):
    """All of them go to its own return window. What it pulls stands beside what an exchange of two pulls."""

    def ring_bytes(ranks):
        sizes = dict(tokens=512, top_k=2, experts=2, hidden=64, intermediate=128, row_tile=128, macrobatch=512)
        dims = make_dims(ranks=ranks, peers=True, **sizes)
        return host.workspace_bytes(dims, host.Pass(backward=backward, context=True, gradients=15), 4, 4)

    out = 512 * 64 * 4
    assert ring_bytes(2) - ring_bytes(1) - out in range(20_000)  # the schedule and the counters of more rows

"""The peer protocol, model-checked: ranks that share buffers read what they should in every interleaving, and each
planted fault is found. The model is peer_protocol.py; its megakernel is the task list that CUDA and host execute.

A call on one rank: stage its rows in its own arena; barrier; megakernel, which pulls rows from the peers' staging
buffers, pushes results into their return windows and writes its own into its own; barrier; epilogue, which reads its
own return window. A barrier writes this rank's epoch and signature into every peer's arena and waits for the same
from every peer.

Why this is safe:

Two barriers a call. A staging buffer is written by its rank and read by peers between the first barrier and the
second: the first puts the write before the reads, the second the reads before the next call's write. A return
window is written by peers between the same two barriers and read by its rank after the second: the second puts the
writes before the read, the *next call's first* the read before the next writes. So one barrier stands between any
two uses of a place, and none could be left out. Staging may even overlap with the epilogue before it.

One set of buffers for all layers. The argument never asks which call comes next, only that a rank's calls follow
one another on its stream and that all ranks make the same ones. What is never shared is the ring and its counters.

Epochs, not flags that are reset. A flag that its reader resets is lost if a fast peer arrives at the next barrier
before the reset. An epoch only grows; each is used once, a graph replay included, since the count is in device
memory. The first is 1, not what memory begins with. A peer may be one barrier ahead, never two, as it needs this
rank's arrival to go on. So either there are two flags for each peer, used in turn, and a barrier waits for exactly
its epoch; or one, and the barrier takes a later epoch too: that peer has passed this barrier, so it has compared the
signatures itself. One flag and an exact epoch hang. The signature cannot stand in for the epoch: all calls of one
layer in a loop have the same.

A rank whose host refuses a call that the others make is a call behind, and so are its epochs: like calls would pair,
one too early. So the signature has the number of calls that the rank has refused. What never comes to the host's check
is not noticed: two layers of equal sizes swapped, or a call that one rank's program leaves out.

No deadlock. The barrier is the only wait for a peer. Its flags are written before it waits, and whatever stands
before it ends by this rank alone.

A time-out, or a wrong signature, ends that rank's call with an error and sets the others' abort words. It leaves the
group in pieces: other ranks may have passed the same barrier, even finished the call with right results, and may
read this rank's staging buffer and write to its return window until they reach their next barrier. So a rank that
gave up must not stage again (hence every kernel reads the abort word first) and must not write another flag, which
would vouch for rows that it never pushed; and no arena may be freed, nor an abort word cleared, before every rank has
ended.

Not in the model: a dead rank's memory stays readable; the megakernel ends (its own bounded wait does not); a task,
with all its reads and writes, is one step; the flag and its signature are one word.
"""

import pytest
from explorer import DEADLOCK, OVERWRITTEN, TOO_EARLY, explore
from peer_protocol import Program, Protocol

RING = dict(passes=("forward",), blocks=4)
RING_BACKWARD = dict(passes=("backward",), blocks=3)


def case(name, *found, **changes):
    return pytest.param(changes, set(found), id=name)


def without_wait(op, position):
    def edit(task):
        if task["op"] == op:
            del task["waits"][position : position + 1]

    return edit


DESIGNS = [
    case("as designed"),
    case("forward then backward", passes=("forward", "backward")),
    case("backward then forward", passes=("backward", "forward"), blocks=3),
    case("one worker a sequence", one_worker=True),
    case("three calls", passes=("forward",) * 3, blocks=2),
    case("two ranks", ranks=2),
    case("one flag and later epochs too", flags=1, at_least=True, blocks=3),
    case("staging overlaps with the epilogue", stage_after="barrier", blocks=3),
]

FAULTS = [
    case("no first barrier", TOO_EARLY, OVERWRITTEN, barriers=(1,)),
    case("no second barrier", TOO_EARLY, OVERWRITTEN, barriers=(0,)),
    case("constant epoch", TOO_EARLY, OVERWRITTEN, epoch=lambda number: 1, blocks=1),
    case("epoch counts calls", TOO_EARLY, OVERWRITTEN, epoch=lambda number: 1 + number // 2),
    case(
        "epoch counts calls, later ones pass",
        *(TOO_EARLY, OVERWRITTEN),
        epoch=lambda number: 1 + number // 2,
        flags=1,
        at_least=True,
    ),
    case("first epoch is what flags begin with", TOO_EARLY, epoch=lambda number: number),
    case("one flag and its epoch alone", DEADLOCK, flags=1),
    case("staged before the second barrier", OVERWRITTEN, stage_after="megakernel", blocks=1),
    case("next call begins before the epilogue", OVERWRITTEN, waits_for_epilogue=False),
    case("flag before what is staged", TOO_EARLY, released=("pushed",)),
    case("flag before what is pushed", TOO_EARLY, released=("staged",)),
    case("calls swapped, not in the signature", TOO_EARLY, OVERWRITTEN, swaps_calls=2),
    case("a call refused, not in the signature", TOO_EARLY, DEADLOCK, refuses=2, counts_refusals=False),
    case("stages again after a time-out", OVERWRITTEN, timeout="early", after_error="stages"),
    case("writes a flag after a time-out", TOO_EARLY, timeout="early", after_error="flags"),
]

RING_FAULTS = [
    case("out_consumed", OVERWRITTEN, edit_task=without_wait("down", 1), **RING),
    case("out_ready before dispatch", OVERWRITTEN, edit_task=without_wait("dispatch", 0), **RING),
    case("x_ready", TOO_EARLY, OVERWRITTEN, edit_task=without_wait("gate-up", 0), **RING),
    case("gradient_done", OVERWRITTEN, edit_task=without_wait("reverse-combine", 1), **RING_BACKWARD),
    case("out_consumed, backward", OVERWRITTEN, edit_task=without_wait("dgrad-down", 1), **RING_BACKWARD),
]


@pytest.mark.parametrize("changes, expected", DESIGNS)
def test_every_rank_ends_and_every_read_is_right(changes, expected):
    design = Protocol(**changes)
    found = explore(Program(design))
    assert found.violations == {}
    assert found.outcomes == {("done",) * design.ranks}


@pytest.mark.parametrize("changes, expected", FAULTS)
def test_a_fault_of_the_protocol_is_found(changes, expected):
    assert set(explore(Program(Protocol(**dict(blocks=2) | changes))).violations) == expected


@pytest.mark.parametrize("changes, expected", RING_FAULTS)
def test_a_fault_of_the_ring_is_found(changes, expected):
    assert set(explore(Program(Protocol(**changes))).violations) == expected


@pytest.mark.parametrize("flags, at_least", [pytest.param(2, False, id="two flags"), pytest.param(1, True, id="one")])
def test_a_rank_that_calls_in_another_order_is_an_error_on_every_rank_without_a_time_out(flags, at_least):
    swapped = Protocol(swaps_calls=2, same_signature=False, flags=flags, at_least=at_least)
    found = explore(Program(swapped))
    assert found.violations == {}
    assert found.outcomes == {("error",) * 3}


def test_a_rank_that_refuses_a_call_alone_is_an_error_on_every_rank_without_a_time_out():
    found = explore(Program(Protocol(refuses=2, blocks=2)))
    assert found.violations == {}
    assert found.outcomes == {("error",) * 3}


def test_when_a_rank_dies_the_others_end():
    found = explore(Program(Protocol(dies=2, timeout="last", blocks=2)))
    assert found.violations == {}
    # It may die after its last flags, or between them.
    ends = {("error", "error"), ("done", "error"), ("error", "done"), ("done", "done")}
    assert found.outcomes == {(*end, "dead") for end in ends} | {("done",) * 3}


def test_a_time_out_that_came_too_soon_makes_nobody_read_the_wrong_rows():
    found = explore(Program(Protocol(timeout="early", blocks=3)))
    assert found.violations == {}
    assert {end for outcome in found.outcomes for end in outcome} == {"done", "error"}


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_nothing_in_the_megakernel_waits_for_a_peer(direction):
    program = Program(Protocol(passes=(direction,) * 2))
    tasks = [step for step in program.steps if step.kind == "task"]
    assert len(tasks) >= 2 * 3 * 4 * 5
    for task in tasks:
        causes = task.after
        for counter, _ in task.waits:
            causes |= program.signals[counter]
        assert causes & ~program.of_rank[task.rank] == 0, task.name


# ---- the explorer itself ----


def _small():
    """Small enough to follow every enabled step."""
    for given in DESIGNS + FAULTS:
        changes = given.values[0] | dict(blocks=1, ranks=2)
        yield pytest.param(changes | {name: 1 for name in ("swaps_calls", "refuses") if name in changes}, id=given.id)
    for given in RING_FAULTS:
        yield pytest.param(given.values[0] | dict(ranks=1), id=given.id)
    yield pytest.param(dict(blocks=1, ranks=2, swaps_calls=1, same_signature=False), id="calls swapped")
    yield pytest.param(dict(blocks=1, ranks=2, dies=1, timeout="last"), id="a rank dies")
    yield pytest.param(dict(blocks=1, ranks=2, timeout="early"), id="time-out too soon")
    yield pytest.param(dict(blocks=1), id="three ranks")


@pytest.mark.parametrize("changes", list(_small()))
def test_the_reduction_loses_no_end_and_no_violation(changes):
    reduced, full = (explore(Program(Protocol(**changes)), reduced=reduced) for reduced in (True, False))
    assert reduced.ends == full.ends and reduced.outcomes == full.outcomes
    assert set(reduced.violations) == set(full.violations)
    assert reduced.states <= full.states

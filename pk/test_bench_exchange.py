"""What bench_exchange.py does without a GPU: its arithmetic, its table, and what it refuses."""

import dataclasses
import pathlib

import pytest

if not (pathlib.Path(__file__).parents[1] / "benchmarks").is_dir():
    pytest.skip("an installed wheel is tested without the benchmarks", allow_module_level=True)

import bench_exchange
import protocol


@pytest.mark.parametrize(
    ("ranks", "kind", "megabytes", "limit"),
    [(1, "pull", 1879.0, 4800), (1, "both", 3758.1, 4800), (2, "push", 469.8, 450), (8, "both", 1644.2, 450)],
)
def test_rates_of_an_exchange(ranks, kind, megabytes, limit):
    point = bench_exchange.rate(protocol.SHAPES["S1"], ranks, kind, 2.0)
    assert point.bytes / 1e6 == pytest.approx(megabytes, abs=0.1)
    assert point.gigabytes_per_second == pytest.approx(megabytes / 2, rel=1e-4)
    assert point.share == pytest.approx(megabytes / 2 / limit, rel=1e-4)


def test_differences_leave_out_what_every_call_does():
    medians = {"pull": 5.1, "push": 3.1, "both": 7.1, "none": 1.1, "barriers": 1.1 + 64 * 0.003}
    exchanges, barrier = bench_exchange.differences(medians, 2)
    assert exchanges == pytest.approx({"pull": 2.0, "push": 1.0, "both": 3.0})
    assert barrier == pytest.approx(3.0)


def test_the_exchange_s_table():
    shape = protocol.SHAPES["S1"]
    rates = {kind: dataclasses.asdict(bench_exchange.rate(shape, 2, kind, 2.0)) for kind in bench_exchange.KINDS}
    machine = {"device": "NVIDIA H200", "jax": "0.11.2", "date": "2026-11-30", "link": 450.0, "memory": 4800.0}
    run = {"gpus": 2, "sms": 32, "rates": rates, "barrier_us": 4.25}
    lines = bench_exchange.table(
        {"shape": dataclasses.asdict(shape), "machine": machine, "runs": [run], "layer": {2: {"arenas": 1.5}}}
    ).splitlines()
    assert lines[0].startswith("T 8192, H 7168, K 8, bfloat16; NVIDIA H200, jax 0.11.2, 2026-11-30; link 450 GB/s")
    assert lines[2].split() == ["2", "32", "pull", "2.000", "469.8", "235", "0.522", "4.2"]
    assert lines[4].split() == ["2", "32", "both", "2.000", "939.5", "470", "1.044"]
    assert lines[5] == "layer forward on 2 GPU(s): arenas 1.500 ms"
    assert "159.6 KB pushed, 172.0 KB pulled" in lines[6]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--gpus", "0"], "must be numbers of at least 1 with commas between, got 0"),
        (["--gpus", "two"], "must be numbers of at least 1 with commas between, got two"),
        (["--sms", "1"], "must be numbers of at least 2 with commas between, got 1"),
        (["--link", "nan"], "must be more than 0, got nan"),
        (["--top-k", "33"], "--top-k must be at most the shape's 32 experts, got 33"),
        (
            ["--gpus", "3", "--tokens", "9"],
            "the shape's experts must be divisible by each number of GPUs, got 32 and 3",
        ),
        (["--hidden", "1001"], "--hidden must make rows of whole 16 bytes, got 1001"),
        (["--tokens", "0"], "--tokens must be at least 1, got 0"),
        (["--repeats", "0"], "--repeats must be at least 1, got 0"),
        (
            ["--tokens", "7", "--gpus", "3"],
            "--tokens times --top-k must be divisible by each number of GPUs, got 56 and 3",
        ),
    ],
)
def test_refusals_of_the_exchange(arguments, message, capsys):
    with pytest.raises(SystemExit):
        bench_exchange.parse(arguments)
    assert message in capsys.readouterr().err

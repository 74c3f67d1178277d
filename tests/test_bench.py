"""The parts of the benchmark that need no GPU: shapes, routing, the steady protocol, rivals, the memory formula."""

import dataclasses
import functools
import io
import itertools
import json
import math
import pathlib
import re
import statistics

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mok_jax
from mok_jax import ops

if not (pathlib.Path(__file__).parents[1] / "benchmarks").is_dir():
    pytest.skip("an installed wheel is tested without the benchmarks", allow_module_level=True)

import bench_layer
import memory
import problem
import protocol
import rivals
from report import table

SMALL = protocol.Shape(tokens=96, hidden=64, intermediate=40, experts=12, top_k=3, dtype="float32")
CONFIG = mok_jax.MoKConfig()


@pytest.mark.parametrize("name", protocol.SHAPES)
def test_shape_names(name):
    _, shape, _ = bench_layer.parse(["--shape", name, "--contenders", "matmul", "--memory", ""])
    assert shape == protocol.SHAPES[name]


def test_sizes_override_a_shape():
    _, shape, _ = bench_layer.parse(["--shape", "S4", "--tokens", "64", "--contenders", "matmul", "--memory", ""])
    assert (shape.tokens, shape.hidden, shape.dtype) == (64, 2048, "bfloat16")


def test_default_shape():
    options, shape, _ = bench_layer.parse([])
    assert shape == protocol.Shape(2048, 512, 1024, 16, 2, "float32")
    assert options.contenders == ["matmul", "host", "xla", "ragged_dot", "dense"]
    assert list(options.left_out) == ["cuda"]


@pytest.mark.parametrize("name", ["torch_tuned", "tokamax", "pallas_mgpu", "cuda_skewed"])
def test_what_needs_a_gpu_is_left_out(name):
    options, _, _ = bench_layer.parse(["--contenders", f"matmul,{name}"])
    assert options.contenders == ["matmul"]
    assert "needs" in options.left_out[name]


def test_dense_is_left_out_where_it_does_too_much():
    options, _, _ = bench_layer.parse(["--shape", "S2", "--contenders", "matmul,dense", "--memory", ""])
    assert options.left_out == {"dense": "it does 16 times the layer's work, more than 8 times"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--contenders", "nobody"], "--contenders must name some of matmul, cuda"),
        (["--tokens", "0"], "--tokens must be at least 1, got 0"),
        (["--dtype", "mxfp8"], "argument --dtype: invalid choice: 'mxfp8'"),
        (["--top-k", "17"], "--top-k must be at most --experts 16, got 17"),
        (["--gpus", "9"], "--gpus must be at most the 8 devices here, got 9"),
        (["--contenders", ","], "none of --contenders can run here: there is none"),
        (["--contenders", "host_alone, nccl_dense"], "host_alone: it needs --gpus 2 or more; nccl_dense: it needs"),
        (["--contenders", "cuda_remote"], "cuda_remote: it needs --gpus 2 or more"),
        (["--contenders", "torch_tuned", "--gpus", "2"], "torch_tuned: it runs on one GPU"),
        (["--memory", "host", "--gpus", "2"], "--memory is of one CPU device"),
        (["--memory", "host,torch_tuned"], "--memory: torch_tuned: it needs a GPU"),
        (["--png", "picture"], "--png must end in .png, got picture"),
        (["--minibatch", "100"], "minibatch must be a multiple of"),
        (["--routing", "skewed", "--experts", "4", "--top-k", "3", "--contenders", "host"], "3, but only 2 are left"),
        (["--json", "."], "--json: . cannot be written"),
        (["--json", "/proc/none/report.json"], "--json: /proc/none cannot be made: No such file or directory"),
    ],
)
def test_refusals(arguments, message, capsys):
    with pytest.raises(SystemExit):
        bench_layer.parse(arguments)
    assert message in capsys.readouterr().err


def test_a_rival_without_room_for_few_rows_is_left_out():
    options, _, _ = bench_layer.parse(["--gpus", "8", "--tokens", "480", "--contenders", "host,nccl_dense"])
    assert options.left_out["nccl_dense"].startswith("so few rows may not fit its room")
    options, _, _ = bench_layer.parse(["--gpus", "8", "--shape", "S1", "--contenders", "host,nccl_dense"])
    assert options.left_out == {}


@pytest.mark.parametrize("routing", protocol.ROUTINGS)
def test_router_weights(routing):
    ids, weights = protocol.route(SMALL, routing)
    assert (ids.shape, ids.dtype, weights.dtype) == ((96, 3), np.int32, np.float32)
    assert ((ids >= 0) & (ids < SMALL.experts)).all()
    assert ((weights > 0) & (weights.sum(axis=1, keepdims=True) <= 1 + 1e-6)).all()


def test_uniform_routing_names_the_likeliest_experts():
    ids, weights = protocol.route(SMALL)
    logits = np.random.default_rng(0).standard_normal((96, 12), np.float32)
    assert (np.sort(ids) == np.sort(np.argsort(-logits)[:, :3])).all()
    softmax = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    np.testing.assert_allclose(weights, np.take_along_axis(softmax, ids, axis=1), rtol=1e-6)


@pytest.mark.parametrize("name", protocol.SHAPES)
def test_skewed_routing_is_what_the_name_promises(name):
    shape = protocol.SHAPES[name]
    ids, _ = protocol.route(shape, "skewed")
    counts = np.bincount(ids.reshape(-1), minlength=shape.experts)
    assert counts.max() == shape.rows // 4
    assert (counts == 0).sum() == -(-shape.experts // 10)
    others = counts[(counts > 0) & (counts < counts.max())]
    assert others.max() < 1.3 * others.mean()


def test_the_busiest_rank():
    assert protocol.busiest(np.array([[0, 1], [0, 2]]), 4, 1) == 1
    assert protocol.busiest(np.array([[0, 1], [0, 2]]), 4, 2) == 1.5
    assert protocol.busiest(np.array([[5, 4]]), 6, 3) == 3
    # S1 over two: expert 1 with a quarter of the rows beside 27 of the 56 others that are not idle.
    ids, _ = protocol.route(dataclasses.replace(protocol.SHAPES["S1"], tokens=2048, experts=64), "skewed", 2)
    assert protocol.busiest(ids, 64, 2) == pytest.approx(2 * (1 / 4 + 3 / 4 * 27 / 56), abs=0.02)


@pytest.mark.parametrize(("name", "routing"), [("cuda_skewed", "uniform"), ("cuda", "skewed"), ("cuda", "uniform")])
def test_a_report_says_how_busy_the_busiest_rank_is(monkeypatch, name, routing):
    contender = rivals.CONTENDERS[name]._replace(make=rivals.CONTENDERS["host"].make)  # there is no GPU here
    monkeypatch.setitem(rivals.CONTENDERS, name, contender)
    report = {"agreement": {}, "left_out": {}}
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("expert",))
    bench_layer.prepare(report, [name], SMALL, CONFIG, routing, mesh)
    whole = dataclasses.replace(SMALL, tokens=2 * SMALL.tokens, experts=2 * SMALL.experts)
    skewed = protocol.busiest(protocol.route(whole, "skewed", 2)[0], whole.experts, 2)
    assert skewed > 1.1
    assert report.get("busiest") == (None if (name, routing) == ("cuda", "uniform") else skewed)


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_remote_routing_leaves_the_rank(ranks):
    ids, weights = protocol.route(SMALL, "remote", ranks)
    tokens, experts = SMALL.tokens // ranks, SMALL.experts // ranks
    assert (ids // experts != np.arange(SMALL.tokens)[:, None] // tokens).all()
    assert len(np.unique(ids)) == SMALL.experts
    assert ((weights > 0) & (weights.sum(axis=1, keepdims=True) <= 1 + 1e-6)).all()


@pytest.mark.parametrize(("routing", "ranks"), [("skewed", 1), ("remote", 2)])
def test_routing_refuses_too_few_experts(routing, ranks):
    with pytest.raises(ValueError, match=f"{routing} routing needs more experts: top_k 4, but only 2 are left"):
        protocol.route(protocol.Shape(8, 8, 8, 4, 4, "float32"), routing, ranks)


# ---- the protocol, on a device whose clock is a variable ----


class Device:
    """Runs queued calls one after the other; the host waits only in `wait`."""

    def __init__(self, milliseconds):
        self.milliseconds, self.now, self.busy_until, self.idle, self.calls = milliseconds, 0.0, 0.0, 0.0, 0

    def queue(self, calls):
        self.idle += max(0.0, self.now - self.busy_until)
        for _ in range(calls):
            self.busy_until = max(self.busy_until, self.now) + self.milliseconds(self.calls) / 1e3
            self.calls += 1
        return self.busy_until

    def wait(self, end):
        self.now = max(self.now, end)

    def clock(self):
        return self.now

    def steady(self):
        return protocol.steady(self.queue, self.wait, self.clock)


@pytest.mark.parametrize(
    ("milliseconds", "samples", "batch"),
    [(3, 97, 7), (26, 78, 1), (240, 10, 1), (2000, 3, 1)],
    ids=["fast", "medium", "slow", "slowest"],
)
def test_steady_samples(milliseconds, samples, batch):
    device = Device(lambda call: milliseconds)
    assert device.steady() == pytest.approx([milliseconds] * samples)
    warm = -(-500 // milliseconds)
    assert device.calls == 2 + batch + warm + samples * batch


def test_steady_after_a_hiccup():
    device = Device(lambda call: 30 if call == 1 else 0.05)
    assert len(device.steady()) == 101


def test_steady_leaves_the_device_no_pause():
    device = Device(lambda call: 3)
    device.steady()
    assert device.idle == 0


def test_steady_does_not_see_the_cold_calls():
    device = Device(lambda call: 2 if device.busy_until < 0.1 else 3)
    assert device.steady() == pytest.approx([3] * 68)


def test_steady_samples_two_swings_of_the_power_limiter():
    device = Device(lambda call: 25 + math.sin(2 * math.pi * device.busy_until))
    assert statistics.median(device.steady()) == pytest.approx(25, abs=0.1)


def test_both_orders_average_the_medians():
    order = []

    def sample(name, runs):
        order.append(name)
        return runs[order.count(name) - 1]

    first = [100, 100, 100]  # does not count
    contenders = {"a": [first, [1, 2, 9], [4, 4, 4]], "b": [first, [5, 5, 5], [6, 6, 6]]}
    result = protocol.both_orders({name: lambda n=name, r=runs: sample(n, r) for name, runs in contenders.items()})
    assert order == ["a", "b", "a", "b", "b", "a"]
    expected = {"a": {"median_ms": 3, "ms": contenders["a"][1:]}, "b": {"median_ms": 5.5, "ms": contenders["b"][1:]}}
    assert result == expected


def test_a_failure_of_the_package_ends_with_its_name(monkeypatch):
    part = dict(agreement={}, left_out=dict(cuda="RuntimeError: no"), **{name: {} for name in protocol.DIRECTIONS})
    monkeypatch.setattr(bench_layer.jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(bench_layer, "why_not", lambda implementation: None)
    monkeypatch.setattr(bench_layer, "dims_of", lambda shape, config, _: memory.dims_of(shape, config, "host"))
    monkeypatch.setattr(bench_layer, "run_process", lambda *arguments: part)
    with pytest.raises(SystemExit, match="cuda failed"):
        bench_layer.main(["--contenders", "matmul,cuda"])


# ---- rivals ----


@pytest.fixture
def stitched(monkeypatch):
    """The stitched layer on products that run anywhere, as the contender "pallas_mgpu"."""
    contender = rivals.CONTENDERS["pallas_mgpu"]
    layer = contender._replace(make=lambda config, mesh: rivals.stitched(rivals.xla_products()))
    monkeypatch.setitem(rivals.CONTENDERS, "pallas_mgpu", layer)
    return "pallas_mgpu"


def errors_of(name, shape, routing="uniform"):
    calls = problem.make_calls(problem.make_problem(name, shape, CONFIG, routing))
    results = problem.results_to_check(shape, calls["forward+backward"])
    return problem.check_agreement(name, shape, results, problem.reference(shape, CONFIG, routing))


@pytest.mark.parametrize("routing", protocol.ROUTINGS)
def test_stitched_layer_agrees(stitched, routing):
    assert list(errors_of(stitched, SMALL, routing)) == list(protocol.TENSORS)


def test_weights_quantised_before_agree_with_the_definition():
    shape = dataclasses.replace(SMALL, dtype="bfloat16")
    contender = rivals.CONTENDERS["cuda_mxfp8"]._replace(make=functools.partial(rivals.package_mxfp8, "host"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(rivals.CONTENDERS, "cuda_mxfp8", contender)
        calls = problem.make_calls(problem.make_problem("cuda_mxfp8", shape, CONFIG))
    results = problem.results_to_check(shape, calls["forward+backward"])
    wanted = problem.reference(shape, CONFIG, "uniform", "mxfp8")
    problem.check_agreement("cuda_mxfp8", shape, results, wanted, "mxfp8")


def test_some_tokens_are_checked_in_the_program_that_runs_on_all(stitched, monkeypatch):
    monkeypatch.setattr(problem, "checked_tokens", lambda shape, ranks: 32)
    assert problem.reference(SMALL, CONFIG, "uniform")[0].shape == (32, 64)
    errors_of(stitched, SMALL)
    errors_of("host", SMALL)


# ---- over several devices ----


def ragged_all_to_all(operand, output, input_offsets, send_sizes, output_offsets, recv_sizes, *, axis_name):
    """What lax.ragged_all_to_all is documented to do; XLA has none on a CPU."""
    everyone = [jax.lax.all_gather(a, axis_name) for a in (operand, input_offsets, send_sizes, output_offsets)]
    slices = input_offsets.size // jax.lax.axis_size(axis_name)
    mine = jax.lax.axis_index(axis_name) * slices + jnp.arange(slices)
    row, came = jnp.arange(len(output)), []
    for values, begins, sizes, ends in zip(*everyone, strict=True):
        begin, size, end = (a[mine][:, None] for a in (begins, sizes, ends))
        inside = (row >= end) & (row < end + size)
        source = jnp.where(inside, row - end + begin, 0).sum(axis=0)
        output = jnp.where(inside.any(axis=0).reshape(-1, *[1] * (output.ndim - 1)), values[source], output)
        came.append(sizes[mine])
    return jnp.where((jnp.concatenate(came) == recv_sizes).all(), output, jnp.nan)  # both ends must agree on sizes


def careless_products():
    """Nothing is written behind the last expert's rows, and a gradient reads some of what stands there."""
    products = rivals.xla_products()

    def unwritten(product):
        def run(a, b, counts):
            result = product(a, b, counts)
            return jnp.where(jnp.arange(len(result))[:, None] < counts.sum(), result, jnp.nan)

        return run

    def weight_gradient(a, b, counts):
        return products.weight_gradient(a, b, counts) + 0 * (a.sum() + b.sum())

    return rivals.Products(unwritten(products.dot), unwritten(products.dot_transposed), weight_gradient)


@pytest.mark.parametrize(
    ("name", "routing"),
    [
        ("nccl_dense", "uniform"),
        ("nccl_ragged", "uniform"),
        ("nccl_dense", "skewed"),
        ("nccl_ragged", "skewed"),
        ("xla", "skewed"),
        ("xla", "remote"),
        ("host_alone", "uniform"),
    ],
)
def test_layers_over_a_mesh_agree(name, routing, monkeypatch):
    monkeypatch.setattr(rivals.lax, "ragged_all_to_all", ragged_all_to_all)
    monkeypatch.setattr(rivals, "best_products", careless_products)
    monkeypatch.setattr(problem, "checked_tokens", lambda shape, ranks: 48)
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]), ("expert",))
    calls = problem.make_calls(problem.make_problem(name, SMALL, CONFIG, routing, mesh))
    results = problem.results_to_check(SMALL, calls["forward+backward"])
    assert results[3].shape == (48, 64, 40)
    wanted = problem.reference(SMALL, CONFIG, routing, mesh=mesh, alone=name == "host_alone")
    assert list(problem.check_agreement(name, SMALL, results, wanted)) == list(protocol.TENSORS)


def test_alone_every_device_has_a_layer_to_itself():
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]), ("expert",))
    passes = [
        problem.make_calls(problem.make_problem(*args))
        for args in (("host_alone", SMALL, CONFIG, "uniform", mesh), ("host", SMALL, CONFIG))
    ]
    alone, one = (calls["forward"]() for calls in passes)
    assert len(alone) == 4 * SMALL.tokens
    np.testing.assert_array_equal(alone[: SMALL.tokens], one)


def test_the_numbers_do_not_depend_on_the_mesh():
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]), ("expert",))
    quarter = dataclasses.replace(SMALL, tokens=24, experts=3)
    for over_mesh, alone in zip(problem._tensors(quarter, mesh), problem._tensors(SMALL, None), strict=True):
        np.testing.assert_array_equal(over_mesh, alone)
        assert len(over_mesh.sharding.device_set) == 4 and not over_mesh.is_fully_replicated


def test_the_limit_of_several_devices_exchanges_nothing():
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]), ("expert",))
    call = problem.make_calls(problem.make_problem("matmul", SMALL, CONFIG, mesh=mesh))["forward+backward"]
    compiled = call.func.lower(*call.args).compile()
    assert not re.search("all-(to-all|gather|reduce)|collective-permute", compiled.as_text())
    assert compiled(*call.args)[0][0].shape == (4 * SMALL.rows, SMALL.intermediate)


@pytest.mark.parametrize("tensor", protocol.TENSORS)
def test_a_wrong_tensor_is_named(tensor):
    wanted = problem.reference(SMALL, CONFIG, "uniform")
    index = protocol.TENSORS.index(tensor)
    results = [w.at[(0,) * w.ndim].add(jnp.nan if i == index else 0.0) for i, w in enumerate(wanted)]
    with pytest.raises(ValueError, match=f"somebody: {tensor} must be within"):
        problem.check_agreement("somebody", SMALL, results, wanted)


# ---- memory ----


@pytest.mark.parametrize("config", [CONFIG, mok_jax.MoKConfig(save_context=False)], ids=["context", "recomputed"])
def test_formula_is_what_xla_plans(config):
    shape = protocol.Shape(tokens=512, hidden=128, intermediate=192, experts=6, top_k=3, dtype="bfloat16")
    formula = sum(memory.formula_bytes(shape, config, "host").values())
    call = problem.make_calls(problem.make_problem("host", shape, config))["forward+backward"]
    planned = call.func.lower(*call.args).compile().memory_analysis()
    total = planned.argument_size_in_bytes + planned.output_size_in_bytes + planned.temp_size_in_bytes
    assert formula <= total <= 1.02 * formula


@pytest.mark.parametrize("precision", [None, "mxfp8"], ids=["bf16", "mxfp8"])
def test_bytes_are_counted_in_a_program_without_the_weights_in_it(precision, monkeypatch):
    shape = protocol.Shape(tokens=64, hidden=256, intermediate=192, experts=4, top_k=2, dtype="bfloat16")
    dims = memory.dims_of
    monkeypatch.setattr(memory, "dims_of", lambda shape, config, implementation: dims(shape, config, "host"))

    def sizes(self, workspace, *_):  # "host" counts nothing
        # Careful: of the workspace, or nothing would be left of the calls.
        return jnp.full((2, 2), np.array([workspace.size, 1]), jnp.uint32) + 0 * workspace[0].astype(jnp.uint32)

    monkeypatch.setattr(ops.Dims, "pulled_bytes", sizes)
    programs = []

    def jit(function, jit=jax.jit):
        def call(*arguments):
            programs.append(io.BytesIO())
            jit(function).lower(*arguments).compiler_ir().operation.write_bytecode(programs[-1])
            return jit(function)(*arguments)

        return call

    with monkeypatch.context() as patch:
        patch.setattr(memory.jax, "jit", jit)
        found = memory.pulled_bytes(shape, CONFIG, precision)
    config = dataclasses.replace(CONFIG, precision=precision, virtual_ranks=2)
    host = dims(shape, config, "host")
    scratch = [host.workspace_bytes(False, True, 0), host.workspace_bytes(True, True, ops.GATE_UP | ops.DOWN)]
    assert found == [2 * (size + 2**32) for size in scratch]
    assert [len(program.getvalue()) < 50_000 for program in programs] == [True]  # a weight alone has 393,216 bytes


def test_the_calls_whose_bytes_are_counted_are_the_layer():
    shape = dataclasses.replace(SMALL, dtype="bfloat16")
    _, ids, arguments, d_y = problem.make_problem("host", shape, CONFIG)
    y, d_x, *_ = memory.both_calls(memory.dims_of(shape, CONFIG, "host"), ids, arguments, d_y)
    calls = problem.make_calls(problem.make_problem("host", shape, CONFIG))
    np.testing.assert_array_equal([y, d_x], calls["forward+backward"]()[:2])


@pytest.mark.parametrize("name", protocol.SHAPES)
def test_readme_formula_is_the_packages_on_hopper(name):
    try:
        ops.cuda()
    except ImportError as error:
        pytest.skip(str(error))
    shape = protocol.SHAPES[name]
    sizes = (shape.tokens, shape.hidden, shape.intermediate, 0, shape.experts, 1, shape.top_k)
    dims = ops.Dims(*sizes, jnp.dtype(shape.dtype), CONFIG, "cuda", ops.Gpu((9, 0), None))
    plan = dims.plan()
    assert plan.capacity == (shape.rows + 127 * shape.experts) // 128 * 128
    assert plan.macrobatch == plan.capacity
    rows, hidden, width = plan.macrobatch, shape.hidden, shape.intermediate
    forward = 2 * (rows * (hidden + width) + shape.rows * hidden)
    backward = 2 * (rows * (2 * hidden + 3 * width) + shape.rows * hidden)
    backward += 4 * shape.rows + 4 * rows * -(-width // 256)
    few = 500_000
    assert dims.workspace_bytes(False, True, 0) - forward in range(few)
    assert dims.workspace_bytes(True, True, ops.GATE_UP | ops.DOWN) - backward in range(few)


# ---- the torch layers ----


@pytest.mark.parametrize("name", ["torch_tuned", "plain"])
@pytest.mark.parametrize("routing", protocol.ROUTINGS)
def test_torch_layers_agree(name, routing):
    pytest.importorskip("torch")
    import torch_layer

    layer = torch_layer.plain_layer if name == "plain" else torch_layer.LAYERS[name]()
    (ids, arguments, d_y), _ = torch_layer.make_problem(SMALL, routing, "cpu")
    wanted = torch_layer.both(torch_layer.reference, ids, arguments, d_y)
    torch_layer.check(name, SMALL, torch_layer.both(layer, ids, arguments, d_y), wanted)


# ---- processes and reports ----


def options_of(*arguments):
    return bench_layer.parse([*arguments, "--memory", ""])[0]


def test_a_process_of_its_own():
    report = bench_layer.run_process("jax", ["host", "tokamax"], SMALL, options_of("--repeats", "1"))
    assert list(report["agreement"]) == ["host"]
    assert report["left_out"] == {"tokamax": "it needs a GPU"}
    assert [list(report[direction]) for direction in protocol.DIRECTIONS] == [["matmul", "host"]] * 2
    assert report["shape"] == dataclasses.asdict(SMALL)


def test_a_process_that_takes_too_long(monkeypatch):
    monkeypatch.setitem(bench_layer.PROCESSES, "jax", 0.1)
    report = bench_layer.run_process("jax", ["host", "tokamax"], SMALL, options_of())
    assert report["left_out"] == dict.fromkeys(["host", "tokamax"], "did not finish in 0.1 s")


def test_a_process_that_fails():
    shape = dataclasses.replace(SMALL, top_k=13)
    report = bench_layer.run_process("jax", ["host"], shape, options_of())
    assert report["left_out"]["host"].startswith("its process ended with 2: bench_layer: --top-k must be at most")


def test_why_says_which_memory_there_was_not():
    assert bench_layer.why(ValueError("this\nand that")) == "ValueError: this"
    assert bench_layer.why(RuntimeError("NOT_FOUND: no config\nX: Out of memory, 2 GiB")) == (
        "RuntimeError: X: Out of memory, 2 GiB"
    )


def test_shares_are_of_the_limit_of_the_same_process():
    merged = {"agreement": {}, "left_out": {}, "forward": {}, "forward+backward": {}}
    merged |= dict.fromkeys(("peak", "mxfp8", "busiest"))
    for process, name, limit in (("torch", "torch_tuned", 2.0), ("jax", "cuda", 3.0)):
        times = {"matmul": {"median_ms": limit}, name: {"median_ms": 4.0}}
        part = {"agreement": {}, "left_out": {}} | {
            d: {n: dict(p) for n, p in times.items()} for d in protocol.DIRECTIONS
        }
        bench_layer.add_rates(part, SMALL)
        bench_layer.merge(merged, process, part)
    forward, both = (merged[direction] for direction in protocol.DIRECTIONS)
    assert {name: point["share"] for name, point in forward.items()} == {
        "matmul in torch": 1.0,
        "torch_tuned": 0.5,
        "matmul in jax": 1.0,
        "cuda": 0.75,
    }
    assert forward["cuda"]["tflops"] == pytest.approx(6 * 96 * 3 * 64 * 40 / 4e-3 / 1e12)
    assert both["cuda"]["tflops"] == pytest.approx(3 * forward["cuda"]["tflops"])


def test_table_of_a_gpu():
    point = {"median_ms": 2.0, "tflops": 500.4, "share": 0.8}
    slower = {name: point | {"median_ms": ms} for name, ms in (("cuda_mxfp8", 2.5), ("cuda_skewed", 2.1))}
    times = {"matmul in jax": point, "cuda": point, **slower}
    report = {
        "shape": dataclasses.asdict(SMALL),
        "machine": {"platform": "gpu", "device": "NVIDIA H200", "jax": "0.11.2", "date": "2026-11-29"},
        "gpus": 1,
        "routing": "uniform",
        "memory": {},
        "mxfp8": {"quantize_ms": 7.5, "pulled_bytes": {"None": [2**31, 2**30], "mxfp8": [33 * 2**25, 33 * 2**24]}},
        "peak": {"peak_bytes": 101 * 2**28, "formula_bytes": 100 * 2**28, "parts": {"ring": 100 * 2**28}},
        "left_out": {"ragged_dot": "did not finish in 45 s"},
        **dict.fromkeys(protocol.DIRECTIONS, times),
    }
    lines = table(report).splitlines()
    assert lines[0].endswith("float32, uniform routing; NVIDIA H200, jax 0.11.2, 2026-11-29")
    assert lines[1] == "peak memory of cuda, GiB: 25.25, +1.0% against the formula's 25.00 (ring 25.00)"
    assert lines[2] == "MXFP8: quantising the weights, once for an update: 7.50 ms"
    assert lines[3].startswith("MXFP8: x and dy pulled by two virtual ranks: 1.031 GiB forward, 0.5156 of bfloat16's, ")
    assert lines[6].split() == ["cuda", "2.000", "500", "0.800", "2.000", "500", "0.800"]
    assert lines[-3] == "MXFP8 has 80.0% of cuda's speed forward, 80.0% forward+backward"
    assert lines[-2] == "skewed routing costs cuda +5.0% forward, +5.0% forward+backward"
    assert lines[-1] == "ragged_dot left out: did not finish in 45 s"


def test_table_of_several_gpus():
    times = {
        "cuda": (10.0, 30.0),
        "cuda_skewed": (12.0, 36.0),
        "cuda_remote": (10.5, 33.0),
        "cuda_alone": (9.5, 27.0),
        "nccl_dense": (24.0, 66.0),
        "nccl_ragged": (25.0, 65.0),
        "xla": (90.0, 100.0),
    }
    report = {
        "shape": dataclasses.asdict(SMALL),
        "gpus": 2,
        "machine": {"platform": "gpu", "device": "NVIDIA H200", "jax": "0.11.2", "date": "2026-11-29"},
        "routing": "uniform",
        **dict(memory={}, mxfp8=None, peak=None, left_out={}, busiest=1.226),
        **{
            direction: {name: {"median_ms": ms[i], "tflops": 500.0} for name, ms in times.items()}
            for i, direction in enumerate(protocol.DIRECTIONS)
        },
    }
    lines = table(report).splitlines()
    assert lines[0].endswith("float32, uniform routing; on each of 2 ranks; NVIDIA H200, jax 0.11.2, 2026-11-29")
    assert lines[-4] == (
        "skewed routing costs cuda +20.0% forward, +20.0% forward+backward; "
        "the busiest rank has 1.23 times the mean's rows"
    )
    assert lines[-3] == "remote routing costs cuda +5.0% forward, +10.0% forward+backward"
    assert lines[-2] == "R = 2: a GPU has 95.0% of its speed by itself forward, 90.0% forward+backward"
    assert lines[-1] == (
        "times the speed of the best layer over NCCL: 2.40 forward (nccl_dense), 2.17 forward+backward (nccl_ragged), "
        "0.50 backward alone (xla)"
    )
    skewed = table(report | dict(routing="skewed")).splitlines()
    assert skewed[-2] == f"{lines[-2]}; the busiest rank has 1.23 times the mean's rows"
    assert not any("costs" in line for line in skewed)  # of skewed routing against itself


# ---- the whole, on this CPU ----


def test_a_small_run(tmp_path, capsys):
    sizes = "--tokens=64 --hidden=32 --intermediate=48 --experts=8 --top-k=2 --repeats=1 --memory= --routing=skewed"
    bench_layer.main([*sizes.split(), "--contenders", "matmul,host", "--json", str(tmp_path / "a" / "report.json")])
    lines = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"y and gradients agree with the reference: host \d.\de-0\d \(at most 2e-05\)", lines[0])
    assert [line.split()[0] for line in lines[-2:]] == ["matmul", "host"]
    assert (tmp_path / "a" / "report.json").exists()
    assert jax.default_backend() == "cpu"


def test_a_small_run_over_several_devices(tmp_path, capsys):
    sizes = "--tokens=64 --hidden=32 --intermediate=48 --experts=8 --top-k=2 --repeats=1 --gpus=2"
    contenders = "matmul,host,host_alone,xla,nccl_dense,nccl_ragged,ragged_dot,torch_tuned"
    bench_layer.main([*sizes.split(), "--contenders", contenders, "--json", str(tmp_path / "report.json")])
    lines = capsys.readouterr().out.splitlines()
    assert [name.split()[0] for name in lines[0].split(": ")[1].split(", ")] == [
        "host",
        "xla",
        "nccl_dense",
        "host_alone",
    ]
    assert [line.split()[0] for line in lines[3:8]] == ["matmul", "host", "host_alone", "xla", "nccl_dense"]
    alone = "it runs on one GPU; nccl_dense and nccl_ragged are for several"
    assert "on each of 2 ranks, devices of this CPU; " in lines[1]
    assert lines[8:] == [
        "nccl_ragged left out: XLA has no ragged_all_to_all on a CPU",
        f"ragged_dot left out: {alone}",
        f"torch_tuned left out: {alone}",
    ]
    report = json.loads((tmp_path / "report.json").read_text())
    point = report["forward"]["host"]
    assert point["tflops"] == pytest.approx(6 * 64 * 2 * 32 * 48 / point["median_ms"] / 1e9)  # of one rank


def test_a_failure_to_count_bytes_loses_no_times(tmp_path, monkeypatch, capsys):
    # There is no GPU here whose kernels could count.
    contender = rivals.CONTENDERS["cuda_mxfp8"]._replace(make=functools.partial(rivals.package_mxfp8, "host"))
    monkeypatch.setitem(rivals.CONTENDERS, "cuda_mxfp8", contender)
    monkeypatch.setattr(bench_layer, "_why_not", lambda name, shape, options: None)
    monkeypatch.setattr(bench_layer, "dims_of", lambda shape, config, _: memory.dims_of(shape, config, "host"))
    monkeypatch.setattr(protocol, "WARM_SECONDS", 0.01)
    monkeypatch.setattr(protocol, "SAMPLE_SECONDS", 0.02)
    saved = []
    pulled_bytes = bench_layer.pulled_bytes
    file = tmp_path / "report.json"

    def fails(*arguments):
        saved.append(json.loads(file.read_text()))
        return pulled_bytes(*arguments)

    monkeypatch.setattr(bench_layer, "pulled_bytes", fails)
    sizes = "--tokens=64 --hidden=32 --intermediate=48 --experts=8 --top-k=2 --repeats=1 --memory= --dtype=bfloat16"
    with pytest.raises(SystemExit, match="the bytes of cuda_mxfp8 failed"):
        bench_layer.main([*sizes.split(), "--contenders", "matmul,cuda_mxfp8", "--json", str(file)])
    before, after = saved[0], json.loads(file.read_text())
    reasons = [report["left_out"].pop("the bytes of cuda_mxfp8") for report in (before, after)]
    assert reasons[0] == "its process ended before they were measured"
    assert "RuntimeError: " in reasons[1]
    assert before == after
    assert [list(after[direction]) for direction in protocol.DIRECTIONS] == [["matmul", "cuda_mxfp8"]] * 2
    assert after["mxfp8"] is None
    assert re.search(r": cuda_mxfp8 \d\.\de[+-]\d\d \(at most 0\.1\)$", capsys.readouterr().out.splitlines()[0])


def test_what_shares_a_reference_is_checked_together():
    names = bench_layer.by_reference([name for name in bench_layer.ON_GPU.split(",") if name in rivals.CONTENDERS])
    contenders = [rivals.CONTENDERS[name] for name in names]
    assert names[0] == "cuda"
    compiled = [contender.precision for contender in contenders]
    asked = [(contender.routing, contender.precision) for contender in contenders]
    assert len(list(itertools.groupby(compiled))) == 2
    assert len(list(itertools.groupby(asked))) == 3

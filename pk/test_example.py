"""The examples: the commands as a user runs them, with few steps, and every message of train_lm.py about bad input."""

import importlib.util
import os
import pathlib
import re
import socket
import subprocess
import sys

import jax
import pytest
from cases import GPU

SCRIPT = pathlib.Path(__file__).parent.parent / "examples" / "train_lm.py"
TINY = "--steps=3 --batch=8 --sequence=16 --layers=2 --hidden=32 --intermediate=24 --experts=4 --validate-every=2"

if not SCRIPT.exists():
    pytest.skip("the examples are not beside the tests", allow_module_level=True)


def run(*arguments):
    """The script in a process of its own, whose devices are its own affair; warnings are errors."""
    unset = ("XLA_FLAGS", "JAX_ENABLE_X64", "JAX_NUM_CPU_DEVICES")
    environment = {name: value for name, value in os.environ.items() if name not in unset}
    command = [sys.executable, "-W", "error", str(SCRIPT), *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100)


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("train_lm", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["train_lm"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    yield module
    del sys.modules["train_lm"]


def assert_is_picture(path):
    from PIL import Image  # matplotlib's own dependency

    with Image.open(path) as picture:
        picture.load()
        assert picture.format == "PNG"
        assert min(picture.size) >= 200
        assert len(picture.convert("L").getcolors()) > 8  # not blank


NUMBER = r"\d+\.\d{3}"
NATS = rf"{NUMBER} nats \({NUMBER} bits\) per byte"


@pytest.mark.parametrize(
    ("arguments", "head"),
    [
        pytest.param([], "'host' on {'data': 2, 'expert': 4} cpu devices", id="default"),
        pytest.param(
            ["--implementation=xla", "--mesh=2x1", "--layers=1"],
            "'xla' on {'data': 2, 'expert': 1} cpu devices",
            id="xla-2x1",
        ),
    ],
)
def test_a_few_steps(tmp_path, arguments, head):
    result = run(*TINY.split(), *arguments, "--out", str(tmp_path / "pictures"))
    assert result.returncode == 0, result.stderr
    patterns = [
        re.escape(f"{head}, jax {jax.__version__}"),
        r"text: .+, \d+ files of [\d,]+ bytes to train on, \d+ files of [\d,]+ bytes to validate on",
        f"entropy of a byte, over all the text: {NATS}",
        f"entropy of a byte given the one before it: {NATS}",
        r"3 steps in \d+ s, [\d,]+ tokens/s",
        rf"final validation loss: {NATS}, not below the entropy given the byte before \({NUMBER}\)",
        re.escape(f"wrote {tmp_path / 'pictures' / 'loss.png'}"),
        re.escape(f"wrote {tmp_path / 'pictures' / 'load.png'}"),
    ]
    for line, pattern in zip(result.stdout.splitlines(), patterns, strict=True):
        assert re.fullmatch(pattern, line), f"{line!r} does not match {pattern!r}"
    bar = result.stderr.replace("\r", "\n").splitlines()[-1]
    assert re.search(rf"3/3 .*loss {NUMBER}, validation {NUMBER}, [\d,]+ tokens/s", bar), result.stderr
    assert_is_picture(tmp_path / "pictures" / "loss.png")
    assert_is_picture(tmp_path / "pictures" / "load.png")


def test_mxfp8_learns_as_bfloat16_does(tmp_path):
    arguments = "--mesh=1x2 --steps=150 --batch=16 --sequence=64 --layers=2 --hidden=64 --intermediate=96"
    losses = {}
    for precision in ("bfloat16", "mxfp8"):
        result = run(*arguments.split(), f"--precision={precision}", "--out", str(tmp_path))
        assert result.returncode == 0, result.stderr
        losses[precision] = float(re.search(rf"final validation loss: ({NUMBER}) nats", result.stdout)[1])
    assert losses["bfloat16"] < 2.6  # 3.2 is the entropy of a byte
    assert abs(losses["mxfp8"] / losses["bfloat16"] - 1) < 0.02, losses


def test_help_names_every_setting_and_its_default(example, capsys):
    with pytest.raises(SystemExit) as stopped:
        example.parse(["--help"])
    assert stopped.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    for setting in example.dataclasses.fields(example.Settings):
        assert f"--{setting.name.replace('_', '-')} " in text
        assert f"(default: {setting.default})" in text


def test_bad_input_ends_the_command_with_one_line():
    result = run("--steps", "0")
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr == "train_lm: --steps must be at least 1, got 0\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        pytest.param("--steps -1", "--steps must be at least 1, got -1", id="steps"),
        pytest.param("--steps many", "argument --steps: invalid int value: 'many'", id="steps-word"),
        pytest.param("--seed -1", "--seed must be at least 0, got -1", id="seed"),
        pytest.param("--mesh 2x3", "--mesh must have as many devices as there are, 8, got 2x3", id="mesh-count"),
        pytest.param("--mesh 8", "--mesh must be two sizes >= 1, data x expert, as 2x4, got '8'", id="mesh-one"),
        pytest.param("--mesh 0x8", "--mesh must be two sizes >= 1, data x expert, as 2x4, got '0x8'", id="mesh-zero"),
        pytest.param("--hidden 48", "--hidden must be a multiple of 32, the head's width, got 48", id="hidden"),
        pytest.param("--batch 12", "--batch must be a multiple of 8, the number of devices, got 12", id="batch"),
        pytest.param(
            "--experts 6 --mesh 2x4", "--experts must be a multiple of 4, the mesh's expert axis, got 6", id="experts"
        ),
        pytest.param("--top-k 9", "--top-k must be at most --experts 8, got 9", id="top-k"),
        pytest.param(
            "--precision fp8", "--precision must be one of float32, bfloat16, mxfp8, got 'fp8'", id="precision"
        ),
        pytest.param("--learning-rate nan", "--learning-rate must be a finite number > 0, got nan", id="rate"),
        pytest.param(
            "--implementation fast",
            "moe: implementation must be one of ('cuda', 'host', 'xla', 'reference') or None, got 'fast'",
            id="implementation",
        ),
        pytest.param("--tempo 3", "unrecognized arguments: --tempo 3", id="unknown"),
    ],
)
def test_bad_input(example, capsys, arguments, message):
    with pytest.raises(SystemExit) as stopped:
        example.parse(arguments.split())
    assert stopped.value.code == 2
    assert capsys.readouterr().err == f"train_lm: {message}\n"


def test_a_text_shorter_than_a_sequence(example):
    settings, mesh = example.parse(["--sequence", str(10**8)])
    with pytest.raises(SystemExit, match=r"^train_lm: --sequence must be below the \d+ training bytes, got 10{8}$"):
        example.train(settings, mesh)


def test_entropies_of_a_known_text(example):
    # a and b alternate: one bit a byte, and none once the byte before is known.
    unigram, bigram = example.entropies(example.np.frombuffer(b"ab" * 500, example.np.uint8))
    assert unigram == pytest.approx(example.math.log(2))
    assert bigram == pytest.approx(0.0, abs=1e-12)


def test_files_are_split_once_and_for_all(example):
    first, second = example.read_text(), example.read_text()
    for text, again in zip(first, second, strict=True):
        assert text.tobytes() == again.tobytes()
    assert 0.01 < second[1].size / second[0].size < 0.2


# ---- examples/expert_parallel.py ----

# platform: (what runs there in one process, in two; the platform's name)
PLATFORMS = {"cpu": ("host", "xla", "cpu"), "cuda": ("cuda", "cuda", "gpu")}
platforms = pytest.mark.parametrize("platform", PLATFORMS if GPU else ["cpu"])


def start(platform, *arguments):
    if platform == "cuda" and len(jax.devices("cuda")) < 2:
        pytest.skip("needs 2 CUDA devices")
    script = SCRIPT.with_name("expert_parallel.py")
    unset = ("XLA_FLAGS", "JAX_ENABLE_X64", "XLA_PYTHON_CLIENT_PREALLOCATE")
    environment = {name: value for name, value in os.environ.items() if name not in unset}
    environment |= {"JAX_PLATFORMS": platform, "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.1"}
    command = [sys.executable, str(script), "--steps=11", "--tokens=16", *arguments]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def losses(output):
    return [float(value) for value in re.findall(r"^step \d+: loss (\S+)$", output, re.MULTILINE)]


@platforms
@pytest.mark.parametrize("data", [1, 2])
def test_expert_parallel_in_one_process(platform, data):
    implementation, _, name = PLATFORMS[platform]
    output, _ = start(platform, f"--data={data}").communicate(timeout=100)
    first, last = losses(output)
    assert last < first
    # Where there is a GPU the script asks for no virtual devices.
    head = rf"'{implementation}' over {{'data': {data}, 'expert': \d+}} {name} devices, 1 process"
    assert re.search(head, output), output


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("--processes=2", "--process=1"), "--processes, --process and --device need --coordinator"),
        (("--data=0",), "--data, --tokens, --steps and --processes must be at least 1"),
        (("--data=16",), r"--data must divide the \d devices, got 16"),
        (("--coordinator=here",), "--coordinator must be address:port, got here"),
        (("--coordinator=here:1", "--process=1"), "--process must be less than --processes 1, got 1"),
    ],
    ids=["no_coordinator", "zero", "indivisible", "no_port", "no_such_process"],
)
def test_what_expert_parallel_refuses(arguments, text):
    process = start("cpu", *arguments)
    output, _ = process.communicate(timeout=100)
    assert process.returncode != 0 and re.search(f"{text}$", output.splitlines()[-1]), output


@platforms
def test_expert_parallel_in_two_processes(platform):
    _, implementation, name = PLATFORMS[platform]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        coordinator = f"127.0.0.1:{free.getsockname()[1]}"
    several = [
        start(platform, f"--coordinator={coordinator}", "--processes=2", f"--process={i}", f"--device={i}")
        for i in (0, 1)
    ]
    outputs = [process.communicate(timeout=100)[0] for process in several]
    assert [process.returncode for process in several] == [0, 0], outputs
    first, last = losses(outputs[0])
    assert last < first and not losses(outputs[1])
    head = rf"'{implementation}' over {{'data': 1, 'expert': \d+}} {name} devices, 2 process"
    assert re.search(head, outputs[0]), outputs

"""`python -m mok_jax`: the report names versions, devices, every implementation and the variables."""

import os
import subprocess
import sys

import cases
import jax
import pytest

from mok_jax import __main__, distributed, ops
from mok_jax.config import TIMEOUT_VARIABLE
from mok_jax.moe import IMPLEMENTATIONS


def report(*arguments):
    return dict(__main__.lines(**vars(__main__._parser().parse_args(arguments))))


def test_command_in_a_process_of_its_own():
    environment = os.environ | {TIMEOUT_VARIABLE: "7.5"}
    command = [sys.executable, "-W", "error", "-m", "mok_jax"]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert (result.returncode, result.stderr) == (0, "")
    rows = dict(line.split(None, 1) for line in result.stdout.splitlines())
    assert rows.pop('"cuda"') == "no: it needs CUDA devices, these are cpu"
    for name in IMPLEMENTATIONS[1:]:
        assert rows[f'"{name}"'] == "yes"
    assert rows["chosen"] == '"host"'
    assert rows["jax"] == jax.__version__
    assert rows["devices"].startswith("8 cpu")
    assert rows[TIMEOUT_VARIABLE] == "7.5, so 7.5 s"


def test_it_names_the_extension_module():
    lines = report()
    for name, text in ops.describe().items():
        assert lines[name] == text


def test_it_gives_the_reason_against_an_implementation(monkeypatch):
    def refuse(name, *_):
        return "it needs CPU devices, these are gpu" if name == "host" else None

    monkeypatch.setattr(__main__, "why_not", refuse)
    lines = report()
    assert lines['"host"'] == "no: it needs CPU devices, these are gpu"
    assert lines['"xla"'] == "yes"


def test_it_names_the_choice_over_all_devices():
    assert report()["over 8 devices"] == '"host"; not "cuda": it needs CUDA devices, these are cpu'


def test_the_arena_of_a_shape():
    lines = report("--tokens", "1024", "--hidden", "512", "--top-k", "2", "--dtype", "float32")
    assert lines["arena"].startswith("16 KiB + 2 T H s + 8 T K + T K (H s + 4) bytes")
    size = 16384 + 2 * 1024 * 512 * 4 + 8 * 2048 + 2048 * (512 * 4 + 4)
    assert lines["T 1024 H 512 K 2 float32"] == f"{size} bytes, {size / 2**20:.1f} MiB"
    assert cases.GPU or lines["peers"] == "there is no CUDA device here"


def test_a_backend_that_is_not_there(monkeypatch):
    def fail():
        raise RuntimeError("Unable to initialize backend 'cuda'")

    monkeypatch.setattr(jax, "devices", fail)
    lines = report()
    assert lines["devices"] == "none: JAX cannot start its backend: Unable to initialize backend 'cuda'"
    assert "extension module" in lines and "chosen" not in lines
    assert lines["T 8192 H 4096 K 8 bfloat16"].endswith(" MiB")


def test_a_shape_beyond_all_arenas():
    assert "must be below 2**31" in report("--tokens", "2000000000")["T 2000000000 H 4096 K 8 bfloat16"]


def test_sizes_out_of_range(capsys):
    with pytest.raises(SystemExit):
        report("--tokens", "0")
    assert "argument --tokens: must be an integer of at least 1, got 0" in capsys.readouterr().err


@pytest.mark.parametrize("way", distributed.WAYS)
def test_a_way_that_is_refused(monkeypatch, way):
    monkeypatch.setattr(jax, "local_devices", lambda backend: [])
    monkeypatch.setattr(distributed, "probe", lambda: {way: "no such thing", "other": None})
    lines = dict(__main__._peers())
    assert lines[f"peers by {way}"] == "no: no such thing" and lines["peers by other"] == "yes"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        pytest.param(None, "not set, so 20 s", id="unset"),
        pytest.param("3", "3, so 3 s", id="set"),
        pytest.param("soon", "MOK_TIMEOUT must be a number of seconds > 0, got 'soon'; unset it for 20", id="wrong"),
    ],
)
def test_timeout_in_force(monkeypatch, value, text):
    monkeypatch.delenv(TIMEOUT_VARIABLE, raising=False)
    if value is not None:
        monkeypatch.setenv(TIMEOUT_VARIABLE, value)
    assert report()[TIMEOUT_VARIABLE] == text


def test_a_package_that_is_missing(monkeypatch):
    monkeypatch.setattr(__main__, "PACKAGES", ("no_such_package",))
    assert report()["no_such_package"] == "not installed"

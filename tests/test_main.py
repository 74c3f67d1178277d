"""`python -m mok_jax`: the report names versions, devices, every implementation and the variables."""

import os
import subprocess
import sys

import jax
import pytest

from mok_jax import __main__, ops
from mok_jax.config import TIMEOUT_VARIABLE
from mok_jax.moe import IMPLEMENTATIONS


def report():
    return dict(__main__.lines())


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
    def refuse(name):
        return "it needs CPU devices, these are gpu" if name == "host" else None

    monkeypatch.setattr(__main__, "why_not", refuse)
    lines = report()
    assert lines['"host"'] == "no: it needs CPU devices, these are gpu"
    assert lines['"xla"'] == "yes"


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

"""What the documentation shows runs: the README's Python blocks, its links, and the docstrings' examples."""

import doctest
import importlib
import os
import pathlib
import pkgutil
import re
import subprocess
import sys

import pytest

import mok_jax

README = pathlib.Path(__file__).parents[1] / "README.md"


def test_readme_blocks_run_in_order():
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    assert len(blocks) >= 3
    namespace = {}
    for number, block in enumerate(blocks):
        exec(compile(block, f"README.md block {number}", "exec"), namespace)


def test_readme_commands_are_the_promised_ones():
    commands = re.findall(r"```bash\n(.*?)```", README.read_text(), re.DOTALL)
    assert commands[:2] == [
        "python -m pip install '.[examples]' && python examples/train_lm.py\n",
        "python -m pip install '.[test]' && python -m pytest\n",
    ]


def test_readme_links_lead_to_files():
    links = re.findall(r"\]\((?!http)([^)#]+)\)", README.read_text())
    if not (README.parent / "ffi").is_dir():  # an installed wheel is tested without the sources
        links = [link for link in links if not link.startswith(("ffi/", "mok_jax/", "benchmarks/"))]
    assert [link for link in links if not (README.parent / link).exists()] == []


@pytest.mark.parametrize(
    ("required", "code", "text"),
    [("", 0, "1 skipped"), ("1", 4, "MOK_REQUIRE_GPU: there is no CUDA device to test on: ")],
    ids=["left_out", "required"],
)
def test_gpu_tests_that_a_command_names_need_a_gpu(required, code, text):
    """As CONTRIBUTING.md names them, where there is none, or JAX is not to use it."""
    name = pathlib.Path(__file__).with_name("test_cuda.py")
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-n",
        "0",
        "-p",
        "no:benchmark",
        str(name),
        "-k",
        "test_offsets_beyond_32_bits",
    ]
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "MOK_REQUIRE_GPU": required}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    output = result.stdout + result.stderr
    assert result.returncode == code and text in output, output


MODULES = sorted(m.name for m in pkgutil.iter_modules(mok_jax.__path__) if not m.name.startswith("_"))


@pytest.mark.parametrize("name", MODULES)
def test_docstring_examples(name):
    result = doctest.testmod(importlib.import_module(f"mok_jax.{name}"))
    assert result.failed == 0


@pytest.mark.parametrize("name", ["moe", "routing", "nnx", "linen"])
def test_public_modules_have_examples(name):
    assert doctest.testmod(importlib.import_module(f"mok_jax.{name}")).attempted > 0

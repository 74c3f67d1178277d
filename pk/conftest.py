"""What every test assumes: eight CPU devices, float64 allowed, and a hang is a failure.

Where there is a CUDA device, the tests of implementation "cuda" run too, on it; everything else stays on
the CPU devices, which are JAX's default. MOK_REQUIRE_GPU=1 makes a missing device an error.
"""

import contextlib
import ctypes
import faulthandler
import importlib.machinery
import importlib.util
import os

# Before the first import of jax, and for the child processes of tests too.
_DEVICES = "--xla_force_host_platform_device_count"
if _DEVICES not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_DEVICES}=8".strip()


def _why_no_gpu():
    """Without JAX, which must not start before its variables are set."""
    package = importlib.util.find_spec("mok_jax")
    if package and not importlib.machinery.PathFinder.find_spec("_cuda", package.submodule_search_locations):
        return "mok_jax was built without CUDA"
    if not any(importlib.util.find_spec(f"jax_cuda{version}_plugin") for version in (12, 13)):
        return "JAX has no CUDA plugin; install mok_jax[cuda13]"
    count = ctypes.c_int()
    try:
        driver = ctypes.CDLL("libcuda.so.1")
        found = driver.cuInit(0) == 0 and driver.cuDeviceGetCount(ctypes.byref(count)) == 0 and count.value > 0
    except OSError:
        found = False
    return None if found else "the CUDA driver sees no device"


_NO_GPU = _why_no_gpu()
os.environ.setdefault("JAX_PLATFORMS", "cpu" if _NO_GPU else "cpu,cuda")
# Sixteen test processes share the device.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
os.environ["JAX_ENABLE_X64"] = "1"

import pytest  # noqa: E402

pytest.register_assert_rewrite("cases")

import cases  # noqa: E402

SECONDS_A_TEST = 120

_WITHOUT = None if cases.GPU else _NO_GPU or f"JAX_PLATFORMS is {os.environ['JAX_PLATFORMS']}"
collect_ignore_glob = ["test_cuda*.py"] if _WITHOUT else []  # but for files that are named

_real_stderr = pytest.StashKey[int]()


def pytest_configure(config):
    # Capture is off here: the copy stays the terminal while a test's own output is captured.
    config.stash[_real_stderr] = os.dup(2)
    if (os.environ.get("MOK_REQUIRE_GPU") or "0") != "0" and (_NO_GPU or _WITHOUT):
        raise pytest.UsageError(f"MOK_REQUIRE_GPU: there is no CUDA device to test on: {_NO_GPU or _WITHOUT}")


def pytest_collection_modifyitems(config, items):
    """ "cuda" has no float64."""
    lacking = [
        item for item in items if _parameters(item).items() >= {"implementation": "cuda", "dtype": "f64"}.items()
    ]
    config.hook.pytest_deselected(items=lacking)
    items[:] = [item for item in items if item not in lacking]
    for item in items:
        if _WITHOUT and item.path.name.startswith("test_cuda"):
            item.add_marker(pytest.mark.skip(f"no CUDA device to test on: {_WITHOUT}"))


def _parameters(item):
    callspec = getattr(item, "callspec", None)
    return {} if callspec is None else {k: v for k, v in callspec.params.items() if isinstance(v, str)}


@pytest.fixture(autouse=True)
def _on_its_device(request):
    """What makes its own arrays in a test of "cuda" makes them on the GPU."""
    on_gpu = request.path.name.startswith("test_cuda") or _parameters(request.node).get("implementation") == "cuda"
    with cases.on_device("cuda") if on_gpu else contextlib.nullcontext():
        yield


@pytest.fixture(autouse=True)
def _a_hang_is_a_failure(request):
    """Ends the process with every thread's stack: a hung XLA thread cannot be interrupted from Python."""
    faulthandler.dump_traceback_later(SECONDS_A_TEST, exit=True, file=request.config.stash[_real_stderr])
    yield
    faulthandler.cancel_dump_traceback_later()

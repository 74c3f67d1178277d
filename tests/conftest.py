"""What every test assumes: eight CPU devices, float64 allowed, and a hang is a failure."""

import faulthandler
import os

# Before the first import of jax, and for the child processes of tests too.
_DEVICES = "--xla_force_host_platform_device_count"
if _DEVICES not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_DEVICES}=8".strip()
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["JAX_ENABLE_X64"] = "1"

import pytest  # noqa: E402

pytest.register_assert_rewrite("cases")

SECONDS_A_TEST = 120

_real_stderr = pytest.StashKey[int]()


def pytest_configure(config):
    # Capture is off here: the copy stays the terminal while a test's own output is captured.
    config.stash[_real_stderr] = os.dup(2)


@pytest.fixture(autouse=True)
def _a_hang_is_a_failure(request):
    """Ends the process with every thread's stack: a hung XLA thread cannot be interrupted from Python."""
    faulthandler.dump_traceback_later(SECONDS_A_TEST, exit=True, file=request.config.stash[_real_stderr])
    yield
    faulthandler.cancel_dump_traceback_later()

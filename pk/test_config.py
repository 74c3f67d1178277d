"""MoKConfig: every field's limits, with the full text of the refusal."""

import dataclasses
import pickle

import numpy as np
import pytest
from cases import refuse

from mok_jax import MoKConfig

NUMBER = "a finite number >= 0 or None"
SECONDS = "a finite number of seconds > 0 or None"
COUNT = "an integer in [1, 2**31) or None"
SEED = "an integer in [0, 2**31) or None"

REFUSED = [
    ("swiglu_limit", -0.5, ValueError, f"swiglu_limit must be {NUMBER}, got -0.5"),
    ("swiglu_limit", float("nan"), ValueError, f"swiglu_limit must be {NUMBER}, got nan"),
    ("swiglu_limit", float("inf"), ValueError, f"swiglu_limit must be {NUMBER}, got inf"),
    ("swiglu_limit", "7", TypeError, f"swiglu_limit must be {NUMBER}, got '7'"),
    ("swiglu_limit", True, TypeError, f"swiglu_limit must be {NUMBER}, got True"),
    ("timeout", 0, ValueError, f"timeout must be {SECONDS}, got 0"),
    ("timeout", float("inf"), ValueError, f"timeout must be {SECONDS}, got inf"),
    ("timeout", "20", TypeError, f"timeout must be {SECONDS}, got '20'"),
    ("precision", "fp8", ValueError, "precision must be \"mxfp8\" or None, got 'fp8'"),
    ("precision", 8, TypeError, 'precision must be "mxfp8" or None, got 8'),
    ("barrier_timeout", -1, ValueError, f"barrier_timeout must be {SECONDS}, got -1"),
    ("collective_stream", 1, TypeError, "collective_stream must be True or False, got 1"),
    ("row_tile", 0, ValueError, f"row_tile must be {COUNT}, got 0"),
    ("row_tile", 12, ValueError, "row_tile must be a multiple of 8, got 12"),
    ("row_tile", 8.0, TypeError, f"row_tile must be {COUNT}, got 8.0"),
    ("minibatch", -128, ValueError, f"minibatch must be {COUNT}, got -128"),
    ("minibatch", 128.0, TypeError, f"minibatch must be {COUNT}, got 128.0"),
    ("macrobatch", 0, ValueError, f"macrobatch must be {COUNT}, got 0"),
    ("macrobatch", True, TypeError, f"macrobatch must be {COUNT}, got True"),
    ("num_threads", 0, ValueError, f"num_threads must be {COUNT}, got 0"),
    ("num_threads", "2", TypeError, f"num_threads must be {COUNT}, got '2'"),
    ("virtual_ranks", 0, ValueError, "virtual_ranks must be an integer >= 1, got 0"),
    ("virtual_ranks", None, TypeError, "virtual_ranks must be an integer >= 1, got None"),
    ("virtual_ranks", 2.0, TypeError, "virtual_ranks must be an integer >= 1, got 2.0"),
    ("random_order", -1, ValueError, f"random_order must be {SEED}, got -1"),
    ("random_order", 2**31, ValueError, f"random_order must be {SEED}, got 2147483648"),
    ("random_order", 0.5, TypeError, f"random_order must be {SEED}, got 0.5"),
    ("save_context", 1, TypeError, "save_context must be True or False, got 1"),
    ("save_context", None, TypeError, "save_context must be True or False, got None"),
]


@pytest.mark.parametrize(("field", "value", "error", "text"), REFUSED, ids=[f"{r[0]}={r[1]!r}" for r in REFUSED])
def test_refused(field, value, error, text):
    refuse(error, f"MoKConfig: {text}", MoKConfig, **{field: value})


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        (
            dict(row_tile=16, minibatch=24),
            "minibatch must be a multiple of row_tile, got minibatch=24 and row_tile=16; use minibatch=32",
        ),
        (
            dict(row_tile=128, minibatch=256, macrobatch=600),
            "macrobatch must be a multiple of row_tile, got macrobatch=600 and row_tile=128; use macrobatch=640",
        ),
    ],
    ids=["minibatch", "macrobatch"],
)
def test_sizes_that_do_not_divide(fields, text):
    refuse(ValueError, f"MoKConfig: {text}", MoKConfig, **fields)


def test_integers_of_numpy_do_not_overflow():
    config = MoKConfig(virtual_ranks=np.int8(2), minibatch=np.int16(1024), macrobatch=np.uint16(2048))
    assert [type(value) for value in (config.virtual_ranks, config.minibatch, config.macrobatch)] == [int] * 3


@pytest.mark.parametrize("name", ["swiglu_limit", "timeout", "barrier_timeout"])
def test_an_integer_that_no_float_holds(name):
    with pytest.raises(ValueError, match=f"MoKConfig: {name} must be a finite number"):
        MoKConfig(**{name: 10**400})


@pytest.mark.parametrize(
    "fields",
    [
        dict(),
        dict(swiglu_limit=0),
        dict(swiglu_limit=7.0, row_tile=8, minibatch=8, macrobatch=8),
        dict(macrobatch=4096),
        dict(virtual_ranks=4, num_threads=1, timeout=1, random_order=0, save_context=False),
    ],
    ids=["defaults", "limit_zero", "smallest", "macrobatch_alone", "every_other_field"],
)
def test_accepted(fields):
    config = MoKConfig(**fields)
    assert {name: getattr(config, name) for name in fields} == fields
    # It is a static argument of jit and an attribute of modules.
    assert hash(config) == hash(MoKConfig(**fields))
    assert pickle.loads(pickle.dumps(config)) == config


def test_it_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        MoKConfig().minibatch = 8


def test_replace_checks_again():
    with pytest.raises(ValueError, match="row_tile must be a multiple of 8"):
        dataclasses.replace(MoKConfig(), row_tile=9)


@pytest.mark.parametrize(
    ("field", "variable", "seconds"),
    [(None, None, 20.0), (None, "", 20.0), (None, "2.5", 2.5), (3, "2.5", 3.0)],
    ids=["default", "empty", "variable", "field_wins"],
)
def test_timeout_in_force(monkeypatch, field, variable, seconds):
    monkeypatch.delenv("MOK_TIMEOUT", raising=False)
    if variable is not None:
        monkeypatch.setenv("MOK_TIMEOUT", variable)
    assert MoKConfig(timeout=field).timeout_seconds() == seconds


@pytest.mark.parametrize("text", ["soon", "0", "-1", "nan", "inf", " "])
def test_a_bad_timeout_variable_is_refused(monkeypatch, text):
    monkeypatch.setenv("MOK_TIMEOUT", text)
    text = f"MOK_TIMEOUT must be a number of seconds > 0, got {text!r}; unset it for 20"
    refuse(ValueError, text, MoKConfig().timeout_seconds)

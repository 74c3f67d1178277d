"""mok_jax: a mixture-of-experts layer for training in JAX, on CPU and GPU through the same code path."""

import importlib
import pkgutil
from typing import Any

# From the source tree, the extension modules are those of the installed package.
__path__ = pkgutil.extend_path(__path__, __name__)

from mok_jax import distributed
from mok_jax.config import MoKConfig
from mok_jax.moe import choose_implementation, moe, save_moe_residuals, why_not
from mok_jax.mxfp8 import Mxfp8, Mxfp8Weight, quantize_mxfp8, quantize_weight
from mok_jax.routing import Routing, route

__all__ = [
    "MoKConfig",
    "MoKMoE",
    "Mxfp8",
    "Mxfp8Weight",
    "Routing",
    "choose_implementation",
    "distributed",
    "moe",
    "quantize_mxfp8",
    "quantize_weight",
    "route",
    "save_moe_residuals",
    "why_not",
]

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name not in ("MoKMoE", "nnx", "linen"):
        raise AttributeError(f"module 'mok_jax' has no attribute {name!r}")
    module = "linen" if name == "linen" else "nnx"
    try:
        found = importlib.import_module(f"mok_jax.{module}")
    except ModuleNotFoundError as error:
        if error.name != "flax":
            raise
        raise ImportError(f"mok_jax.{name} needs flax; run python -m pip install 'mok_jax[flax]'") from error
    return found.MoKMoE if name == "MoKMoE" else found


def __dir__() -> list[str]:
    return sorted([*globals(), "MoKMoE", "linen", "nnx"])

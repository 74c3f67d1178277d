"""mok_jax: a mixture-of-experts layer for training in JAX."""

from mok_jax.config import MoKConfig
from mok_jax.moe import choose_implementation, moe, save_moe_residuals

__all__ = ["MoKConfig", "choose_implementation", "moe", "save_moe_residuals"]

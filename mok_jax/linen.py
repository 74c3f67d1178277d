"""The layer as a flax.linen module: it declares the parameters and calls modules.apply."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from mok_jax.config import MoKConfig
from mok_jax.modules import Initializer, Options, apply, lecun_normal, per_expert
from mok_jax.placement import AnyMesh


class MoKMoE(nn.Module):
    """As `mok_jax.MoKMoE` for linen, with the same options, parameters and names; hidden is x's.

    The experts' parameters are annotated by `nn.with_partitioning`. The selection bias is in the
    collection "selection_bias". Sows `load_balance_loss`, `router_z_loss` and `tokens_per_expert` into
    "intermediates": pass `mutable=["intermediates"]` to get them.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> import mok_jax.linen
      >>> layer = mok_jax.linen.MoKMoE(intermediate=32, num_experts=4, top_k=2)
      >>> variables = layer.init(jax.random.key(0), jnp.ones((2, 3, 16)))
      >>> y, sown = layer.apply(variables, jnp.ones((2, 3, 16)), mutable=["intermediates"])
      >>> y.shape, int(sown["intermediates"]["tokens_per_expert"][0].sum())
      ((2, 3, 16), 12)
    """

    intermediate: int
    num_experts: int
    top_k: int
    shared_intermediate: int | None = None
    scores: str = "softmax"
    renormalize: bool = True
    scaling: float = 1.0
    use_selection_bias: bool = False
    dtype: Any = None
    param_dtype: Any = jnp.float32
    kernel_init: Initializer = lecun_normal
    router_init: Initializer = lecun_normal
    config: MoKConfig = MoKConfig()
    implementation: str | None = None
    mesh: AnyMesh | None = None
    expert_axis: str = "expert"
    token_axes: tuple[str, ...] | None = None

    @nn.compact
    def __call__(self, x: jax.Array, token_mask: jax.Array | None = None) -> jax.Array:
        """y, [..., hidden]; see `mok_jax.MoKMoE`."""
        options = Options(
            x.shape[-1],
            self.intermediate,
            self.num_experts,
            self.top_k,
            self.shared_intermediate,
            self.scores,
            self.renormalize,
            self.scaling,
            self.dtype,
            self.param_dtype,
            self.config,
            self.implementation,
            self.mesh,
            self.expert_axis,
            self.token_axes,
        )
        hidden, experts = options.hidden, options.num_experts
        parameters = {"router": self.param("router", self.router_init, (hidden, experts), options.router_dtype)}
        for name, shape in options.shapes().items():
            init = per_expert(self.kernel_init)
            if len(shape) == 3 and options.axis is not None:
                init = nn.with_partitioning(init, (options.axis, None, None), mesh=self.mesh)
            parameters[name] = self.param(name, init, shape, self.param_dtype)
        if self.use_selection_bias:
            zeros = lambda: jnp.zeros(experts, options.router_dtype)  # noqa: E731
            parameters["selection_bias"] = self.variable("selection_bias", "bias", zeros).value
        y, routing = apply(options, parameters, x, token_mask)
        if not self.is_initializing():
            self.sow("intermediates", "load_balance_loss", routing.load_balance_loss)
            self.sow("intermediates", "router_z_loss", routing.router_z_loss)
            self.sow("intermediates", "tokens_per_expert", routing.tokens_per_expert)
        return y

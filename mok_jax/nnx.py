"""The layer as a flax.nnx module: it owns the parameters and calls modules.apply."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from mok_jax.config import MoKConfig
from mok_jax.modules import Initializer, Options, apply, lecun_normal, per_expert
from mok_jax.placement import AnyMesh


class SelectionBias(nnx.Variable):
    """Added to the router's scores for choosing experts; no gradient, updated by the trainer."""


class MoKMoE(nnx.Module):
    """Mixture-of-experts feed-forward with its router: y = layer(x) for x [..., hidden].

    Parameters: `router` [hidden, experts], float32 or wider whatever `param_dtype`; `w_gate`, `w_up`
    [experts, hidden, intermediate], `w_down` [experts, intermediate, hidden]; with a shared expert
    `shared_gate`, `shared_up` [hidden, shared_intermediate], `shared_down`; with `use_selection_bias` a
    `SelectionBias` [experts] of zeros. The experts' are annotated, and under a mesh created, sharded
    over `expert_axis`, where the mesh has it.

    Sows, as nnx.Intermediate for `nnx.capture`, `load_balance_loss`, `router_z_loss` and
    `tokens_per_expert` (see `Routing`), all global over the mesh; the trainer weighs and adds the losses.

    Example:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> import mok_jax
      >>> layer = mok_jax.MoKMoE(16, 32, num_experts=4, top_k=2, rngs=nnx.Rngs(0))
      >>> layer(jnp.ones((2, 3, 16))).shape
      (2, 3, 16)
      >>> y, sown = nnx.capture(layer, nnx.Intermediate)(jnp.ones((2, 3, 16)))
      >>> int(sown["tokens_per_expert"][0].sum())
      12

    Args:
      hidden: width of x.
      intermediate: width of each expert.
      num_experts: divisible by the size of the mesh's expert axis.
      top_k: experts of each token.
      shared_intermediate: width of the shared expert, None for none.
      scores, renormalize, scaling: see `route`.
      use_selection_bias: add a `SelectionBias`.
      dtype: of the computation and of y; None: x's.
      param_dtype: of the parameters; float32 parameters under bfloat16 get float32 gradients.
      kernel_init: initialiser of one expert's matrix [in, out].
      router_init: initialiser of the router.
      config, implementation, mesh, expert_axis, token_axes: see `moe`.
      rngs: its "params" stream.

    Raises:
      TypeError, ValueError: a size or name out of range, or experts that the mesh does not divide.
    """

    def __init__(
        self,
        hidden: int,
        intermediate: int,
        num_experts: int,
        top_k: int,
        *,
        shared_intermediate: int | None = None,
        scores: str = "softmax",
        renormalize: bool = True,
        scaling: float = 1.0,
        use_selection_bias: bool = False,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        kernel_init: Initializer = lecun_normal,
        router_init: Initializer = lecun_normal,
        config: MoKConfig = MoKConfig(),
        implementation: str | None = None,
        mesh: AnyMesh | None = None,
        expert_axis: str = "expert",
        token_axes: tuple[str, ...] | None = None,
        rngs: nnx.Rngs,
    ):
        self.options = options = Options(
            hidden,
            intermediate,
            num_experts,
            top_k,
            shared_intermediate,
            scores,
            renormalize,
            scaling,
            dtype,
            param_dtype,
            config,
            implementation,
            mesh,
            expert_axis,
            token_axes,
        )
        annotation: dict[str, Any] = {}
        if options.axis is not None:
            annotation = {"out_sharding": (options.axis, None, None)}
            if options.context_mesh.empty:
                annotation["eager_sharding"] = False  # nothing to shard over yet
            elif mesh is not None:
                annotation["mesh"] = mesh
        self.router = nnx.Param(router_init(rngs.params(), (hidden, num_experts), options.router_dtype))
        for name, shape in options.shapes().items():
            value = per_expert(kernel_init)(rngs.params(), shape, param_dtype)
            setattr(self, name, nnx.Param(value, **(annotation if len(shape) == 3 else {})))
        self.selection_bias = (
            SelectionBias(jnp.zeros(num_experts, options.router_dtype)) if use_selection_bias else None
        )

    def __call__(self, x: jax.Array, token_mask: jax.Array | None = None) -> jax.Array:
        """y, [..., hidden].

        Args:
          x: floating point [..., hidden].
          token_mask: bool [...]; a token with False has y 0 and no share in losses, counts and gradients.
        """
        parameters = {name: getattr(self, name)[...] for name in ("router", *self.options.shapes())}
        if self.selection_bias is not None:
            parameters["selection_bias"] = self.selection_bias[...]
        y, routing = apply(self.options, parameters, x, token_mask)
        if hasattr(self, "__captures__"):  # inside nnx.capture; elsewhere sow is deprecated
            self.sow(nnx.Intermediate, "load_balance_loss", routing.load_balance_loss)
            self.sow(nnx.Intermediate, "router_z_loss", routing.router_z_loss)
            self.sow(nnx.Intermediate, "tokens_per_expert", routing.tokens_per_expert)
        return y

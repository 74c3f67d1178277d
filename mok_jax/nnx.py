"""The layer as a flax.nnx module: it owns the parameters, routes, and calls moe()."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.nn.initializers import Initializer
from jax.sharding import AbstractMesh, AxisType, Mesh

from mok_jax.config import MoKConfig
from mok_jax.modules import LECUN_NORMAL, LayerOptions, LayerWeights, Parameter, apply_layer


class SelectionBias(nnx.Variable):
    """float32 [experts], added to the scores for the choice of experts; set by the trainer, not by gradients."""


class MoKMoE(nnx.Module):
    """Mixture-of-experts feed-forward layer: y = sum_k w_k FFN_{e_k}(x) + FFN_shared(x), with a router.

    Each expert is FFN(x) = (silu(x Wg) * (x Wu)) Wd; see `mok_jax.moe` and `mok_jax.routing.route`.

    Parameters (`nnx.Param`): router [hidden, num_experts], float32 (float64 with a float64
    param_dtype) whatever the other dtypes are; w_gate, w_up [num_experts, hidden, intermediate];
    w_down [num_experts, intermediate, hidden]; shared_gate, shared_up [hidden, shared_intermediate];
    shared_down [shared_intermediate, hidden]. A `SelectionBias`: selection_bias [num_experts].
    Where a mesh with the expert axis is given or ambient, the experts' weights are made sharded over it
    and say so in their `out_sharding`.

    A trainer reads what a call records with `nnx.capture(model, nnx.Intermediate)`: load_balance_loss,
    router_z_loss (scalars, over all tokens of the mesh) and tokens_per_expert (int32 [num_experts]),
    one of each for each call. Without a capture nothing is recorded.

    Args:
      hidden: width of x.
      intermediate: width of one expert.
      num_experts: experts in all, divisible by the mesh's expert axis.
      top_k: experts of a token, 1 to num_experts.
      shared_intermediate: width of the shared expert; None for no such expert.
      scores: "softmax" or "sigmoid".
      renormalize: divide a token's weights by their sum. With top_k 1 the router then learns from the
        auxiliary losses only.
      scaling: factor on every weight, after renormalising.
      use_selection_bias: have a `SelectionBias`, zero at first.
      dtype: compute dtype and y's: float32, float64, bfloat16, or None for x's. Gradients of float32
        parameters are not rounded to it.
      param_dtype: likewise, of every parameter but the router.
      kernel_init: initializer of one matrix [in, out]; each expert's has a key of its own.
      router_init: the router's.
      config: see `MoKConfig`.
      implementation: as in `moe`.
      mesh: as in `moe`; None for the ambient one of each call.
      expert_axis: the mesh axis over which the experts are split.
      token_axes: as in `moe`.
      rngs: a key "params" is drawn for each parameter.

    Raises:
      TypeError: an option or argument of a wrong type or dtype.
      ValueError: an option out of range, or num_experts not divisible by the mesh's expert axis.

    Example:
      >>> import jax.numpy as jnp, mok_jax
      >>> from flax import nnx
      >>> layer = mok_jax.MoKMoE(16, 32, num_experts=4, top_k=2, rngs=nnx.Rngs(0))
      >>> x = jnp.ones((3, 5, 16), jnp.float32)
      >>> layer(x).shape
      (3, 5, 16)
      >>> y, recorded = nnx.capture(layer, nnx.Intermediate)(x)
      >>> int(recorded["tokens_per_expert"][0].sum())
      30
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
        kernel_init: Initializer = LECUN_NORMAL,
        router_init: Initializer = LECUN_NORMAL,
        config: MoKConfig = MoKConfig(),
        implementation: str | None = None,
        mesh: Mesh | AbstractMesh | None = None,
        expert_axis: str = "expert",
        token_axes: tuple[str, ...] | None = None,
        rngs: nnx.Rngs,
    ):
        self.options = options = LayerOptions(
            hidden=hidden,
            intermediate=intermediate,
            num_experts=num_experts,
            top_k=top_k,
            shared_intermediate=shared_intermediate,
            scores=scores,
            renormalize=renormalize,
            scaling=scaling,
            use_selection_bias=use_selection_bias,
            dtype=dtype,
            param_dtype=param_dtype,
            config=config,
            implementation=implementation,
            mesh=mesh,
            expert_axis=expert_axis,
            token_axes=token_axes,
        )
        table = options.parameters(hidden)

        def make(name: str, initializer: Initializer = kernel_init) -> Any:
            if name not in table:
                return None
            return nnx.Param(table[name].initial(initializer, rngs.params()), **_sharding(options, table[name]))

        self.router = make("router", router_init)
        self.w_gate = make("w_gate")
        self.w_up = make("w_up")
        self.w_down = make("w_down")
        self.shared_gate = make("shared_gate")
        self.shared_up = make("shared_up")
        self.shared_down = make("shared_down")
        self.selection_bias = SelectionBias(jnp.zeros(num_experts, self.router.dtype)) if use_selection_bias else None

    def __call__(self, x: jax.Array, token_mask: jax.Array | None = None) -> jax.Array:
        """y, of x's shape and sharding.

        Args:
          x: float32, float64 or bfloat16 [..., hidden].
          token_mask: None, or bool [...]. A False token has no expert, not even the shared one: its y is
            exactly 0, its x gets and gives no gradient, and it has no share in losses and counts.
        """
        shared = None
        if self.shared_gate is not None:
            shared = (self.shared_gate[...], self.shared_up[...], self.shared_down[...])
        weights = LayerWeights(
            self.router[...],
            (self.w_gate[...], self.w_up[...], self.w_down[...]),
            shared,
            None if self.selection_bias is None else self.selection_bias[...],
        )
        y, routing = apply_layer(self.options, weights, x, token_mask)
        # Only within nnx.capture, where this attribute is: elsewhere flax 0.12 would write to the module.
        if hasattr(self, "__captures__"):
            self.sow(nnx.Intermediate, "load_balance_loss", routing.load_balance_loss)
            self.sow(nnx.Intermediate, "router_z_loss", routing.router_z_loss)
            self.sow(nnx.Intermediate, "tokens_per_expert", routing.tokens_per_expert)
        return y


def _sharding(options: LayerOptions, parameter: Parameter) -> dict[str, Any]:
    """Metadata of an expert weight, with which flax shards it here where it can."""
    if not (parameter.experts and options.shards_experts):
        return {}
    mesh, ambient = options.known_mesh, jax.sharding.get_abstract_mesh()
    metadata: dict[str, Any] = {"out_sharding": (options.expert_axis, None, None)}
    if mesh.shape_tuple != ambient.shape_tuple:
        metadata["mesh"] = mesh
    concrete = isinstance(mesh, Mesh) or not ambient.empty
    kinds = set(mesh.axis_types)
    if not concrete or kinds not in ({AxisType.Auto}, {AxisType.Explicit}):
        metadata["eager_sharding"] = False  # flax shards over a real mesh of one kind of axes only
    return metadata

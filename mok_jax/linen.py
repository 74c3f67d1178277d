"""The layer as a flax.linen module: it owns the parameters, routes, and calls moe()."""

import dataclasses
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.nn.initializers import Initializer
from jax.sharding import AbstractMesh, Mesh

from mok_jax.config import MoKConfig
from mok_jax.modules import LECUN_NORMAL, LayerOptions, LayerWeights, Parameter, apply_layer


class MoKMoE(nn.Module, kw_only=True):
    """`mok_jax.MoKMoE` for linen: the same options, by keyword, and the same parameters, in "params".

    hidden None takes x's width. Where a mesh with the expert axis is given or ambient, the experts'
    weights are made with `nn.with_partitioning`. The selection bias is in a collection of its own,
    "router_state", which the trainer updates.

    A trainer makes "losses" mutable for load_balance_loss and router_z_loss, and "intermediates" for
    tokens_per_expert; each is a tuple with one entry for each call, [layers] long under `nn.scan` with
    `variable_axes={"losses": 0}`. Pass neither back in: a call would add to what is there.

    Raises:
      TypeError: an option or argument of a wrong type or dtype.
      ValueError: an option out of range, or num_experts not divisible by the mesh's expert axis.

    Example:
      >>> import jax, jax.numpy as jnp, mok_jax.linen
      >>> layer = mok_jax.linen.MoKMoE(intermediate=32, num_experts=4, top_k=2)
      >>> x = jnp.ones((3, 5, 16), jnp.float32)
      >>> variables = layer.init(jax.random.key(0), x)
      >>> y, recorded = layer.apply(variables, x, mutable=["losses", "intermediates"])
      >>> y.shape, int(recorded["intermediates"]["tokens_per_expert"][0].sum())
      ((3, 5, 16), 30)
    """

    hidden: int | None = None
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
    kernel_init: Initializer = LECUN_NORMAL
    router_init: Initializer = LECUN_NORMAL
    config: MoKConfig = MoKConfig()
    implementation: str | None = None
    mesh: Mesh | AbstractMesh | None = None
    expert_axis: str = "expert"
    token_axes: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        _options_of(self)  # refuses here what is wrong

    @nn.compact
    def __call__(self, x: jax.Array, token_mask: jax.Array | None = None) -> jax.Array:
        """y, of x's shape and sharding; see `mok_jax.MoKMoE`.

        Args:
          x: float32, float64 or bfloat16 [..., hidden].
          token_mask: None, or bool [...]; False takes a token out.
        """
        options = _options_of(self)
        hidden = self.hidden or jnp.shape(x)[-1]
        values = {name: self._parameter(options, name, p) for name, p in options.parameters(hidden).items()}
        shared = None
        if self.shared_intermediate is not None:
            shared = (values["shared_gate"], values["shared_up"], values["shared_down"])
        bias = None
        if self.use_selection_bias:
            dtype = values["router"].dtype
            bias = self.variable("router_state", "selection_bias", jnp.zeros, self.num_experts, dtype).value
        weights = LayerWeights(values["router"], (values["w_gate"], values["w_up"], values["w_down"]), shared, bias)
        y, routing = apply_layer(options, weights, x, token_mask)
        if not self.is_initializing():  # else init's result would hold them, and the next call add to them
            self.sow("losses", "load_balance_loss", routing.load_balance_loss)
            self.sow("losses", "router_z_loss", routing.router_z_loss)
            self.sow("intermediates", "tokens_per_expert", routing.tokens_per_expert)
        return y

    def _parameter(self, options: LayerOptions, name: str, parameter: Parameter) -> jax.Array:
        def initial(key):
            return parameter.initial(self.router_init if name == "router" else self.kernel_init, key)

        if parameter.experts and options.shards_experts:
            mesh = self.mesh if isinstance(self.mesh, Mesh) else None
            initial = nn.with_partitioning(initial, (self.expert_axis, None, None), mesh=mesh)
        value = self.param(name, initial, unbox=False)
        # Without the box's constraint, which Explicit axes would refuse: moe() shards what it reads.
        return value.unbox(apply_constraint=False) if isinstance(value, nn.Partitioned) else value


def _options_of(module: MoKMoE) -> LayerOptions:
    """No method: flax records calls of those, and `tabulate` fails where one comes before the scope is known."""
    return LayerOptions(**{field.name: getattr(module, field.name) for field in dataclasses.fields(LayerOptions)})

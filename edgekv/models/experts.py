"""Llama whose MLPs are mixtures of experts, as their checkpoints name them."""

from __future__ import annotations

from typing import Any

from edgekv.models.architecture import Linear, Ops
from edgekv.models.config import Experts
from edgekv.models.llama import Llama, LlamaConfigSchema


class MixtureConfigSchema(LlamaConfigSchema):
    """What mixtures of experts share; num_experts and num_local_experts are two names of one field."""

    num_experts_per_tok: Experts | None = None
    num_experts: Experts | None = None
    num_local_experts: Experts | None = None


class Mixture(Llama):
    """The experts of a layer are two projections, ``{i}.experts_up`` and ``{i}.experts_down``: the first has the
    rows of each expert's gate and up projections, expert after expert. ``{i}.router`` chooses among them.
    """

    mixture = "mlp"  # what a layer calls its mixture, then its router, its experts, and their projections
    router = "gate"
    expert_parts = ("gate_proj", "up_proj", "down_proj")

    def layer_linears(self, i: int) -> dict[str, Linear]:
        linears, c, experts = super().layer_linears(i), self.config, self.config.experts_of(i)
        if experts is None:
            return linears
        base = f"{self.prefix}layers.{i}.{self.mixture}."
        each = [f"{base}experts.{e}." for e in range(experts.count)]
        gate, up, down = self.expert_parts
        ups = [self._linear(name, (gate, up), (experts.size,) * 2, c.hidden_size, c.mlp_bias) for name in each]
        downs = [self._linear(name, (down,), (c.hidden_size,), experts.size, c.mlp_bias) for name in each]
        return {
            f"{i}.qkv": linears[f"{i}.qkv"],
            f"{i}.out": linears[f"{i}.out"],
            f"{i}.router": self._linear(base, (self.router,), (experts.count,), c.hidden_size, c.mlp_bias),
            f"{i}.experts_up": Linear.of_experts(ups),
            f"{i}.experts_down": Linear.of_experts(downs),
        }

    def attention_out(self, ops: Ops, i: int, x: Any, attention: Any) -> Any:
        if self.config.experts_of(i) is None:
            return super().attention_out(ops, i, x, attention)
        x = self._added(ops, i, "norm_attention", x, attention, "out")
        return ops.add_experts(x, self._normed(ops, i, "norm_mlp", x), i)

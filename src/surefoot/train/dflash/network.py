"""The DFlash backbone to be trained: the same sums as ``proposers/dflash/network.py``, in plain
torch with gradients, for many blocks of a batch at once; and DSpark's heads."""

from __future__ import annotations

import torch
from torch.nn.functional import embedding, linear, silu

from surefoot.kernels.reference import apply_rope
from surefoot.models.rope import rope_table
from surefoot.speculation.proposers.dflash.checkpoint import expected_shapes
from surefoot.speculation.proposers.dflash.config import DFlashConfig
from surefoot.train.corpus import Batch
from surefoot.train.dflash.attention import block_attention
from surefoot.train.parameters import Parameters
from surefoot.train.target import Target

BEFORE, AFTER = "markov_head.markov_w1", "markov_head.markov_w2"


class DFlashTraining(Parameters):
    """Full attention in both directions within a block. Embedding and head are the target's."""

    def __init__(
        self,
        config: DFlashConfig,
        max_positions: int,
        compute: torch.dtype,
        device: torch.device,
        seed: int = 0,
    ) -> None:
        super().__init__(expected_shapes(config), compute, config.layer.norm_eps, device, seed)
        self.config = config
        self.rope = rope_table(config.layer, max_positions, device)

    def blocks(
        self, batch: Batch, features: torch.Tensor, anchors: torch.Tensor, target: Target
    ) -> torch.Tensor:
        """What the head reads: [M, block, hidden], after the final norm. ``features`` [N, captured
        * target hidden]; ``anchors`` int64 [M], rising: the current tokens, none a document's
        first."""
        config, layer = self.config, self.config.layer
        context = self.norm(self.linear(features.to(self.compute), "fc"), "hidden_norm")
        rows = torch.full(
            (len(anchors), config.block_size), config.mask_token_id, device=anchors.device
        )
        rows[:, 0] = batch.ids[anchors]
        x = target.embed(rows.flatten()).to(self.compute).view(*rows.shape, -1)
        steps = torch.arange(config.block_size, device=anchors.device)
        positions = (batch.positions[anchors].unsqueeze(1) + steps).flatten()
        for index in range(layer.layers):
            x = self._layer(f"layers.{index}.", x, context, positions, anchors, batch)
        return self.norm(x, "norm")

    def _layer(
        self,
        prefix: str,
        x: torch.Tensor,
        context: torch.Tensor,
        positions: torch.Tensor,
        anchors: torch.Tensor,
        batch: Batch,
    ) -> torch.Tensor:
        layer, shape = self.config.layer, x.shape[:2]

        def heads(inputs: torch.Tensor, name: str, count: int, at: torch.Tensor) -> torch.Tensor:
            y = self.linear(inputs, f"{prefix}self_attn.{name}_proj")
            y = y.unflatten(-1, (count, layer.head_dim))
            if name == "v":
                return y
            y = self.norm(y, f"{prefix}self_attn.{name}_norm")
            return apply_rope(y, at, self.rope)

        inputs = self.norm(x, f"{prefix}input_layernorm").flatten(0, 1)
        q = heads(inputs, "q", layer.heads, positions).unflatten(0, shape)
        own = [
            heads(inputs, name, layer.kv_heads, positions).unflatten(0, shape)
            for name in ("k", "v")
        ]
        known = [heads(context, name, layer.kv_heads, batch.positions) for name in ("k", "v")]
        attended = block_attention(
            q, (known[0], known[1]), (own[0], own[1]), anchors, batch, layer.head_dim**-0.5
        )
        x = x + self.linear(attended.flatten(2), f"{prefix}self_attn.o_proj")
        inputs = self.norm(x, f"{prefix}post_attention_layernorm")
        gate, up = (self.linear(inputs, f"{prefix}mlp.{name}_proj") for name in ("gate", "up"))
        return x + self.linear(silu(gate) * up, f"{prefix}mlp.down_proj")

    def before(self, tokens: torch.Tensor) -> torch.Tensor | None:
        """The Markov head's rows of the tokens before, int64 [R] -> [R, rank]."""
        if self.config.markov is None:
            return None
        return embedding(tokens, self.weight(f"{BEFORE}.weight")).to(self.compute)

    def confidence(self, hidden: torch.Tensor, before: torch.Tensor | None) -> torch.Tensor:
        """Logits float32 [R] that a draft is accepted if those before it are."""
        inputs = hidden if before is None else torch.cat((hidden, before), dim=1)
        name, learns = "confidence_head.proj", torch.is_grad_enabled()
        weight = self.weight(f"{name}.weight")
        self.work.product(len(inputs), weight.numel(), learns, learns)
        return linear(inputs.float(), weight, self.weight(f"{name}.bias")).squeeze(1)

"""The EAGLE-3 network to be trained: the same sums as ``proposers/eagle3/drafter.py``, in plain
torch with gradients, for whole documents at once."""

from __future__ import annotations

import torch
from torch.nn.functional import silu

from surefoot.kernels.reference import apply_rope
from surefoot.models.rope import rope_table
from surefoot.speculation.proposers.eagle3.checkpoint import LAYER, expected_shapes
from surefoot.speculation.proposers.eagle3.config import Eagle3Config
from surefoot.train.attention import chain_attention
from surefoot.train.corpus import Batch
from surefoot.train.parameters import Parameters
from surefoot.train.target import Target

HEAD = "lm_head.weight"


class Eagle3Network(Parameters):
    """The embedding is the target's and is not trained."""

    def __init__(
        self,
        config: Eagle3Config,
        head: torch.Tensor,
        max_positions: int,
        compute: torch.dtype,
        train_head: bool = False,
        seed: int = 0,
    ) -> None:
        """``head`` float32 [draft vocabulary, hidden], on the device."""
        layer = config.layer
        super().__init__(expected_shapes(config), compute, layer.norm_eps, head.device, seed)
        self.config = config
        self.add(HEAD, head.clone(), train_head)
        self.rope = rope_table(layer, max_positions, head.device)

    @property
    def head(self) -> torch.Tensor:
        return self.weight(HEAD)

    def unroll(
        self, batch: Batch, features: torch.Tensor, target: Target, steps: int
    ) -> list[torch.Tensor]:
        """Row i of step k is what the head reads to predict token i + 2 + k of the batch, had the
        tokens i + 2 .. i + 1 + k been drafted from slot i on: ``steps`` times [N, hidden].
        ``features`` [N, captured * target hidden]. Rows whose token i + 1 + k is beyond their
        document are computed from another one, and nobody else sees them."""
        config, layer = self.config, self.config.layer
        last = batch.offsets[1:].long()[batch.documents] - 1
        index = torch.arange(len(batch), device=batch.ids.device)
        hidden = self._fuse(features.to(self.compute))
        keys, values, outputs = [], [], []
        for step in range(steps):
            tokens = batch.ids[torch.minimum(index + 1 + step, last)]
            embedded = target.embed(tokens).to(self.compute)
            normed = self.norm(hidden, f"{LAYER}hidden_norm")
            inputs = torch.cat((self.norm(embedded, f"{LAYER}input_layernorm"), normed), dim=1)
            q, key = (
                apply_rope(self._heads(inputs, name, count), batch.positions + step, self.rope)
                for name, count in (("q", layer.heads), ("k", layer.kv_heads))
            )
            keys.append(key)
            values.append(self._heads(inputs, "v", layer.kv_heads))
            attended = chain_attention(q, keys, values, batch, layer.head_dim**-0.5)
            stream = normed if config.norm_before_residual else hidden
            stream = stream + self.linear(attended.flatten(1), f"{LAYER}self_attn.o_proj")
            stream = stream + self._mlp(self.norm(stream, f"{LAYER}post_attention_layernorm"))
            ready = self.norm(stream, "norm")
            outputs.append(ready if config.norm_before_head else stream)
            hidden = ready if config.norm_fed_back else stream
        return outputs

    def _fuse(self, features: torch.Tensor) -> torch.Tensor:
        if self.config.norm_before_fc:
            features = self.norm(features, "input_norm")
        elif self.config.fc_norm:
            parts = features.chunk(self.config.captured, dim=1)
            normed = [self.norm(part, f"fc_norm.{index}") for index, part in enumerate(parts)]
            features = torch.cat(normed, dim=1)
        return self.linear(features, "fc")

    def _heads(self, inputs: torch.Tensor, name: str, count: int) -> torch.Tensor:
        layer = self.config.layer
        x = self.linear(inputs, f"{LAYER}self_attn.{name}_proj")
        x = x.unflatten(-1, (count, layer.head_dim))
        if layer.qk_norm and name != "v":
            x = self.norm(x, f"{LAYER}self_attn.{name}_norm")
        return x

    def _mlp(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = (self.linear(x, f"{LAYER}mlp.{name}_proj") for name in ("gate", "up"))
        return self.linear(silu(gate) * up, f"{LAYER}mlp.down_proj")

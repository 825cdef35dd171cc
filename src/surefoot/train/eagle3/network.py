"""The EAGLE-3 network to be trained: the same sums as ``proposers/eagle3/drafter.py``, in plain
torch with gradients, for whole documents at once."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.functional import linear, silu

from surefoot.kernels.reference import apply_rope, rms_norm
from surefoot.models.rope import rope_table
from surefoot.speculation.proposers.eagle3.checkpoint import LAYER, expected_shapes
from surefoot.speculation.proposers.eagle3.config import Eagle3Config
from surefoot.train.attention import chain_attention
from surefoot.train.corpus import Batch
from surefoot.train.target import Target

_SPREAD = 0.02
_HEAD = "lm_head.weight"


class Eagle3Network(nn.Module):
    """Parameters are float32 and have the names of the checkpoint; products are computed in
    ``compute``. The embedding is the target's and is not trained."""

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
        super().__init__()
        self.config, self.compute = config, compute
        generator = torch.Generator().manual_seed(seed)
        for name, shape in expected_shapes(config).items():
            if name.endswith("norm.weight") or "fc_norm." in name:
                value = torch.ones(shape)
            elif len(shape) == 1:
                value = torch.zeros(shape)
            else:
                value = _SPREAD * torch.randn(shape, generator=generator)
            self.register_parameter(_field(name), nn.Parameter(value.to(head.device)))
        self.register_parameter(_field(_HEAD), nn.Parameter(head.clone(), train_head))
        self.rope = rope_table(config.layer, max_positions, head.device)

    def tensors(self) -> dict[str, torch.Tensor]:
        """The parameters by their names in a checkpoint, detached."""
        return {_name(field): value.detach() for field, value in self.named_parameters()}

    @property
    def head(self) -> torch.Tensor:
        return self._weight(_HEAD)

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
            normed = self._norm(hidden, f"{LAYER}hidden_norm")
            inputs = torch.cat((self._norm(embedded, f"{LAYER}input_layernorm"), normed), dim=1)
            q, key = (
                apply_rope(self._heads(inputs, name, count), batch.positions + step, self.rope)
                for name, count in (("q", layer.heads), ("k", layer.kv_heads))
            )
            keys.append(key)
            values.append(self._heads(inputs, "v", layer.kv_heads))
            attended = chain_attention(q, keys, values, batch, layer.head_dim**-0.5)
            stream = normed if config.norm_before_residual else hidden
            stream = stream + self._linear(attended.flatten(1), f"{LAYER}self_attn.o_proj")
            stream = stream + self._mlp(self._norm(stream, f"{LAYER}post_attention_layernorm"))
            ready = self._norm(stream, "norm")
            outputs.append(ready if config.norm_before_head else stream)
            hidden = ready if config.norm_fed_back else stream
        return outputs

    def _fuse(self, features: torch.Tensor) -> torch.Tensor:
        if self.config.norm_before_fc:
            features = self._norm(features, "input_norm")
        elif self.config.fc_norm:
            parts = features.chunk(self.config.captured, dim=1)
            normed = [self._norm(part, f"fc_norm.{index}") for index, part in enumerate(parts)]
            features = torch.cat(normed, dim=1)
        return self._linear(features, "fc")

    def _heads(self, inputs: torch.Tensor, name: str, count: int) -> torch.Tensor:
        layer = self.config.layer
        x = self._linear(inputs, f"{LAYER}self_attn.{name}_proj")
        x = x.unflatten(-1, (count, layer.head_dim))
        if layer.qk_norm and name != "v":
            x = self._norm(x, f"{LAYER}self_attn.{name}_norm")
        return x

    def _mlp(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = (self._linear(x, f"{LAYER}mlp.{name}_proj") for name in ("gate", "up"))
        return self._linear(silu(gate) * up, f"{LAYER}mlp.down_proj")

    def _linear(self, x: torch.Tensor, name: str) -> torch.Tensor:
        # Cast at every use, so that the gradients of the steps add up in float32.
        bias = getattr(self, _field(f"{name}.bias"), None)
        weight = self._weight(f"{name}.weight").to(self.compute)
        return linear(x, weight, None if bias is None else bias.to(self.compute))

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return rms_norm(x, self._weight(f"{name}.weight"), self.config.layer.norm_eps)

    def _weight(self, name: str) -> torch.Tensor:
        return getattr(self, _field(name))


def _field(name: str) -> str:
    # Torch allows no dots in a parameter's name.
    return name.replace(".", "/")


def _name(field: str) -> str:
    return field.replace("/", ".")

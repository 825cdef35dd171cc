"""Drafters of the DFlash family: what is easily got wrong about them."""

from __future__ import annotations

from .mutation import mutation as m

DFLASH = "speculation/proposers/dflash/"
DRAFTER, GOLDEN, LOADING = (
    "test_dflash_drafter.py",
    "test_dflash_golden.py",
    "test_dflash_loading.py",
)
ENGINE = "test_dflash_engine.py"

MUTATIONS = (
    # --- layouts ----------------------------------------------------------------------------------
    m(
        DFLASH + "layouts.py",
        "layer_ids=None if ids is None else tuple(index + 1 for index in ids),",
        "layer_ids=ids,",
        LOADING,
        GOLDEN,
    ),
    m(
        DFLASH + "layouts.py",
        'dspark = projector == "dspark" or markov is not None or named or not sections',
        'dspark = projector == "dspark" or markov is not None',
        LOADING,
    ),
    m(
        DFLASH + "layouts.py",
        "Visibility(each == SLIDING if causal is None else causal,",
        "Visibility(bool(causal),",
        LOADING,
        DRAFTER,
    ),
    m(
        DFLASH + "config.py",
        "return tuple(round(1 + index * step) + 1 for index in range(layers))",
        "return tuple(int(1 + index * step) + 1 for index in range(layers))",
        LOADING,
    ),
    m(
        DFLASH + "checkpoint.py",
        "if target.layers in own.captured_layers:",
        "if target.layers + 1 in own.captured_layers:",
        LOADING,
    ),
    m(
        DFLASH + "config.py",
        "return 0 if self.anchor_predicts else 1",
        "return 1",
        LOADING,
        GOLDEN,
    ),
    # --- context ----------------------------------------------------------------------------------
    m(
        "kernels/drafting.py",
        "fused = backend.rms_norm(fused, weights.norm, weights.context.eps)",
        "pass",
        GOLDEN,
    ),
    m(
        DFLASH + "network.py",
        "k_norms=[layer.k_norm for layer in self.stack],",
        "k_norms=[None for layer in self.stack],",
        GOLDEN,
    ),
    m(
        "kernels/drafting.py",
        "positions = batch.key_index.clamp(max=last_position)",
        "positions = (batch.key_index - 1).clamp(0, last_position)",
        GOLDEN,
    ),
    m(
        "kernels/drafting.py",
        "for part, k_norm, pool in zip(projected, weights.k_norms, kv, strict=True):",
        "for part, k_norm, pool in zip(projected[::-1], weights.k_norms, kv, strict=True):",
        GOLDEN,
    ),
    # --- block ------------------------------------------------------------------------------------
    m(
        "kernels/drafting.py",
        "tokens[:, 0] = live.tokens",
        "tokens[:, -1] = live.tokens",
        GOLDEN,
    ),
    m(
        "kernels/drafting.py",
        "live.positions[:rows].t().flatten(),",
        "live.positions[:rows].flatten(),",
        ENGINE,
    ),
    m(
        DFLASH + "network.py",
        "seen = seen.tril()",
        "seen = seen.triu()",
        DRAFTER,
    ),
    m(
        DFLASH + "network.py",
        "elif kind.window and not kind.from_anchor:",
        "elif kind.window < 0:",
        DRAFTER,
    ),
    m(
        DFLASH + "network.py",
        "oldest = batch.key_index - (kind.window - 1)",
        "oldest = batch.key_index - kind.window",
        DRAFTER,
        GOLDEN,
    ),
    m(
        DFLASH + "network.py",
        "oldest = oldest - kind.window",
        "oldest = oldest - kind.window + 1",
        DRAFTER,
    ),
    m(
        DFLASH + "network.py",
        "x = x * self.config.embedding_scale",
        "x = x.clone()",
        DRAFTER,
    ),
    m(
        DFLASH + "network.py",
        "if config.logit_scale != 1:",
        "if config.logit_scale != 1 and not config.logit_cap:",
        DRAFTER,
    ),
    m(
        "kernels/drafting.py",
        "mixed[:, tap:] += weights[:, tap:, tap] * rows[:, :-tap]",
        "mixed[:, tap:] += weights[:, :-tap, tap] * rows[:, :-tap]",
        DRAFTER,
        GOLDEN,
    ),
    m(
        DFLASH + "network.py",
        "mixed = drafting.convolve(inputs, mlp.base[0], before, rows)",
        "mixed = drafting.convolve(inputs, mlp.base[0], after, rows)",
        GOLDEN,
    ),
    m(
        "kernels/cpu/attention.c",
        "if (batch->oldest && batch->oldest[row] > view.first) view.first = batch->oldest[row];",
        "if (batch->oldest && batch->oldest[row] < view.first) view.first = batch->oldest[row];",
        DRAFTER,
        GOLDEN,
    ),
    m(
        "kernels/triton/span_kernel.py",
        "visible = visible & (key[None, :] >= oldest[:, None])",
        "visible = visible & (key[None, :] > oldest[:, None])",
        GOLDEN,
    ),
    # --- heads ------------------------------------------------------------------------------------
    m(
        DFLASH + "heads.py",
        "previous = part.tokens[step]\n",
        "previous = part.tokens[0]\n",
        GOLDEN,
    ),
    m(
        DFLASH + "heads.py",
        "gate = backend.linear(self.gate, torch.cat((hidden, embedded), dim=1))",
        "gate = backend.linear(self.gate, torch.cat((embedded, hidden), dim=1))",
        DRAFTER,
    ),
    m(
        DFLASH + "heads.py",
        "state = kept * state + (1 - kept) * candidate.tanh()",
        "state = (1 - kept) * state + kept * candidate.tanh()",
        DRAFTER,
    ),
    m(
        DFLASH + "heads.py",
        "                previous = tokens\n",
        "                previous = current\n",
        GOLDEN,
    ),
    m(
        DFLASH + "proposer.py",
        "before = torch.cat((live.tokens.unsqueeze(0), tokens[:-1]))",
        "before = tokens",
        GOLDEN,
        DRAFTER,
    ),
    m(
        DFLASH + "proposer.py",
        "places = live.keys[1 : depth + 1]",
        "places = live.keys[:depth]",
        ENGINE,
    ),
    m(
        DFLASH + "heads.py",
        "if picker.chained:",
        "if False:",
        DRAFTER,
    ),
    m(
        "kernels/triton/blocks.py",
        "there = inside & (within >= tap)",
        "there = inside & (row >= tap)",
        "test_triton_drafting.py",
    ),
    m(
        "speculation/drafting/network.py",
        "return target.head_linear if torch.equal(found, expected) else packed",
        "return packed",
        LOADING,
    ),
    # --- the round --------------------------------------------------------------------------------
    m(
        "speculation/round.py",
        "if need.cost is DraftCost.PER_BLOCK",
        "if need.trees",
        ENGINE,
    ),
)

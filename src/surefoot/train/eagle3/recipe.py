"""Training-time test: every row drafts several steps on its own hidden states, as in inference.

Row i of step k reads token i + 1 + k, which was generated, and learns the target's distribution
after it. It counts where all tokens from i + 1 to i + 2 + k were generated: those are the chains
that the engine drafts and can be judged by.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from surefoot.errors import SurefootError
from surefoot.models.config import RopeScaling
from surefoot.speculation.drafting.folders import errors_about
from surefoot.speculation.proposers.eagle3.checkpoint import open_checkpoint
from surefoot.speculation.proposers.eagle3.config import Eagle3Config
from surefoot.train.corpus import Batch, Corpus, put
from surefoot.train.eagle3.export import write_checkpoint
from surefoot.train.eagle3.network import HEAD, Eagle3Network
from surefoot.train.eagle3.options import Eagle3TrainOptions
from surefoot.train.gguf import own_head
from surefoot.train.initial import OPTION, refuse_others, take_weights
from surefoot.train.loss import Teacher, compare, soft_cross_entropy, teach
from surefoot.train.recipe import Drafted, Recipe
from surefoot.train.target import Forward, Target
from surefoot.train.vocabulary import choose_vocabulary, places_of

_SAME = (
    "layer_ids", "captured", "target_hidden_size", "norm_before_residual", "norm_before_fc",
    "fc_norm", "norm_before_head", "norm_fed_back", "logit_scale",
)  # fmt: skip
"""What weights of another drafter must have been made for."""
_HEAD_RATE = 0.1
"""A trained head learns that much slower: it starts where it works."""


class Eagle3Recipe(Recipe):
    options: Eagle3TrainOptions

    def __init__(self, options: Eagle3TrainOptions, target: Target, corpus: Corpus) -> None:
        super().__init__(options, target, corpus)
        self.depth = options.unroll
        model = target.config
        self.layers = options.layers_of(model.layers)
        documents, _ = corpus.split(options.held_out, options.seed)
        ids, self.coverage = choose_vocabulary(
            corpus, documents, model.vocab_size, options.draft_vocab
        )
        self.host_ids = torch.from_numpy(ids)
        self.target_ids = self.host_ids.to(target.device)
        config = Eagle3Config(
            layout="flat",
            layer=replace(
                model, architecture="llama", layers=1, qk_norm=False, attention_bias=False,
                output_bias=False, mlp_bias=False, tied_embeddings=False,
                # It learns its own distances; a stretched target's need not be copied.
                rope_scaling=RopeScaling(),
            ),
            draft_vocab_size=len(ids),
            target_hidden_size=model.hidden_size,
            captured=len(self.layers),
            layer_ids=self.layers,
            ids_are_outputs=False,
            norm_before_residual=False,
            norm_before_fc=False,
            fc_norm=False,
            norm_before_head=True,
            norm_fed_back=False,
            logit_scale=1.0,
            verifier=target.name,
        )  # fmt: skip
        self.network: Eagle3Network = Eagle3Network(
            config,
            target.head_rows(self.host_ids),
            options.max_length + options.unroll + 1,
            self.compute,
            options.train_head,
            options.seed,
        )

    def loss(self, batch: Batch, divisor: float, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        forward = self.target.forward(batch, self.layers)
        teacher, place = self._teacher(batch, forward)
        hidden = self._unroll(batch, forward)
        weight = self.row_weights(batch, self.options.weighting) / divisor
        picked, rows, weights = [], [], []
        for step, valid in enumerate(self.valid(batch)):
            chosen = valid.nonzero()[0]
            picked.append(hidden[step].index_select(0, self._put(chosen)))
            rows.append(place[chosen + 1 + step])
            weights.append(weight[chosen] * self.options.step_weight**step)
        head = self.network.head
        self.network.work.product(sum(map(len, picked)), head.numel(), True, head.requires_grad)
        loss, counts = soft_cross_entropy(
            torch.cat(picked),
            head,
            teacher,
            self._put(np.concatenate(rows)),
            self._put(np.concatenate(weights).astype(np.float32)),
        )
        return loss, torch.cat((loss.detach().unsqueeze(0), counts))

    @torch.no_grad()
    def draft(self, batch: Batch) -> Drafted:
        forward = self.target.forward(batch, self.layers)
        teacher, place = self._teacher(batch, forward)
        hidden = self._unroll(batch, forward)
        shape = len(batch), self.options.unroll
        tokens = np.full(shape, -1, dtype=np.int64)
        overlap = np.zeros(shape, dtype=np.float32)
        for step, valid in enumerate(self.valid(batch)):
            chosen = valid.nonzero()[0]
            own = hidden[step].index_select(0, self._put(chosen))
            best, same = compare(
                own, self.network.head, teacher, self._put(place[chosen + 1 + step])
            )
            tokens[chosen, step] = self.target_ids[best].cpu().numpy()
            overlap[chosen, step] = same.cpu().numpy()
        likeliest = np.full(len(batch), -1, dtype=np.int64)
        likeliest[place >= 0] = teacher.likeliest.cpu().numpy()
        return Drafted(tokens, overlap, likeliest)

    def valid(self, batch: Batch) -> list[np.ndarray]:
        """bool [N] for each step: the rows that count."""
        found = [batch.pairs]
        for step in range(1, self.options.unroll):
            found.append(found[-1] & batch.ahead(batch.generated, 2 + step))
        return found

    def groups(self, rate: float) -> list[dict[str, Any]]:
        network = self.network
        rest = [value for value in network.parameters() if value is not network.head]
        groups: list[dict[str, Any]] = [{"params": rest, "lr": rate}]
        if self.options.train_head:
            groups.append({"params": [network.head], "lr": _HEAD_RATE * rate})
        return groups

    def begin_from(self, path: str) -> None:
        with errors_about(OPTION):
            checkpoint = open_checkpoint(path)
        layers = checkpoint.config.layers_of(self.target.config.layers)
        found = replace(checkpoint.config, layer_ids=layers)
        refuse_others(path, found, self.network.config, _SAME)
        if own_head(checkpoint, self.target) and not self.options.train_head:
            raise SurefootError(
                OPTION, f"{path} has a head of its own", "go on training it with --train-head"
            )
        # A head that the file leaves out is the target's: it is there already.
        rows = {HEAD: places_of(checkpoint.target_ids, self.host_ids)}
        tensors = {HEAD: self.target.head_rows(checkpoint.target_ids), **checkpoint.tensors}
        take_weights(self.network, tensors, path, rows)

    def export(self, folder: Path) -> None:
        write_checkpoint(folder, self.network, self.host_ids, self.target, self.options.train_head)

    def facts(self) -> dict[str, Any]:
        return {
            "captured_layers": list(self.layers),
            "parameters": sum(value.numel() for value in self.network.parameters()),
            "draft_vocabulary": len(self.host_ids),
            "coverage": self.coverage,
        }

    def _teacher(self, batch: Batch, forward: Forward) -> tuple[Teacher, np.ndarray]:
        """Of the positions after which a generated token is to be predicted; and int64 [N], which
        row of it belongs to each token (-1: none)."""
        asked = (batch.generated & batch.ahead(batch.generated, 1)).nonzero()[0]
        place = np.full(len(batch), -1, dtype=np.int64)
        place[asked] = np.arange(len(asked))
        kind = torch.float32 if self.compute is torch.float32 else torch.float16
        rows = forward.before_norm.index_select(0, self._put(asked))
        return teach(self.target, rows, self.target_ids, kind), place

    def _unroll(self, batch: Batch, forward: Forward) -> list[torch.Tensor]:
        return self.network.unroll(batch, forward.features, self.target, self.options.unroll)

    def _put(self, array: np.ndarray) -> torch.Tensor:
        return put(array, self.target.device)

"""Blocks behind drawn current tokens ("anchors"), as inference would draft them there.

Draft j of the block behind token a stands for token a + 1 + j and counts while all tokens up to
it were generated and are in the draft vocabulary. The tokens before a draft that DSpark's heads
read are the text's: a draft is only of use if those before it were right.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.functional import binary_cross_entropy_with_logits

from surefoot.errors import SurefootError
from surefoot.kernels.losses import Objective
from surefoot.models.config import RopeScaling
from surefoot.speculation.drafting.folders import errors_about
from surefoot.speculation.proposers.dflash.checkpoint import open_checkpoint
from surefoot.speculation.proposers.dflash.config import DFlashConfig, MarkovShape, Visibility
from surefoot.train.corpus import Batch, Corpus, put
from surefoot.train.dflash.export import write_checkpoint
from surefoot.train.dflash.loss import BlockRows, block_loss
from surefoot.train.dflash.network import AFTER, DFlashTraining
from surefoot.train.dflash.options import DFlashTrainOptions
from surefoot.train.gguf import own_head
from surefoot.train.initial import OPTION, refuse_others, take_weights
from surefoot.train.loss import SLICE, Teacher, head_logits, teach
from surefoot.train.recipe import Drafted, Recipe
from surefoot.train.target import Target
from surefoot.train.vocabulary import choose_vocabulary, places_of

_SAME = (
    "layer_ids", "target_hidden_size", "anchor_predicts", "layers", "markov", "confidence",
    "confidence_with_markov",
)  # fmt: skip
"""What weights of another drafter must have been made for."""


class DFlashRecipe(Recipe):
    options: DFlashTrainOptions

    def __init__(self, options: DFlashTrainOptions, target: Target, corpus: Corpus) -> None:
        super().__init__(options, target, corpus)
        self.depth = options.drafts
        model = target.config
        self.layers = options.layers_of(model.layers)
        rank, confidence = options.heads
        documents, _ = corpus.split(options.held_out, options.seed)
        ids, self.coverage = choose_vocabulary(
            corpus, documents, model.vocab_size, options.draft_vocab or model.vocab_size
        )
        self.host_ids = torch.from_numpy(ids)
        self.target_ids = self.host_ids.to(target.device)
        self.known = np.isin(np.arange(model.vocab_size), ids)
        """bool [vocab]: the draft vocabulary."""
        layout = "deepseek" if options.anchor_predicts else "z-lab"
        mask = options.mask_token
        self.config = DFlashConfig(
            # The others' have no draft vocabularies.
            layout=layout if self.known.all() else "speculators",
            layer=replace(
                model, architecture="qwen3", layers=options.layers, qk_norm=True,
                attention_bias=False, output_bias=False, mlp_bias=False, tied_embeddings=False,
                # It learns its own distances; a stretched target's need not be copied.
                rope_scaling=RopeScaling(),
            ),
            draft_vocab_size=len(ids),
            target_hidden_size=model.hidden_size,
            block_size=options.block,
            layer_ids=self.layers,
            mask_token_id=_unused_token(corpus, model.vocab_size) if mask is None else mask,
            anchor_predicts=options.anchor_predicts,
            layers=(Visibility(causal=False),) * options.layers,
            markov=MarkovShape("vanilla", rank) if rank else None,
            confidence=confidence,
            confidence_with_markov=confidence and rank > 0,
            verifier=target.name,
        )  # fmt: skip
        self.network: DFlashTraining = DFlashTraining(
            self.config,
            options.max_length + options.block,
            self.compute,
            target.device,
            options.seed,
        )
        self.head = target.head_rows(self.host_ids).to(self.compute)
        weights = np.exp(-np.arange(self.depth) / options.decay)
        self.decay = (weights / weights.sum()).astype(np.float32)

    def loss(self, batch: Batch, divisor: float, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        anchors, share = self.draw(batch, step)
        rows, teacher, chosen = self._rows(batch, anchors, self.learnt(batch, anchors))
        weights = (share[chosen[0]] * self.decay[chosen[1]] / divisor).astype(np.float32)
        weight = self._put(weights)
        after, work = self._after(), self.network.work
        work.product(len(rows.places), self.head.numel(), True)
        if after is not None:
            work.product(len(rows.places), after.numel(), True, True)
        loss, overlap, counts = block_loss(
            rows, self.head, after, teacher, weight, Objective(*self.options.objective)
        )
        if self.config.confidence:
            logits = self.network.confidence(rows.hidden, rows.before)
            right = overlap * teacher.share[rows.places]
            loss = loss + binary_cross_entropy_with_logits(logits, right, weight, reduction="sum")
        return loss, torch.cat((loss.detach().unsqueeze(0), counts))

    @torch.no_grad()
    def draft(self, batch: Batch) -> Drafted:
        anchors = batch.pairs.nonzero()[0] + 1
        rows, teacher, (block, draft) = self._rows(batch, anchors, self.valid(batch, anchors))
        place = anchors[block] - 1, draft
        tokens, alone = (np.full((len(batch), self.depth), -1, dtype=np.int64) for _ in range(2))
        overlap, chance = (np.zeros(tokens.shape, dtype=np.float32) for _ in range(2))
        judged = self._judge(rows, teacher)
        tokens[place], alone[place], overlap[place], chance[place] = judged
        likeliest = np.full(len(batch), -1, dtype=np.int64)
        likeliest[_asked(batch)] = teacher.likeliest.cpu().numpy()
        return Drafted(
            tokens,
            overlap,
            likeliest,
            None if self.config.markov is None else alone,
            chance if self.config.confidence else None,
        )

    def _judge(self, rows: BlockRows, teacher: Teacher) -> tuple[np.ndarray, ...]:
        """For each row the likeliest token, the likeliest without the Markov head, the overlap with
        the target's distribution, and the confidence (0 without a head for it); on the host, [R]
        each. Tokens are the target's."""
        after = self._after()
        matrix = None if after is None else after.to(self.compute)
        count, device = len(rows.places), self.target.device
        best, alone = (torch.empty(count, dtype=torch.int64, device=device) for _ in range(2))
        overlap, chance = (torch.zeros(count, device=device) for _ in range(2))
        for start in range(0, count, SLICE):
            part = slice(start, start + SLICE)
            before = None if rows.before is None else rows.before[part]
            logits = head_logits(rows.hidden[part], self.head)
            alone[part] = self.target_ids[logits.argmax(-1)]
            if before is not None and matrix is not None:
                logits += head_logits(before, matrix)
            q = torch.softmax(logits, -1)
            places = rows.places[part]
            p = teacher.logprobs[places].float().exp_() * teacher.share[places].unsqueeze(-1)
            best[part] = self.target_ids[q.argmax(-1)]
            overlap[part] = torch.minimum(p, q).sum(-1)
            if self.config.confidence:
                chance[part] = self.network.confidence(rows.hidden[part], before).sigmoid()
        return best.cpu().numpy(), alone.cpu().numpy(), overlap.cpu().numpy(), chance.cpu().numpy()

    def _after(self) -> torch.Tensor | None:
        """float32 [draft vocabulary, rank]: the Markov head's second matrix."""
        return None if self.config.markov is None else self.network.weight(f"{AFTER}.weight")

    def draw(self, batch: Batch, step: int) -> tuple[np.ndarray, np.ndarray]:
        """Anchors of a step, int64 [M] rising, and float32 [M] their weights: drawn for each
        document by itself, so that it does not matter what shares its batch."""
        anchors, shares = [], []
        for index, document in enumerate(batch.indices.tolist()):
            own = slice(batch.starts[index], batch.starts[index + 1])
            found = batch.pairs[own].nonzero()[0] + own.start + 1
            count = math.ceil(self.options.anchors * len(found))
            chooser = np.random.default_rng((self.options.seed, step, document))
            drawn = np.sort(chooser.choice(found, count, replace=False)) if count else found
            anchors.append(drawn)
            alike = self.options.weighting == "token"
            shares.append(np.full(count, 1.0 if alike else 1 / max(1, count), dtype=np.float32))
        return np.concatenate(anchors), np.concatenate(shares)

    def divisor(self, documents: Sequence[int], weighting: str) -> float:
        if weighting == "document":
            return super().divisor(documents, weighting)
        return max(1.0, float(np.ceil(self.options.anchors * self.corpus.pairs[documents]).sum()))

    def groups(self, rate: float) -> list[dict[str, Any]]:
        return [{"params": list(self.network.parameters()), "lr": rate}]

    def begin_from(self, path: str) -> None:
        with errors_about(OPTION):
            checkpoint = open_checkpoint(path)
        layers = checkpoint.config.layers_of(self.target.config.layers)
        found = replace(checkpoint.config, layer_ids=layers)
        refuse_others(path, found, self.config, _SAME)
        if own_head(checkpoint, self.target):
            raise SurefootError(
                OPTION, f"{path} has a head of its own", "only the target's is trained with"
            )
        if self.options.mask_token not in (None, found.mask_token_id):
            raise SurefootError(
                OPTION,
                f"{path} has the mask token {found.mask_token_id}, not {self.options.mask_token}",
                "leave --mask-token out",
            )
        self.config = self.network.config = replace(self.config, mask_token_id=found.mask_token_id)
        # A smaller draft vocabulary has no rows for other tokens; these begin as random ones.
        rows = {f"{AFTER}.weight": places_of(checkpoint.target_ids, self.host_ids)}
        take_weights(self.network, checkpoint.tensors, path, rows)

    def export(self, folder: Path) -> None:
        write_checkpoint(folder, self.network, self.host_ids, self.target)

    def facts(self) -> dict[str, Any]:
        return {
            "captured_layers": list(self.layers),
            "parameters": sum(value.numel() for value in self.network.parameters()),
            "mask_token_id": self.config.mask_token_id,
            "draft_vocabulary": len(self.host_ids),
            "coverage": self.coverage,
        }

    def _rows(
        self, batch: Batch, anchors: np.ndarray, counting: np.ndarray
    ) -> tuple[BlockRows, Teacher, tuple[np.ndarray, np.ndarray]]:
        """The rows of the blocks behind ``anchors`` that count, bool [M, drafts], and (block,
        draft) of each."""
        forward = self.target.forward(batch, self.layers)
        asked = _asked(batch)
        place = np.full(len(batch), -1, dtype=np.int64)
        place[asked] = np.arange(len(asked))
        kind = torch.float32 if self.compute is torch.float32 else torch.float16
        before_norm = forward.before_norm.index_select(0, self._put(asked))
        teacher = teach(self.target, before_norm, self.target_ids, kind)
        hidden = self.network.blocks(batch, forward.features, self._put(anchors), self.target)
        hidden = hidden[:, self.config.first_row :]
        block, draft = counting.nonzero()
        at = anchors[block] + draft
        picked = self._put(block * self.depth + draft)
        return (
            BlockRows(
                hidden.flatten(0, 1).index_select(0, picked),
                self.network.before(batch.ids[self._put(at)]),
                self._put(place[at]),
                places_of(batch.ids[self._put(at + 1)], self.target_ids),
            ),
            teacher,
            (block, draft),
        )

    def valid(self, batch: Batch, anchors: np.ndarray) -> np.ndarray:
        """bool [M, drafts]: the tokens from the anchor to theirs were all generated."""
        return self._unbroken(batch, batch.generated, anchors)

    def learnt(self, batch: Batch, anchors: np.ndarray) -> np.ndarray:
        """bool [M, drafts]: those among them before which nothing is that cannot be drafted, nor
        are they: no round would get that far."""
        return self._unbroken(batch, batch.generated & self.known[batch.tokens], anchors)

    def _unbroken(self, batch: Batch, good: np.ndarray, anchors: np.ndarray) -> np.ndarray:
        following = [batch.ahead(good, 1 + j)[anchors] for j in range(self.depth)]
        return np.logical_and.accumulate(np.stack(following, axis=1), axis=1)

    def _put(self, array: np.ndarray) -> torch.Tensor:
        return put(array, self.target.device)


def _asked(batch: Batch) -> np.ndarray:
    """Generated tokens with a generated one behind them."""
    return (batch.generated & batch.ahead(batch.generated, 1)).nonzero()[0]


def _unused_token(corpus: Corpus, vocab_size: int) -> int:
    """The highest id among the tokens that occur least often."""
    counts = np.bincount(corpus.ids, minlength=vocab_size)
    return int(np.flatnonzero(counts == counts.min())[-1])

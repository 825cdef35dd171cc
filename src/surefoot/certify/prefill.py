"""Logits of whole texts straight from the decoder, without engine, scheduler or KV manager."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from surefoot.kernels.backend import FlatBatch
from surefoot.models.decoder import Decoder

BLOCK = 16
MAX_ROWS = 512


def logits_of(
    decoder: Decoder, texts: Sequence[Sequence[int]], first: Sequence[int] | None = None
) -> list[torch.Tensor]:
    """Per text, float32 [len(text) - first, vocab]: row i predicts token ``first + i + 1``. Texts
    are prefilled in one go each, several to a batch."""
    starts = [0] * len(texts) if first is None else first
    found: list[torch.Tensor] = []
    group: list[int] = []
    for index, text in enumerate(texts):
        if group and sum(len(texts[i]) for i in group) + len(text) > MAX_ROWS:
            found += _group(decoder, [texts[i] for i in group], [starts[i] for i in group])
            group = []
        group.append(index)
    return found + _group(decoder, [texts[i] for i in group], [starts[i] for i in group])


def _group(
    decoder: Decoder, texts: Sequence[Sequence[int]], starts: Sequence[int]
) -> list[torch.Tensor]:
    cache = TextCache(decoder, texts)
    hidden = cache.run([range(len(text)) for text in texts])
    return [decoder.logits(rows[start:]) for rows, start in zip(hidden, starts, strict=True)]


def continuations(
    decoder: Decoder, prompt: Sequence[int], outputs: Sequence[Sequence[int]]
) -> list[torch.Tensor]:
    """Per output, float32 [len(output), vocab]: the logits that predict each of its tokens after
    ``prompt``, whose whole blocks are computed only once."""
    shared = (len(prompt) - 1) // BLOCK * BLOCK
    texts = [[*prompt, *output[:-1]] for output in outputs]
    cache = TextCache(decoder, texts, shared // BLOCK)
    if shared:
        cache.run([range(shared), *(range(shared, shared) for _ in texts[1:])])
    hidden = cache.run([range(shared, len(text)) for text in texts])
    first = len(prompt) - 1 - shared
    return [decoder.logits(rows[first:]) for rows in hidden]


class TextCache:
    """KV for texts, filled by any split of their rows into forwards."""

    def __init__(
        self, decoder: Decoder, texts: Sequence[Sequence[int]], shared_blocks: int = 0
    ) -> None:
        """The first ``shared_blocks`` blocks, of equal tokens, are those of the first text."""
        self.decoder = decoder
        self.texts = [list(text) for text in texts]
        device = decoder.backend.device
        width = max(-(-len(text) // BLOCK) for text in texts)
        blocks = torch.arange(1, len(texts) * width + 1, dtype=torch.int32, device=device)
        self.tables = blocks.view(len(texts), width)
        self.tables[:, :shared_blocks] = self.tables[0, :shared_blocks]
        self.kv = decoder.backend.allocate_kv(
            decoder.config.layers, len(texts) * width + 1, BLOCK, decoder.shape
        )

    def run(self, spans: Sequence[range]) -> list[torch.Tensor]:
        """One forward over ``spans[t]`` of each text t (may be empty); hidden rows by text."""
        rows = [(owner, at) for owner, span in enumerate(spans) for at in span]
        places = [at for _, at in rows]
        tokens = [self.texts[owner][at] for owner, at in rows]
        hidden = self._forward(spans, tokens, places, places, None)
        return list(hidden.split([len(span) for span in spans]))

    def run_trees(self, spans: Sequence[range]) -> list[torch.Tensor]:
        """As ``run``, with every row but the first beside a sibling that nothing follows: the rows
        of a tree, whose keys lie further apart. Spans of 32 rows at most, with as many positions of
        their text behind them; those are written, too."""
        tokens, positions, places, masks, own = [], [], [], [], []
        for owner, span in enumerate(spans):
            above = 0
            for depth, at in enumerate(span):
                for sibling in range(1 if not depth else 2):
                    place = 0 if not depth else 2 * depth - 1 + sibling
                    token = self.texts[owner][at]
                    tokens.append(token if not sibling else (token + 1) % 2)
                    positions.append(at)
                    places.append(span.start + place)
                    masks.append(above | 1 << place)
                    if not sibling:
                        own.append(len(tokens) - 1)
                above |= 1 << (0 if not depth else 2 * depth - 1)
        signed = [mask - (1 << 64) if mask >> 63 else mask for mask in masks]
        widened = [range(span.start, span.start + max(0, 2 * len(span) - 1)) for span in spans]
        hidden = self._forward(widened, tokens, positions, places, signed)
        return list(hidden[own].split([len(span) for span in spans]))

    def _forward(
        self,
        spans: Sequence[range],
        tokens: Sequence[int],
        positions: Sequence[int],
        places: Sequence[int],
        masks: Sequence[int] | None,
    ) -> torch.Tensor:
        device = self.decoder.backend.device
        owners = [owner for owner, span in enumerate(spans) for _ in span]
        batch = FlatBatch(
            tokens=torch.tensor(tokens, device=device),
            positions=torch.tensor(positions, device=device),
            key_index=torch.tensor(places, device=device),
            row_slot=torch.tensor(owners, device=device),
            block_tables=self.tables,
            span_start=torch.tensor([span.start for span in spans], device=device),
            max_keys=max(span.stop for span in spans),
            mask=None if masks is None else torch.tensor(masks, device=device),
        )
        return self.decoder.forward(batch, self.kv).hidden

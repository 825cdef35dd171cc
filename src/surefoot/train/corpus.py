"""The documents of a folder of shards, packed into batches without padding."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import torch

from surefoot.errors import SurefootError
from surefoot.train.filters import Seen
from surefoot.train.shards import read_shard, shard_paths


def put(array: np.ndarray, device: torch.device | str) -> torch.Tensor:
    """A copy on the device, for which the host does not wait."""
    tensor = torch.from_numpy(array)
    if torch.device(device).type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


@dataclass(frozen=True)
class Batch:
    """Documents one after another, N tokens in all. Tensors are on the device, arrays on the
    host: what is trained on is known before anything is computed."""

    ids: torch.Tensor
    """int64 [N]."""
    positions: torch.Tensor
    """int64 [N]: counted from the start of the document."""
    documents: torch.Tensor
    """int64 [N]: which document of the batch."""
    offsets: torch.Tensor
    """int32 [D + 1]: where each document begins, and the end of the last."""
    generated: np.ndarray
    """bool [N]: the target generated this token."""
    tokens: np.ndarray
    """int64 [N]: ``ids``."""
    starts: np.ndarray
    """int64 [D + 1]: ``offsets``."""
    temperature: np.ndarray
    """float32 [D]."""
    indices: np.ndarray
    """int64 [D]: which documents of the corpus these are."""

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def longest(self) -> int:
        """Tokens of the longest document."""
        return int(np.diff(self.starts).max())

    @cached_property
    def document_of(self) -> np.ndarray:
        """int64 [N]: ``documents``."""
        return np.repeat(np.arange(len(self.starts) - 1), np.diff(self.starts))

    @cached_property
    def pairs(self) -> np.ndarray:
        """bool [N]: rows from which drafting can begin and be judged; the token after them, and
        the one after that, were generated."""
        return self.ahead(self.generated, 1) & self.ahead(self.generated, 2)

    def ahead(self, values: np.ndarray, count: int) -> np.ndarray:
        """bool [N]: ``values`` of the token ``count`` places on, False beyond the document."""
        shifted = np.zeros_like(values)
        shifted[: len(values) - count] = values[count:]
        index = np.arange(len(values)) + count
        return shifted & (index < self.starts[1:][self.document_of])


class Corpus:
    """All documents of some folders, in memory: ``ids`` int32 [N], ``generated`` bool [N],
    ``starts`` int64 [D + 1], ``temperature`` float32 [D]. Documents are cut to ``max_length``
    tokens; those that keep fewer than two generated ones are left out, and those whose prompt or
    answer another folder's has had before."""

    def __init__(self, folders: Sequence[Path], max_length: int) -> None:
        paths = []
        for folder in folders:
            found = shard_paths(folder)
            if not found:
                advice = "run `surefoot train data`"
                raise SurefootError("data", f"{folder} holds no shards", advice)
            paths += found
        ids, generated, lengths, temperature = [], [], [], []
        seen = Seen()
        for path in paths:
            shard = read_shard(path)
            ends = np.cumsum(shard["lengths"], dtype=np.int64)
            for index, end in enumerate(ends):
                if not seen.take(*map(int, shard["keys"][index])):
                    continue
                start = end - shard["lengths"][index]
                cut = slice(start, min(end, start + max_length))
                mask = shard["mask"][cut].astype(bool)
                if mask.sum() < 2:
                    continue
                ids.append(shard["ids"][cut].astype(np.int32))
                generated.append(mask)
                lengths.append(len(mask))
                temperature.append(shard["temperature"][index])
        if not lengths:
            names = ", ".join(map(str, folders))
            raise SurefootError("data", f"{names}: no generated text within {max_length}")
        self.ids, self.generated = np.concatenate(ids), np.concatenate(generated)
        self.starts = np.concatenate(([0], np.cumsum(lengths))).astype(np.int64)
        self.temperature = np.array(temperature, dtype=np.float32)
        both = self.generated[:-1] & self.generated[1:]
        # Not across documents, and not from a document's first token on.
        both[self.starts[1:-1] - 1] = False
        both[self.starts[:-1]] = False
        self.pairs = np.add.reduceat(np.append(both, False).astype(np.int64), self.starts[:-1])
        """int64 [D]: rows of each document from which drafting can begin (``Batch.pairs``)."""

    def __len__(self) -> int:
        return len(self.temperature)

    def length(self, document: int) -> int:
        return int(self.starts[document + 1] - self.starts[document])

    def split(self, held_out: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
        """Indices of the documents to train on, and of those held out: ``held_out``, at most a
        tenth of all and at least one."""
        if len(self) < 2:
            raise SurefootError("data", "holds a single document", "generate more")
        order = np.random.default_rng(seed).permutation(len(self))
        count = max(1, min(held_out, len(self) // 10))
        return order[count:], order[:count]

    def pack(self, documents: Sequence[int] | np.ndarray, tokens: int) -> list[list[int]]:
        """Documents in batches of at most ``tokens`` tokens (a longer one alone), in order."""
        packs: list[list[int]] = []
        room = 0
        for document in map(int, documents):
            length = self.length(document)
            if not packs or length > room:
                packs.append([])
                room = tokens
            packs[-1].append(document)
            room -= length
        return packs

    def batch(self, documents: Sequence[int], device: torch.device | str) -> Batch:
        lengths = np.array([self.length(document) for document in documents], dtype=np.int64)
        starts = np.concatenate(([0], np.cumsum(lengths)))
        pieces = [slice(self.starts[item], self.starts[item + 1]) for item in documents]
        ids = np.concatenate([self.ids[piece] for piece in pieces]).astype(np.int64)
        generated = np.concatenate([self.generated[piece] for piece in pieces])
        document_of = np.repeat(np.arange(len(lengths)), lengths)
        positions = np.arange(len(ids)) - starts[:-1][document_of]

        return Batch(
            ids=put(ids, device),
            positions=put(positions, device),
            documents=put(document_of, device),
            offsets=put(starts.astype(np.int32), device),
            generated=generated,
            tokens=ids,
            starts=starts,
            temperature=self.temperature[list(documents)],
            indices=np.array(documents, dtype=np.int64),
        )


@dataclass(frozen=True)
class Plan:
    """Which documents each optimizer step takes: ``micro`` batches of at most ``tokens`` tokens.
    An epoch's order depends on ``seed`` and its number alone; what does not fill a step at its end
    is left out."""

    corpus: Corpus
    documents: np.ndarray
    tokens: int
    micro: int
    seed: int

    def epoch(self, number: int) -> list[list[list[int]]]:
        order = np.random.default_rng((self.seed, number)).permutation(self.documents)
        packs = self.corpus.pack(order, self.tokens)
        whole = max(1, len(packs) // self.micro)
        return [packs[step * self.micro : (step + 1) * self.micro] for step in range(whole)]

    def steps(self, first: int, last: int) -> Iterator[list[list[int]]]:
        """Steps ``first`` to ``last`` - 1, counted over all epochs."""
        step = number = 0
        while step < last:
            for packs in self.epoch(number):
                if first <= step < last:
                    yield packs
                step += 1
            number += 1

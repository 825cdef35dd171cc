"""Proposers of trees for tests: they know the texts, and hide them among other branches."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

import torch

from harness import VOCAB
from surefoot.speculation import registry
from surefoot.speculation.proposer import Drafts, Needs, Proposer


class Bush(Proposer):
    """Random trees with distinct siblings; with ``texts`` a part of the right path is in them."""

    name = "bush"

    @dataclass(frozen=True)
    class Options:
        texts: tuple[tuple[int, ...], ...] = ()
        seed: int = 0

    def needs(self) -> Needs:
        return Needs(longest_draft=self.state.max_drafts, trees=True)

    def propose(self, slots: torch.Tensor) -> Drafts:
        if not hasattr(self, "random"):
            self.random = Random(self.options.seed)
        width = self.state.max_drafts
        tokens = torch.zeros((len(slots), width), dtype=torch.int64)
        parents = torch.full((len(slots), width), -1)
        lengths = torch.zeros(len(slots), dtype=torch.int64)
        for row, slot in enumerate(slots.tolist()):
            known = tuple(self.state.history[slot, : int(self.state.length[slot])].tolist())
            nodes = self.tree(self.future(known)[:width], width)
            lengths[row] = len(nodes)
            for place, (token, parent) in enumerate(nodes):
                tokens[row, place], parents[row, place] = token, parent
        return Drafts(tokens, lengths, torch.full((len(slots), width), 0.8), parents)

    def future(self, known: tuple[int, ...]) -> tuple[int, ...]:
        for text in self.options.texts:
            if len(text) > len(known) and text[: len(known)] == known:
                return text[len(known) :]
        return ()

    def tree(self, future: tuple[int, ...], width: int) -> list[tuple[int, int]]:
        """(token, parent) of up to ``width`` nodes, parents first."""
        nodes: list[tuple[int, int]] = []
        taken: dict[int, set[int]] = {}
        right = [-1]
        for _ in range(self.random.randint(0, width)):
            depth = len(right) - 1
            if depth < len(future) and self.random.random() < 0.5:
                token, parent = future[depth], right[-1]
                if token not in taken.setdefault(parent, set()):
                    right.append(len(nodes))
            else:
                # Often a token of the text, which a grammar may allow here too.
                often = future and self.random.random() < 0.6
                token = self.random.choice(future) if often else self.random.randrange(VOCAB)
                parent = self.random.randint(-1, len(nodes) - 1)
                # The right token may come along by chance too.
                if parent == right[-1] and depth < len(future) and token == future[depth]:
                    right.append(len(nodes))
            if token in taken.setdefault(parent, set()):
                if right[-1] == len(nodes):
                    right.pop()
                continue
            taken[parent].add(token)
            nodes.append((token, parent))
        return nodes


registry.register(Bush)

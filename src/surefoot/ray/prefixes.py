"""Which replica has seen a prompt's beginning, and which one should get the prompt."""

from __future__ import annotations

import contextlib
import json
import random
from collections import OrderedDict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Generic, TypeVar

from surefoot.kv.block_pool import chain_hash
from surefoot.server.json_limits import check_text

BLOCK_BYTES = 64
"""Of a request's text that one hash stands for: about as many tokens as a block of KV holds."""
BYTES_PER_TOKEN = 4
"""Of English; what is compared is never more precise than that."""
MOST_BLOCKS = 4096
"""Looked at of a request: 65,536 tokens. Whoever shares so much gets to the same replica anyway."""
REQUEST_TOKENS = 64
"""Prompt tokens that cost a replica about as much as one more request under way."""
DEFAULT_KV_TOKENS = 1 << 18
DEFAULT_RUNNING = 32
"""A replica's KV pool and batch, until it says their sizes."""
# What comes before the messages in a model's context, then the messages, in every API's names.
_FIELDS = ("tools", "system", "instructions", "prompt", "messages", "input")
_SEPARATOR = b"\x1e"

Replica = TypeVar("Replica", bound=Hashable)


def prefix_hashes(body: bytes) -> list[bytes]:
    """Hashes of a request's text, a block of ``BLOCK_BYTES`` each: two requests have as many
    leading ones in common as their prompts share whole blocks of text.

    Of a JSON object that is what becomes the prompt, whatever else the request says; of anything
    else, such as a body that was cut off on its way here, all of it.
    """
    text = body
    # The replica refuses what takes too long to decode.
    with contextlib.suppress(ValueError, RecursionError):
        check_text(body)
        request = json.loads(body)
        if isinstance(request, dict):
            text = prompt_text(request)
    hashes: list[bytes] = []
    end = min(len(text), MOST_BLOCKS * BLOCK_BYTES)
    for start in range(0, end - BLOCK_BYTES + 1, BLOCK_BYTES):
        parent = hashes[-1] if hashes else b""
        hashes.append(chain_hash(parent, text[start : start + BLOCK_BYTES]))
    return hashes


def prompt_text(request: Mapping[str, Any]) -> bytes:
    """The fields that become the prompt, so written that a conversation's text begins with the
    text of its first turns."""
    pieces = []
    for name in _FIELDS:
        value = request.get(name)
        items = value if isinstance(value, list) else [] if value is None else [value]
        # As they are: texts are most of a request, and need no quoting.
        pieces += [x if isinstance(x, str) else json.dumps(x, sort_keys=True) for x in items]
    return _SEPARATOR.join(piece.encode(errors="surrogatepass") for piece in pieces)


@dataclass
class _Seen:
    """What one replica was sent."""

    hashes: OrderedDict[bytes, None] = field(default_factory=OrderedDict)
    """Least recently sent first, as the replica's KV blocks are given up."""
    kv_tokens: int = DEFAULT_KV_TOKENS
    most_running: int = DEFAULT_RUNNING


class PrefixIndex(Generic[Replica]):
    """The texts that each replica was sent, as far as its KV pool can still hold them. What it has
    given up earlier is believed to be there, and costs a prefill when it is not."""

    def __init__(self) -> None:
        self._seen: dict[Replica, _Seen] = {}

    def resize(self, replica: Replica, kv_tokens: int, most_running: int) -> None:
        """A replica said how many tokens its KV pool holds, and requests its batch."""
        seen = self._seen.setdefault(replica, _Seen())
        seen.kv_tokens, seen.most_running = kv_tokens, most_running

    def keep_only(self, replicas: Sequence[Replica]) -> None:
        """Forget the other replicas: a new one starts without any KV."""
        self._seen = {name: self._seen[name] for name in replicas if name in self._seen}

    def size(self, replica: Replica) -> int:
        """Blocks that a replica is believed to hold."""
        seen = self._seen.get(replica)
        return len(seen.hashes) if seen is not None else 0

    def shared(self, replica: Replica, hashes: Sequence[bytes]) -> int:
        """How many leading blocks a replica is believed to hold."""
        seen = self._seen.get(replica)
        if seen is None:
            return 0
        return next((i for i, item in enumerate(hashes) if item not in seen.hashes), len(hashes))

    def record(self, replica: Replica, hashes: Sequence[bytes]) -> None:
        """A replica is sent this text."""
        seen = self._seen.setdefault(replica, _Seen())
        # A block is of use only with those before it: they are given up last.
        for item in reversed(hashes):
            seen.hashes[item] = None
            seen.hashes.move_to_end(item)
        most = max(1, seen.kv_tokens * BYTES_PER_TOKEN // BLOCK_BYTES)
        for item in list(islice(seen.hashes, max(0, len(seen.hashes) - most))):
            del seen.hashes[item]

    def choose(
        self, loads: Mapping[Replica, int], hashes: Sequence[bytes], chance: random.Random
    ) -> Replica:
        """The replica for a text, of those in ``loads`` (requests under way): of the one that
        shares most with it and two others at random, the one with the least work for it. Work is
        prompt tokens to compute; a request under way counts ``REQUEST_TOKENS``. Where the text
        would have to wait for a place in the batch, only what waits counts. Two at random, and not
        the least loaded of all, as many who choose by the same numbers would all choose it.
        """
        names = list(loads)
        shared = {name: self.shared(name, hashes) for name in names}
        candidates = set(chance.sample(names, min(2, len(names))))
        best = max(names, key=lambda name: (shared[name], -loads[name]))
        if shared[best]:
            candidates.add(best)

        def work(name: Replica) -> tuple[float, ...]:
            missing = (len(hashes) - shared[name]) * BLOCK_BYTES / BYTES_PER_TOKEN
            work = missing + REQUEST_TOKENS * loads[name]
            waiting = max(0, loads[name] + 1 - self._seen.get(name, _Seen()).most_running)
            # Among equals, the one with the most room for another conversation.
            return waiting, work, self.size(name), chance.random()

        return min(candidates, key=work)

"""KV as a transaction: reserve for the longest spans, commit what was accepted, roll back the rest.

No torch: the engine mirrors block tables to the device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Protocol

from surefoot.kv.block_pool import BlockPool, chain_hash, chain_hashes


class Text(Protocol):
    """What blocks hold the KV of."""

    computed: int
    """Leading positions whose KV is final."""

    @property
    def tokens(self) -> Sequence[int]:
        """All that are known."""
        ...

    def known(self, first: int, end: int) -> Sequence[int]:
        """Tokens ``first`` to ``end`` (exclusive)."""
        ...


class Lease:
    """The blocks of one running request's ``text``. ``drafters``: proposers whose own KV is written
    along with it."""

    __slots__ = ("blocks", "drafters", "hashes", "text")

    def __init__(self, text: Text, drafters: frozenset[str] = frozenset()) -> None:
        self.text = text
        self.drafters = drafters
        self.blocks: list[int] = []
        self.hashes: list[bytes] = []
        """Of the full blocks whose KV is final."""


class KVManager:
    """Leases blocks to requests and keeps the prefix cache."""

    def __init__(self, num_blocks: int, block_size: int, prefix_caching: bool = True) -> None:
        self.pool = BlockPool(num_blocks)
        self.block_size = block_size
        self.prefix_caching = prefix_caching
        self.leases: dict[str, Lease] = {}

    def blocks_for(self, positions: int) -> int:
        return -(-positions // self.block_size)

    def open(
        self,
        request_id: str,
        text: Text,
        use_cache: bool = True,
        drafters: frozenset[str] = frozenset(),
    ) -> int:
        """Start a lease with the longest cached prefix of ``text``, whole blocks only and at least
        one token short of all of them (that one must run to be sampled from). It ends before a
        block that lacks the KV of one of ``drafters``: what it holds runs again, so that drafts
        never rest on what was not written.

        Returns the number of positions found, which are computed now.
        """
        lease = self.leases[request_id] = Lease(text, drafters)
        if self.prefix_caching and use_cache:
            parent, tokens = b"", text.tokens
            for start in range(0, len(tokens) - self.block_size, self.block_size):
                parent = chain_hash(parent, tokens[start : start + self.block_size])
                block = self.pool.lookup(parent, drafters)
                if block is None:
                    break
                self.pool.share(block)
                lease.blocks.append(block)
                lease.hashes.append(parent)
        text.computed = len(lease.blocks) * self.block_size
        return text.computed

    def close(self, request_id: str) -> None:
        """End a lease: its full blocks are findable from now on. Its tail is released first, so
        that it is evicted before its prefix."""
        lease = self.leases.pop(request_id)
        self.keep(lease)
        for block in reversed(lease.blocks):
            self.pool.release(block)

    def keep(self, lease: Lease) -> None:
        """Its full blocks become findable. Of a prompt's this is done as soon as they are computed;
        what the text goes on with is looked for when it has ended, and waits for that."""
        size, text = self.block_size, lease.text
        if text.computed > size * len(lease.blocks):
            raise RuntimeError("computed beyond the reservation")
        first, end = len(lease.hashes), text.computed // size
        if not self.prefix_caching or first >= end:
            return
        parent = lease.hashes[-1] if lease.hashes else b""
        found = chain_hashes(parent, text.known(first * size, end * size), size)
        for block, content in zip(lease.blocks[first:end], found, strict=True):
            self.pool.register(block, content, lease.drafters)
        lease.hashes += found

    def give_back(self, lease: Lease) -> None:
        """End the reservation: whole blocks beyond what is computed, last in first out."""
        blocks = lease.blocks
        while (len(blocks) - 1) * self.block_size >= lease.text.computed:
            self.pool.release(blocks.pop())

    def clear(self) -> None:
        """No leases any more, and nothing in the prefix cache: a pool as if it were new."""
        self.leases.clear()
        self.pool = BlockPool(self.pool.num_blocks)

    def transaction(self) -> Transaction:
        return Transaction(self)

    def check_integrity(self) -> None:
        """Assert that the pool and the leases agree."""
        self.pool.check_integrity()
        counts = [0] * self.pool.num_blocks
        for lease in self.leases.values():
            assert lease.text.computed <= len(lease.blocks) * self.block_size
            for block in lease.blocks:
                counts[block] += 1
        assert counts == self.pool.references, "references and leases disagree"


class Transaction:
    """One round's changes to the leases.

    ``with kv.transaction() as transaction:`` reserve, run, keep. Leaving without ``keep``, by an
    exception or otherwise, gives back every block that was reserved.
    """

    def __init__(self, kv: KVManager) -> None:
        self.kv = kv
        self._blocks_before: dict[str, int] = {}

    def reserve(self, wanted: Mapping[str, int]) -> bool:
        """Make blocks for ``wanted[request]`` positions beyond the computed ones available to
        every request, or to none of them: returns whether there were enough."""
        kv = self.kv
        missing: dict[str, int] = {}
        for request, positions in wanted.items():
            lease = kv.leases[request]
            count = kv.blocks_for(lease.text.computed + positions) - len(lease.blocks)
            if count > 0:
                missing[request] = count
        if sum(missing.values()) > kv.pool.num_free:
            return False
        for request, count in missing.items():
            blocks = kv.leases[request].blocks
            self._blocks_before.setdefault(request, len(blocks))
            blocks += kv.pool.allocate(count)
        return True

    def keep(self) -> None:
        """What was reserved stays with the leases."""
        self._blocks_before.clear()

    def __enter__(self) -> Transaction:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for request, before in self._blocks_before.items():
            lease = self.kv.leases.get(request)
            if lease is not None:
                while len(lease.blocks) > before:
                    self.kv.pool.release(lease.blocks.pop())
        self._blocks_before.clear()

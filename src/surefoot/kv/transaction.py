"""KV as a transaction: reserve for the longest spans, commit what was accepted, roll back the rest.

No torch: the engine mirrors block tables to the device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import TracebackType

from surefoot.kv.block_pool import BlockPool, chain_hash


class Lease:
    """The blocks of one running request. ``committed`` counts positions whose KV is final;
    ``drafters``: proposers whose own KV is written along with it."""

    def __init__(self, drafters: frozenset[str] = frozenset()) -> None:
        self.drafters = drafters
        self.blocks: list[int] = []
        self.committed = 0
        self.hashes: list[bytes] = []
        self.partial: list[int] = []
        """Committed tokens of the last, not yet full block."""


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
        tokens: Sequence[int],
        use_cache: bool = True,
        drafters: frozenset[str] = frozenset(),
    ) -> int:
        """Start a lease with the longest cached prefix of ``tokens``, whole blocks only and at
        least one token short of all of them (that one must run to be sampled from). It ends before
        a block that lacks the KV of one of ``drafters``: what it holds runs again, so that drafts
        never rest on what was not written.

        Returns the number of positions found.
        """
        lease = self.leases[request_id] = Lease(drafters)
        if self.prefix_caching and use_cache:
            parent = b""
            for start in range(0, len(tokens) - self.block_size, self.block_size):
                parent = chain_hash(parent, tokens[start : start + self.block_size])
                block = self.pool.lookup(parent, drafters)
                if block is None:
                    break
                self.pool.share(block)
                lease.blocks.append(block)
                lease.hashes.append(parent)
        lease.committed = len(lease.blocks) * self.block_size
        return lease.committed

    def close(self, request_id: str) -> None:
        """End a lease. Its tail is released first, so that it is evicted before its prefix."""
        lease = self.leases.pop(request_id)
        for block in reversed(lease.blocks):
            self.pool.release(block)

    def keep(self, lease: Lease, tokens: Sequence[int]) -> None:
        """Keep the next ``len(tokens)`` positions, which hold these tokens' KV, and what is
        reserved beyond them. Full blocks become findable."""
        lease.committed += len(tokens)
        if lease.committed > len(lease.blocks) * self.block_size:
            raise RuntimeError("committed beyond the reservation")
        if self.prefix_caching:
            lease.partial += tokens
            if len(lease.partial) >= self.block_size:
                self._register(lease)

    def _register(self, lease: Lease) -> None:
        """Make the full blocks at hand findable."""
        size, partial = self.block_size, lease.partial
        while len(partial) >= size:
            parent = lease.hashes[-1] if lease.hashes else b""
            content = chain_hash(parent, partial[:size])
            self.pool.register(lease.blocks[len(lease.hashes)], content, lease.drafters)
            lease.hashes.append(content)
            del partial[:size]

    def give_back(self, lease: Lease) -> None:
        """End the reservation: whole blocks beyond the committed positions, last in first out."""
        blocks = lease.blocks
        while (len(blocks) - 1) * self.block_size >= lease.committed:
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
            assert lease.committed <= len(lease.blocks) * self.block_size
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
        """Make blocks for ``wanted[request]`` positions beyond the committed length available to
        every request, or to none of them: returns whether there were enough."""
        kv = self.kv
        missing = {
            request: kv.blocks_for(kv.leases[request].committed + positions)
            - len(kv.leases[request].blocks)
            for request, positions in wanted.items()
        }
        if sum(count for count in missing.values() if count > 0) > kv.pool.num_free:
            return False
        for request, count in missing.items():
            blocks = kv.leases[request].blocks
            self._blocks_before.setdefault(request, len(blocks))
            blocks.extend(kv.pool.allocate() for _ in range(count))
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

"""Blocks of the paged KV cache: reference counts, content hashes, least recently used eviction.

Plain Python, no tensors: block ids index whatever pools the target and the drafters keep.
"""

from __future__ import annotations

import hashlib
import struct
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import lru_cache


def chain_hash(parent: bytes, tokens: Sequence[int]) -> bytes:
    """Hash of a full block given the hash of the block before it (``b""`` for the first), so that
    equal hashes mean equal token prefixes."""
    return _hash(parent + _packer(len(tokens))(*tokens))


def chain_hashes(parent: bytes, tokens: Sequence[int], size: int) -> list[bytes]:
    """Of all full blocks of ``size`` tokens, one after the other."""
    packed, width = _packer(len(tokens))(*tokens), 4 * size
    hashes = []
    for end in range(width, len(packed) + 1, width):
        parent = _hash(parent + packed[end - width : end])
        hashes.append(parent)
    return hashes


def _hash(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=16).digest()


@lru_cache
def _packer(count: int) -> Callable[..., bytes]:
    return struct.Struct(f"<{count}I").pack


class BlockPool:
    """Ids 1 .. num_blocks - 1; block 0 is kept out for padding rows.

    A block is *used* (reference count above 0), or *free*. A free block may still carry the hash
    of its content and be taken back by a prefix hit until it is evicted, least recently used
    first.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.references = [0] * num_blocks
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, num_blocks))
        self._block_of: dict[bytes, int] = {}
        self._hash_of: dict[int, bytes] = {}
        self._drafters: dict[int, frozenset[str]] = {}
        """Of blocks with a hash: the proposers whose own KV is in them, beside the target's."""

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def capacity(self) -> int:
        return self.num_blocks - 1

    def allocate(self, count: int) -> list[int]:
        """Take the ``count`` least recently used free blocks; their old contents are forgotten.

        Raises IndexError when there are fewer: callers check ``num_free`` first.
        """
        free, references, known = self._free, self.references, self._hash_of
        if count > len(free):
            raise IndexError(f"{count} blocks wanted, {len(free)} free")
        blocks = [free.popitem(last=False)[0] for _ in range(count)]
        for block in blocks:
            references[block] = 1
            if block in known:
                self._forget(block)
        return blocks

    def _forget(self, block: int) -> None:
        """Nobody finds its content any more."""
        del self._block_of[self._hash_of.pop(block)], self._drafters[block]

    def share(self, block: int) -> None:
        """Add a reference to a block found by ``lookup``."""
        if self.references[block] == 0:
            del self._free[block]
        self.references[block] += 1

    def release(self, block: int) -> None:
        """Drop a reference. At zero the block joins the end of the eviction order, or its front
        when it holds nothing that could be hit again."""
        if self.references[block] <= 0:
            raise RuntimeError(f"block {block} released more often than taken")
        self.references[block] -= 1
        if self.references[block] == 0:
            self._free[block] = None
            if block not in self._hash_of:
                self._free.move_to_end(block, last=False)

    def register(self, block: int, content: bytes, drafters: frozenset[str] = frozenset()) -> None:
        """Make a full, written block findable, which also holds the KV of these ``drafters``. The
        first block of a content keeps the name, unless it lacks one of them."""
        if block in self._hash_of:
            return
        known = self._block_of.get(content)
        if known is not None:
            if drafters <= self._drafters[known]:
                return
            self._forget(known)
            if known in self._free:
                self._free.move_to_end(known, last=False)
        self._block_of[content] = block
        self._hash_of[block] = content
        self._drafters[block] = drafters

    def lookup(self, content: bytes, drafters: frozenset[str] = frozenset()) -> int | None:
        """The block of this content, if it holds the KV of all these ``drafters``."""
        block = self._block_of.get(content)
        return block if block is not None and drafters <= self._drafters[block] else None

    def check_integrity(self) -> None:
        """Assert that every block is either used or free, and that hashes pair up."""
        used = {block for block, count in enumerate(self.references) if count > 0}
        assert not used & set(self._free), "a block is used and free at once"
        assert used | set(self._free) == set(range(1, self.num_blocks)), "a block is lost"
        assert {self._hash_of[b]: b for b in self._hash_of} == self._block_of
        assert self._drafters.keys() == self._hash_of.keys()

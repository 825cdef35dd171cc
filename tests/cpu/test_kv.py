"""The KV transaction and the prefix cache against a brute-force model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from surefoot.kv.block_pool import BlockPool, chain_hash
from surefoot.kv.transaction import KVManager


@dataclass
class Words:
    """A text, of which as much is computed as there is KV of."""

    tokens: list[int]
    computed: int = 0

    def known(self, first: int, end: int) -> list[int]:
        return self.tokens[first:end]


def opened(
    kv: KVManager, name: str, tokens: list[int], drafters: frozenset[str] = frozenset()
) -> int:
    return kv.open(name, Words(list(tokens)), drafters=drafters)


def keep(kv: KVManager, name: str, tokens: list[int]) -> None:
    """These come next, and their KV is final."""
    text = kv.leases[name].text
    assert isinstance(text, Words)
    text.tokens[text.computed : text.computed + len(tokens)] = tokens
    text.computed += len(tokens)
    kv.keep(kv.leases[name])


def filled(
    kv: KVManager, name: str, tokens: list[int], drafters: frozenset[str] = frozenset()
) -> int:
    """Open a lease for a text and commit all of it; returns the positions found in the cache."""
    hit = opened(kv, name, tokens, drafters)
    with kv.transaction() as transaction:
        assert transaction.reserve({name: len(tokens) - hit})
        keep(kv, name, tokens[hit:])
        transaction.keep()
    return hit


def test_reserve_is_all_or_none() -> None:
    kv = KVManager(num_blocks=6, block_size=4)
    opened(kv, "a", [1])
    opened(kv, "b", [2])
    with kv.transaction() as transaction:
        assert not transaction.reserve({"a": 8, "b": 16})
        assert kv.pool.num_free == 5
        assert transaction.reserve({"a": 8, "b": 12})
        assert kv.pool.num_free == 0


def test_whole_unused_blocks_can_be_given_back() -> None:
    kv = KVManager(num_blocks=10, block_size=4)
    opened(kv, "a", [1])
    with kv.transaction() as transaction:
        assert transaction.reserve({"a": 17})
        assert len(kv.leases["a"].blocks) == 5
        kept = kv.leases["a"].blocks[:2]
        keep(kv, "a", [1, 2, 3, 4, 5])
        transaction.keep()
    assert len(kv.leases["a"].blocks) == 5
    kv.give_back(kv.leases["a"])
    assert kv.leases["a"].blocks == kept


def test_an_exception_rolls_back() -> None:
    kv = KVManager(num_blocks=10, block_size=4)
    opened(kv, "a", [1])
    with pytest.raises(ZeroDivisionError), kv.transaction() as transaction:
        transaction.reserve({"a": 9})
        raise ZeroDivisionError
    assert kv.leases["a"].blocks == []
    kv.check_integrity()


def test_what_is_not_kept_is_rolled_back() -> None:
    kv = KVManager(num_blocks=10, block_size=4)
    opened(kv, "a", [1])
    with kv.transaction() as transaction:
        assert transaction.reserve({"a": 4})
        transaction.keep()
    with kv.transaction() as transaction:
        assert transaction.reserve({"a": 16})
    assert len(kv.leases["a"].blocks) == 1
    kv.check_integrity()


def test_prefix_hits_are_whole_blocks_and_leave_a_token_to_run() -> None:
    kv = KVManager(num_blocks=20, block_size=4)
    text = list(range(12))
    filled(kv, "a", text)
    assert opened(kv, "same", text) == 8
    assert opened(kv, "longer", [*text, 99]) == 12
    assert opened(kv, "other", [*text[:5], 77, 78, 79]) == 4
    assert kv.leases["longer"].blocks[:2] == kv.leases["same"].blocks


def test_equal_blocks_after_different_prefixes_are_different() -> None:
    kv = KVManager(num_blocks=20, block_size=2)
    filled(kv, "a", [1, 2, 3, 4, 5])
    assert opened(kv, "b", [9, 9, 3, 4, 5]) == 0


def test_a_hit_ends_before_a_block_without_the_drafters_own_kv() -> None:
    kv, text = KVManager(num_blocks=20, block_size=4), list(range(12))
    one, both = frozenset({"a"}), frozenset({"a", "b"})
    filled(kv, "none", text)
    # What runs again is found from then on, by those who need less, too.
    for name, drafters, hit in (
        ("first", both, 0), ("second", both, 8), ("third", one, 8), ("fourth", frozenset(), 8),
    ):  # fmt: skip
        assert filled(kv, name, [*text[:8], 99], drafters) == hit
        kv.check_integrity()
    # The last block of the text is still the one that holds the target's KV alone.
    assert opened(kv, "plain", [*text, 99]) == 12
    assert opened(kv, "longer", [*text, 99], one) == 8
    for name in list(kv.leases):
        kv.close(name)
    kv.check_integrity()
    assert kv.pool.num_free == kv.pool.capacity


def test_a_block_that_lost_its_name_is_taken_first() -> None:
    kv, drafters = KVManager(num_blocks=6, block_size=2), frozenset({"a"})
    filled(kv, "old", [1, 2, 3, 4])
    old = list(kv.leases["old"].blocks)
    kv.close("old")
    filled(kv, "new", [1, 2], drafters)
    kv.check_integrity()
    filled(kv, "other", [9])
    assert kv.leases["other"].blocks == old[:1]
    kv.check_integrity()


def test_least_recently_used_content_is_evicted_first_and_tails_before_prefixes() -> None:
    kv = KVManager(num_blocks=5, block_size=2)
    filled(kv, "old", [1, 2, 3, 4])
    kv.close("old")
    filled(kv, "new", [5, 6, 7, 8])
    kv.close("new")
    filled(kv, "filler", [9])
    assert opened(kv, "x", [1, 2, 3, 4, 0]) == 2  # the tail went, the prefix stayed
    assert opened(kv, "y", [5, 6, 7, 8, 0]) == 4


def test_blocks_without_findable_content_are_taken_before_cached_ones() -> None:
    kv = KVManager(num_blocks=6, block_size=2)
    filled(kv, "cached", [1, 2, 3, 4])
    kv.close("cached")
    filled(kv, "partial", [9])
    kv.close("partial")
    filled(kv, "filler", [7, 7, 8, 8, 6])
    assert opened(kv, "again", [1, 2, 3, 4, 0]) == 4


def test_a_rejected_draft_never_becomes_findable() -> None:
    kv = KVManager(num_blocks=20, block_size=4)
    opened(kv, "a", [1, 2])
    with kv.transaction() as transaction:
        transaction.reserve({"a": 6})
        keep(kv, "a", [1, 2])
        transaction.keep()
    with kv.transaction() as transaction:
        transaction.reserve({"a": 6})
        keep(kv, "a", [7, 8])
        transaction.keep()
    assert opened(kv, "b", [1, 2, 7, 8, 5]) == 4
    assert opened(kv, "c", [1, 2, 3, 4, 5]) == 0


def test_nothing_is_kept_beyond_the_reservation() -> None:
    kv = KVManager(num_blocks=6, block_size=4)
    opened(kv, "a", [1, 2])
    assert kv.transaction().reserve({"a": 4})
    with pytest.raises(RuntimeError, match="reservation"):
        keep(kv, "a", [1, 2, 3, 4, 5])


def test_caching_can_be_off() -> None:
    kv = KVManager(num_blocks=20, block_size=4, prefix_caching=False)
    filled(kv, "a", list(range(9)))
    assert opened(kv, "b", list(range(9))) == 0


def test_releasing_twice_is_an_error() -> None:
    pool = BlockPool(3)
    [block] = pool.allocate(1)
    pool.release(block)
    with pytest.raises(RuntimeError):
        pool.release(block)


@given(st.lists(st.integers(0, 2**31), max_size=8), st.lists(st.integers(0, 2**31), max_size=8))
def test_chain_hash_depends_on_every_token(left: list[int], right: list[int]) -> None:
    assert (chain_hash(b"p", left) == chain_hash(b"p", right)) == (left == right)


class Transactions(RuleBasedStateMachine):
    """Random lives of requests; a dictionary says what each one's KV must hold."""

    def __init__(self) -> None:
        super().__init__()
        self.kv = KVManager(num_blocks=13, block_size=3)
        self.texts: dict[str, list[int]] = {}
        self.content: dict[int, tuple[int, ...]] = {}
        self.names = 0
        self.ahead: set[str] = set()
        """Who may hold blocks beyond what is committed."""

    @rule(text=st.lists(st.integers(0, 1), min_size=1, max_size=12))
    def open(self, text: list[int]) -> None:
        name = f"r{self.names}"
        self.names += 1
        hit = opened(self.kv, name, text)
        self.texts[name] = text[:hit]
        for index, block in enumerate(self.kv.leases[name].blocks):
            # What a hit block was last written with must be this very prefix.
            assert self.content[block] == tuple(text[: (index + 1) * 3])

    @precondition(lambda self: self.texts)
    @rule(data=st.data(), extra=st.integers(0, 5), fail=st.booleans())
    def round(self, data: Any, extra: int, fail: bool) -> None:
        names = data.draw(st.sets(st.sampled_from(sorted(self.texts)), min_size=1))
        tokens = {name: data.draw(st.lists(st.integers(0, 1), max_size=6)) for name in names}
        free = self.kv.pool.num_free
        try:
            with self.kv.transaction() as transaction:
                if not transaction.reserve({n: len(t) + extra for n, t in tokens.items()}):
                    assert self.kv.pool.num_free == free
                    return
                if fail:
                    raise ZeroDivisionError
                transaction.keep()
                for name, new in tokens.items():
                    self.texts[name] += new
                    keep(self.kv, name, new)
                    self.kv.give_back(self.kv.leases[name])
                    self.ahead.discard(name)
                    self._write(name)
        except ZeroDivisionError:
            assert self.kv.pool.num_free == free

    @precondition(lambda self: self.texts)
    @rule(data=st.data(), extra=st.integers(0, 9))
    def reserve_ahead(self, data: Any, extra: int) -> None:
        """Outside a round, as for rounds that are launched before others are read."""
        names = data.draw(st.sets(st.sampled_from(sorted(self.texts)), min_size=1))
        free = self.kv.pool.num_free
        if self.kv.transaction().reserve(dict.fromkeys(names, extra)):
            self.ahead |= names
        else:
            assert self.kv.pool.num_free == free

    @precondition(lambda self: self.texts)
    @rule(data=st.data())
    def keep(self, data: Any) -> None:
        name = data.draw(st.sampled_from(sorted(self.texts)))
        lease = self.kv.leases[name]
        room = len(lease.blocks) * 3 - lease.text.computed
        new = data.draw(st.lists(st.integers(0, 1), max_size=room))
        held = list(lease.blocks)
        keep(self.kv, name, new)
        assert lease.blocks == held
        self.texts[name] += new
        self._write(name)

    @precondition(lambda self: self.texts)
    @rule(data=st.data())
    def give_back(self, data: Any) -> None:
        name = data.draw(st.sampled_from(sorted(self.texts)))
        self.kv.give_back(self.kv.leases[name])
        self.ahead.discard(name)

    def _write(self, name: str) -> None:
        text = self.texts[name]
        for index, block in enumerate(self.kv.leases[name].blocks):
            if (index + 1) * 3 <= len(text):
                self.content[block] = tuple(text[: (index + 1) * 3])

    @precondition(lambda self: self.texts)
    @rule(data=st.data())
    def close(self, data: Any) -> None:
        name = data.draw(st.sampled_from(sorted(self.texts)))
        self.kv.close(name)
        self.ahead.discard(name)
        del self.texts[name]

    @invariant()
    def whole(self) -> None:
        self.kv.check_integrity()
        for name, text in self.texts.items():
            assert self.kv.leases[name].text.computed == len(text)
            blocks = -(-len(text) // 3)
            held = len(self.kv.leases[name].blocks)
            assert held >= blocks if name in self.ahead else held == blocks


TestTransactions = Transactions.TestCase
TestTransactions.settings = settings(max_examples=150, stateful_step_count=30)

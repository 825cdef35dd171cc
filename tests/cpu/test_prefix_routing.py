"""Which replica gets a request: prefixes in common, loads, and what is known of both."""

from __future__ import annotations

import json
import random
from itertools import takewhile
from typing import Any

import pytest

from surefoot.ray.loads import ARRIVAL_SECONDS, NEW_SECONDS, Ages, Loads
from surefoot.ray.prefixes import BLOCK_BYTES, MOST_BLOCKS, PrefixIndex, prefix_hashes

LONG = "You are a careful assistant who answers briefly. " * 8


def body(**fields: object) -> bytes:
    return json.dumps(fields).encode()


def in_common(a: bytes, b: bytes) -> int:
    """Leading blocks that two bodies' hashes share."""
    pairs = zip(prefix_hashes(a), prefix_hashes(b), strict=False)
    return len(list(takewhile(lambda pair: pair[0] == pair[1], pairs)))


def chat(*texts: str, **fields: object) -> bytes:
    roles = ["user", "assistant"]
    messages = [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]
    return body(messages=messages, **fields)


def test_a_conversation_begins_with_its_first_turns() -> None:
    first = chat(LONG)
    later = chat(LONG, "An answer.", "And another question?")
    assert in_common(first, later) == len(prefix_hashes(first)) > 3


def test_what_else_a_request_says_does_not_matter() -> None:
    first = chat(LONG, seed=1, stream=True)
    other = body(user="x" * 100, temperature=0.5, messages=[{"content": LONG, "role": "user"}])
    assert prefix_hashes(first) == prefix_hashes(other)


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt": LONG},
        {"prompt": list(range(400))},
        {"input": LONG},
        {"system": LONG, "messages": [{"role": "user", "content": "Hi"}]},
        {"instructions": LONG, "input": "Hi"},
        {"tools": [{"type": "function", "function": {"name": LONG}}], "messages": []},
    ],
    ids=lambda fields: "+".join(fields),
)
def test_every_api_has_a_prefix(fields: dict[str, Any]) -> None:
    hashes = prefix_hashes(body(**fields))
    assert len(hashes) >= 5
    [name, value] = next(iter(fields.items()))
    changed = {**fields, name: ["other", *value] if isinstance(value, list) else "other" + value}
    assert in_common(body(**fields), body(**changed)) == 0


def test_a_difference_counts_from_its_block_on() -> None:
    text = "a" * (10 * BLOCK_BYTES)
    other = text[: 4 * BLOCK_BYTES] + "b" + text[4 * BLOCK_BYTES + 1 :]
    assert in_common(body(prompt=text), body(prompt=other)) == 4


def test_what_is_no_json_object_still_has_a_prefix() -> None:
    whole = chat(LONG * 3)
    cut = whole[:700]
    assert len(prefix_hashes(cut)) == 700 // BLOCK_BYTES
    assert prefix_hashes(cut) == prefix_hashes(whole[:720])[: 700 // BLOCK_BYTES]
    for odd in (b"", b"[1, 2]", b"\xff\xfe", body(prompt=None), body(messages="x\ud800")):
        assert len(prefix_hashes(odd)) == 0


def test_hostile_bodies_have_prefixes_too() -> None:
    deep = b'{"messages": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    digits = b'{"prompt": ' + b"9" * 10_000 + b"}"
    for hostile in (deep, digits):
        assert len(prefix_hashes(hostile)) == min(MOST_BLOCKS, len(hostile) // BLOCK_BYTES)


def test_long_texts_are_not_looked_through() -> None:
    hashes = prefix_hashes(body(prompt="a" * (BLOCK_BYTES * (MOST_BLOCKS + 5))))
    assert len(hashes) == MOST_BLOCKS


def index_of(**texts: bytes) -> PrefixIndex[str]:
    index: PrefixIndex[str] = PrefixIndex()
    for name, text in texts.items():
        index.record(name, prefix_hashes(text))
    return index


def choices(index: PrefixIndex[str], text: bytes, **loads: int) -> set[str]:
    """Whom a text may go to, over many draws."""
    hashes = prefix_hashes(text)
    return {index.choose(loads, hashes, random.Random(seed)) for seed in range(50)}


def test_a_prefix_leads_to_its_replica() -> None:
    index = index_of(a=chat(LONG), b=chat("Something else altogether. " * 20))
    assert choices(index, chat(LONG, "x", "y"), a=1, b=1, c=0) == {"a"}


def test_a_busy_replica_gives_its_prefix_away() -> None:
    index = index_of(a=chat(LONG))
    blocks = len(prefix_hashes(chat(LONG)))
    # A request under way counts as much as 64 tokens, 4 blocks of text.
    enough = blocks // 4 + 1
    assert choices(index, chat(LONG), a=enough - 2, b=0) == {"a"}
    assert choices(index, chat(LONG), a=enough + 1, b=0) == {"b"}


def test_nobody_waits_for_a_prefix() -> None:
    index = index_of(a=chat(LONG * 20))
    index.resize("a", 1 << 20, 4)
    index.resize("b", 1 << 20, 4)
    assert choices(index, chat(LONG * 20), a=3, b=0) == {"a"}
    assert choices(index, chat(LONG * 20), a=4, b=0) == {"b"}
    assert choices(index, chat(LONG * 20), a=9, b=6) == {"b"}
    assert choices(index, chat(LONG * 20), a=6, b=6) == {"a"}


def test_new_texts_go_where_less_is_under_way() -> None:
    assert choices(index_of(), chat(LONG), a=3, b=1) == {"b"}
    # Of two at random: the idlest of many is not everybody's choice, the busiest nobody's.
    assert choices(index_of(), chat(LONG), a=0, b=1, c=2, d=9) == {"a", "b", "c"}


def test_new_texts_go_where_there_is_room() -> None:
    index = index_of(a=chat(LONG), b=b"")
    assert choices(index, chat("Something else altogether. " * 20), a=0, b=0) == {"b"}


def test_what_a_pool_cannot_hold_is_forgotten() -> None:
    index = index_of()
    index.resize("a", 64, 8)  # 256 bytes: four blocks.
    first, second = (prefix_hashes(body(prompt=x * BLOCK_BYTES * 3)) for x in "xy")
    index.record("a", first)
    index.record("a", second)
    # Least recently sent first, and of a text its end.
    assert (index.shared("a", first), index.shared("a", second)) == (1, 3)
    index.record("a", first)
    assert (index.shared("a", first), index.shared("a", second)) == (3, 1)
    assert index.size("a") == 4


def test_a_replica_that_is_gone_has_nothing() -> None:
    index = index_of(a=chat(LONG), b=chat(LONG))
    index.keep_only(["b", "c"])
    assert index.shared("a", prefix_hashes(chat(LONG))) == 0 < index.size("b")


def test_loads_are_what_was_said_and_what_was_sent_since() -> None:
    now = 10.0
    loads: Loads[str] = Loads(lambda: now)
    loads.send("a")
    loads.send("a")
    assert (loads.of("a"), loads.of("b")) == (2, 0)
    # Asked at once: the two may not have arrived.
    loads.tell("a", 5, asked=now)
    assert loads.of("a") == 7
    now += 1
    loads.send("a")
    loads.tell("a", 4, asked=now)
    assert loads.of("a") == 5
    loads.tell("a", 0, asked=now + 2 * ARRIVAL_SECONDS)
    assert loads.of("a") == 0
    loads.send("a")
    loads.keep_only(["b"])
    assert loads.of("a") == 0


def test_new_replicas_are_left_out_while_there_are_others() -> None:
    """The proxy does not know them yet."""
    now = 10.0
    ages: Ages[str] = Ages(lambda: now)
    ages.keep_only(["a", "b"])
    assert ages.without_new(["a", "b"]) == ["a", "b"], "there is nobody else"
    now += NEW_SECONDS
    ages.keep_only(["b", "c"])
    assert ages.without_new(["b", "c", "d"]) == ["b"]
    assert ages.without_new(["c"]) == ["c"]
    now += NEW_SECONDS
    ages.keep_only(["c", "a"])
    assert ages.without_new(["c", "a"]) == ["c"]

"""Requests that come and go: what is kept of them is what asking each of them tells."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from surefoot.engine.batch import Members, Wishes, group
from surefoot.request import Request, SamplingParams, SpeculationParams

SLOTS, NAMES = 6, {0: "ngram", 2: "drafter"}
PARAMS = (
    SamplingParams(temperature=0),
    SamplingParams(temperature=0.8, logprobs=2),
    SamplingParams(temperature=1.0, top_p=0.9),
)
CHOICES = (
    SpeculationParams(),
    SpeculationParams("ngram", 2),
    SpeculationParams("off"),
)


def request(name: str, params: int, choice: int, declines: bool) -> Request:
    """One that wants this; requests that want the same share what is noted of it."""
    declined = frozenset({"drafter"} if declines else ())
    new = Request(name, (1, 2), PARAMS[params], CHOICES[choice], 0, 9, declined=declined)
    Wishes.note([new])
    return new


@settings(max_examples=200)
@given(
    st.lists(
        st.tuples(
            st.sets(st.integers(0, SLOTS - 1)),
            st.lists(
                st.tuples(st.integers(0, 2), st.integers(0, 2), st.booleans()), max_size=SLOTS
            ),
            st.booleans(),
        ),
        max_size=8,
    )
)
def test_whoever_comes_and_goes_all_is_as_if_each_was_asked(
    steps: Sequence[tuple[set[int], Sequence[tuple[int, int, bool]], bool]],
) -> None:
    """Some leave slots, others get these in the same step, and now and then nobody asks between."""
    left = np.zeros(SLOTS, dtype=np.int64)
    members, running, count = Members(left), list[Request](), 0
    for leaving, wanted, asks in steps:
        gone = [each for each in running if each.slot in leaving]
        for each in gone:
            running.remove(each)
            left[each.slot] += 1
            # Somebody else has it now, or nobody; and what it wants next is another thing.
            each.slot = -1
        free = [slot for slot in range(SLOTS) if slot not in {each.slot for each in running}]
        assert members.drop_left() == bool(gone)
        new = []
        for slot, (params, choice, declines) in zip(free, wanted, strict=False):
            new.append(request(f"r{count}", params, choice, declines))
            new[-1].slot, count = slot, count + 1
        members.join(new)
        running += new
        assert len(members) == len(running) and list(members.requests) == running
        if not asks:
            continue
        own, expected = members.group(NAMES, 4), group(running, NAMES, 4)
        assert own.slots.tolist() == expected.slots.tolist()
        for name in (
            "requests", "kind", "proposers", "draft_limit", "logprobs", "scored", "masked",
        ):  # fmt: skip
            assert getattr(own, name) == getattr(expected, name), name

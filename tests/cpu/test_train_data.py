"""Token shards by the target itself: what is in them, what is left out, and going on."""

from __future__ import annotations

import itertools
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from surefoot import LLM, SamplingParams, SurefootError
from surefoot.cli.train import read_asked
from surefoot.train.conversations import Asked
from surefoot.train.filters import Seen, before_loop, prompt_key, reason_to_drop, repeated_share
from surefoot.train.generate import DataOptions, DataSummary, generate_data
from surefoot.train.openings import opening
from surefoot.train.shards import Document, read_shard, shard_paths, write_shard
from tiny_models import tiny_hf_model

OPTIONS = DataOptions(
    tokens=120, shard_prompts=6, max_tokens=24, max_prompt=400, min_tokens=4, seed=3
)
WORDS = ["cat", "sat", "mat", "dog", "ate", "hat", "step", "surefoot", "goes"]


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    folder = tiny_hf_model("llama", tmp_path_factory.mktemp("target"))
    return LLM(str(folder), dtype="float32", proposers=(), calibration_seconds=0.0)


def asked(count: int = 12) -> list[Asked]:
    texts = [f"{WORDS[n % 9]} {WORDS[(n // 2) % 9]} {n}?" for n in range(count)]
    return [Asked(text, prompt_key(text), [{"role": "user", "content": text}]) for text in texts]


def make(llm: LLM, folder: Path, prompts: Any = (), **changes: Any) -> DataSummary:
    chosen = asked() if prompts == () else prompts
    return generate_data(llm, folder, replace(OPTIONS, **changes), chosen, lambda *_: None)


def documents(folder: Path) -> list[tuple[list[int], list[int], float]]:
    """(ids, mask, temperature) of every document."""
    found = []
    for path in shard_paths(folder):
        shard = read_shard(path)
        ends = np.cumsum(shard["lengths"])
        for start, end, kind in zip(
            ends - shard["lengths"], ends, shard["temperature"], strict=True
        ):
            found.append(
                (shard["ids"][start:end].tolist(), shard["mask"][start:end].tolist(), kind)
            )
    return found


def test_documents_are_the_engines_own_ids(llm: LLM, tmp_path: Path) -> None:
    make(llm, tmp_path, greedy=1.0)
    found = documents(tmp_path)
    assert found
    prompts = [llm.render_chat(item.messages or []) for item in asked()]
    for ids, mask, temperature in found:
        prompt, answer = ids[: mask.index(1)], ids[mask.index(1) :]
        assert prompt in prompts and temperature == 0
        assert sum(mask) == len(answer), "the mask is one piece at the end"
        params = SamplingParams(temperature=0, max_tokens=OPTIONS.max_tokens)
        [output] = llm.generate([{"prompt_token_ids": prompt}], params)
        assert answer == output.outputs[0].token_ids
        # The end token is generated, so it is learned.
        assert answer[-1] == 2 or len(answer) == OPTIONS.max_tokens


def test_every_turn_of_the_users_is_answered(llm: LLM, tmp_path: Path) -> None:
    turns = ("and the dog?", "step by step")
    talks = [replace(item, later=turns[: n % 3]) for n, item in enumerate(asked(9))]
    make(llm, tmp_path, talks, greedy=1.0, max_tokens=12, min_tokens=1, tokens=10_000)
    found, between = documents(tmp_path), []
    assert len(found) == 9
    for ids, mask, _ in found:
        edges = np.flatnonzero(np.diff([0, *mask, 0])).reshape(-1, 2).tolist()
        assert edges[-1][1] == len(ids), "nothing follows the last answer"
        for first, end in edges:
            params = SamplingParams(temperature=0, max_tokens=12)
            [output] = llm.generate([{"prompt_token_ids": ids[:first]}], params)
            assert ids[first:end] == output.outputs[0].token_ids
        for (_, end), (first, _) in itertools.pairwise(edges):
            between.append((ids[end - 1 : end] == [2], llm.tokenizer.decode(ids[end:first])))
    assert len(between) == 3 * (1 + 2), "a third has one more turn, a third has two"
    for ended, text in between:
        # As a client's next request would be rendered; its own end token is not there twice.
        turn = next(turn for turn in turns if turn in text)
        end = "" if ended else "<|im_end|>"
        assert text == f"{end}\n<|im_start|>user\n{turn}<|im_end|>\n<|im_start|>assistant\n"


def test_a_conversation_that_grows_too_long_keeps_what_it_has(llm: LLM, tmp_path: Path) -> None:
    talk = replace(asked(1)[0], later=("sat " * 200, "mat"))
    make(llm, tmp_path, [talk], greedy=1.0, max_prompt=300)
    [(_, mask, _)] = documents(tmp_path)
    assert np.count_nonzero(np.diff([0, *mask, 0]) > 0) == 1


def test_conversations_of_a_file_are_asked_without_their_answers(tmp_path: Path) -> None:
    user, said = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello!"}
    system = {"role": "system", "content": "Be brief."}
    entries: list[dict[str, Any]] = [
        {"prompt": "Once"},
        {"turns": ["One", "Two"]},
        {"messages": [system, user, said, {"role": "user", "content": "Why?"}, said]},
        {"messages": [system, user]},
    ]
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(map(json.dumps, entries)))
    once, turns, talk, single = read_asked(path)
    assert (once.text, once.messages, once.later) == ("Once", None, ())
    assert turns.messages == [{"role": "user", "content": "One"}] and turns.later == ("Two",)
    assert talk.messages == [system, user] and talk.later == ("Why?",)
    assert single.messages == [system, user] and single.key != talk.key
    tool = {"role": "tool", "content": "3"}
    for wrong in ([said], [user, said, tool], [user, said, {"role": "user", "content": [said]}]):
        path.write_text(json.dumps({"messages": wrong}))
        with pytest.raises(SurefootError, match="no conversation that can be written anew"):
            read_asked(path)


def test_an_ended_run_goes_on_to_the_same_files(llm: LLM, tmp_path: Path) -> None:
    whole = make(llm, tmp_path / "whole", tokens=10_000)
    assert whole.complete and whole.shards == 2, "all prompts are used"
    make(llm, tmp_path / "parts", tokens=1)
    assert len(shard_paths(tmp_path / "parts")) == 1
    # Killed while it wrote the second shard.
    (tmp_path / "parts" / "shard-00001.unfinished").write_bytes(b"half")
    again = make(llm, tmp_path / "parts", tokens=10_000)
    assert again.generated_tokens == whole.generated_tokens
    for left, right in zip(
        shard_paths(tmp_path / "whole"), shard_paths(tmp_path / "parts"), strict=True
    ):
        assert left.read_bytes() == right.read_bytes()
    with pytest.raises(SurefootError, match="seed = 3, not 4"):
        make(llm, tmp_path / "parts", seed=4)


def test_duplicates_are_found_across_an_interruption(llm: LLM, tmp_path: Path) -> None:
    make(llm, tmp_path, asked(6) * 2, tokens=1)
    first = len(documents(tmp_path))
    summary = make(llm, tmp_path, asked(6) * 2, tokens=10_000)
    keys = np.concatenate([read_shard(path)["keys"] for path in shard_paths(tmp_path)])
    assert first and len(np.unique(keys[:, 0])) == len(keys)
    assert summary.dropped["duplicate"] >= first


def test_the_target_writes_the_prompts_too(
    llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("surefoot.train.conversations._TURN_TOKENS", 40)
    summary = make(llm, tmp_path, None, max_prompt=500, shard_prompts=4, tokens=20)
    begun = opening(llm.tokenizer, None)
    for ids, mask, _ in documents(tmp_path):
        assert ids[1 : len(begun)] == begun[1:] or ids.count(1) == 3  # under a system text
        assert 0 < sum(mask) < len(ids)
    assert summary.generated_tokens >= 20
    shutil.rmtree(tmp_path)
    with pytest.raises(SurefootError, match="none of the target's own"):
        make(llm, tmp_path, None, max_prompt=1, shard_prompts=2)


def test_what_is_left_out() -> None:
    varied = list(range(40))
    seen = Seen([(7, 8)])
    assert reason_to_drop(40, (1, 2), seen, 14) is None
    assert reason_to_drop(13, (1, 2), seen, 14) == "short"
    assert before_loop([*varied, 1, 2, 3, 4, *range(9)]) == [*varied, 1, 2, 3, 4]
    assert before_loop(varied) == varied
    assert reason_to_drop(40, (7, 2), seen, 14) == "duplicate"
    assert reason_to_drop(40, (1, 8), seen, 14) == "duplicate"
    # 40 tokens have 33 8-grams; of 8 more that repeat the start one is old.
    assert repeated_share([*varied, *varied[:8]]) == pytest.approx(1 / 41)
    assert prompt_key("What is a Tide?") == prompt_key("what is  a tide")
    assert prompt_key("What is a tide?") != prompt_key("What is a tithe?")
    assert prompt_key("a b c", 2) == prompt_key("a b d", 2)


def test_shards_hold_large_vocabularies(tmp_path: Path) -> None:
    for vocab, kind in ((1 << 16, np.uint16), (1 << 17, np.int32)):
        path = tmp_path / f"{vocab}.safetensors"
        write_shard(path, [Document([3, vocab - 1], [(1, 2)], 0.5, (1, 2))], vocab, {})
        shard = read_shard(path)
        assert shard["ids"].tolist() == [3, vocab - 1] and shard["ids"].dtype == kind
        assert shard["mask"].tolist() == [0, 1]
    path.write_bytes(path.read_bytes()[:40])
    with pytest.raises(SurefootError, match="cannot be read"):
        read_shard(path)

"""Servers as users start them, on a tiny model whose texts hold multi-byte characters."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from surefoot import LLM, SamplingParams
from tiny_models import SPECIALS, tiny_weights, write_tokenizer

OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    # It takes its time, so that there is some in which something can happen to a request.
    "backend": "torch",
    "threads": 1,
    "max_num_seqs": 8,
    # Drafts whether they pay or not: the texts must not change.
    "draft_policy": "fixed",
    "max_draft_tokens": 4,
}
TOOL_TEMPLATE = (
    "{% if tools %}<|im_start|>tools\n{{ tools | tojson }}, in <tool_call><|im_end|>\n{% endif %}"
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' "
    "+ message['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LIMIT = 120.0
LOOP = "the cat sat on the mat and the cat sat on the mat and the cat"


def emoji_model(folder: Path, max_positions: int = 512) -> Path:
    """A random Llama with ``write_emoji_tokenizer``'s tokenizer; it has more rows than that has
    tokens. Returns its folder. (Written without transformers, which takes seconds to import.)"""
    from safetensors.torch import save_file

    path = write_tokenizer(folder / "llama-0")
    write_emoji_tokenizer(path)
    config, weights = tiny_weights("llama", vocab_size=288, max_positions=max_positions)
    save_file(weights, path / "model.safetensors")
    settings = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.max_positions,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": config.eos_token_ids[0],
        "tie_word_embeddings": config.tied_embeddings,
    }
    (path / "config.json").write_text(json.dumps(settings), encoding="utf-8")
    return path


def write_emoji_tokenizer(path: Path) -> None:
    """A tokenizer that cuts emoji and accents into pieces that are no characters by themselves,
    and a chat template that takes tools."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=261,
        special_tokens=SPECIALS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    # Two merges: the three bytes that both emoji begin with.
    tokenizer.train_from_iterator(["🙂🙃" * 50], trainer)
    (path / "tokenizer.json").write_text(tokenizer.to_str(), encoding="utf-8")
    (path / "chat_template.jinja").write_text(TOOL_TEMPLATE, encoding="utf-8")


def only(llm: LLM, text: str, bias: float = 100.0) -> dict[int, float]:
    """A logit bias under which texts are made of the tokens of ``text``."""
    return {token: bias for token in llm.tokenizer.encode(text)}


@dataclass
class Server:
    """A running server. ``lines``: what it wrote on stderr."""

    process: subprocess.Popen[str]
    url: str = ""
    lines: list[str] = field(default_factory=list)

    def post(self, path: str, **body: Any) -> httpx.Response:
        return httpx.post(self.url + path, json=body, timeout=LIMIT)

    def get(self, path: str, **options: Any) -> httpx.Response:
        return httpx.get(self.url + path, timeout=LIMIT, **options)

    def complete(self, **body: Any) -> dict[str, Any]:
        """An answer of ``/v1/completions``."""
        answer = self.post("/v1/completions", **body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def metric(self, name: str) -> float:
        """Sum of a metric's samples of exactly this name."""
        lines = re.findall(
            rf"^{re.escape(name)}(?:{{.*}})? (\S+)$", self.get("/metrics").text, re.M
        )
        assert lines, f"there is no metric {name}"
        return sum(map(float, lines))

    @property
    def core(self) -> int:
        """Process id of the core."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        [child] = children.read_text().split()
        return int(child)

    def wait_idle(self) -> None:
        """Until nothing runs, waits, or holds blocks."""
        names = ("requests_running", "requests_waiting", "kv_usage_ratio")
        wait_for(lambda: not any(self.metric(f"surefoot_{name}") for name in names))

    def stop(self) -> int:
        """End it in good order; its status."""
        self.process.send_signal(signal.SIGTERM)
        return self.wait()

    def wait(self) -> int:
        """Its status once it has ended, which must be soon."""
        try:
            return self.process.wait(timeout=LIMIT)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the server does not end: {self.lines}") from None


def wait_for(condition: Callable[[], Any], seconds: float = LIMIT) -> None:
    """Poll until ``condition()`` holds; fails the test when it does not in time."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.02)


async def wait_for_async(condition: Callable[[], Any], seconds: float = LIMIT) -> None:
    """``wait_for`` for an event loop."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        await asyncio.sleep(0.002)


@contextmanager
def running_server(model: Path | str, *arguments: str, **options: Any) -> Iterator[Server]:
    """``surefoot serve`` with ``OPTIONS`` changed by ``options``, killed at the end."""
    command = [sys.executable, "-m", "surefoot.cli", "serve", str(model), "--port", "0"]
    for name, value in {**OPTIONS, **options}.items():
        command += [f"--{name.replace('_', '-')}", str(value)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [*command, *arguments], stderr=subprocess.PIPE, text=True, env=environment
    )
    server = Server(process)
    listening = threading.Event()

    def read() -> None:
        assert process.stderr is not None
        for line in process.stderr:
            server.lines.append(line.rstrip())
            if match := re.fullmatch(r"Listening on (\S+)\n", line):
                server.url = match[1]
                listening.set()
        listening.set()

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    try:
        assert listening.wait(LIMIT) and server.url, "\n".join(server.lines)
        yield server
    finally:
        process.kill()
        process.wait()
        reader.join(timeout=5)


def offline(model: Path | str, **options: Any) -> LLM:
    """The same engine without a server."""
    return LLM(str(model), **{**OPTIONS, **options})


def sse(text: str) -> list[dict[str, Any]]:
    """Events of a stream, which must have ended in good order."""
    parts = text.split("\n\n")
    assert parts[-2:] == ["data: [DONE]", ""], text[-500:]
    return [json.loads(part.removeprefix("data: ")) for part in parts[:-2]]


def params_of(body: dict[str, Any]) -> SamplingParams:
    """The sampling parameters of a completion request's body."""
    names = SamplingParams.__dataclass_fields__
    values = {name: value for name, value in body.items() if name in names}
    if "logit_bias" in values:
        values["logit_bias"] = {int(key): bias for key, bias in values["logit_bias"].items()}
    return SamplingParams(**values)

"""Making a certificate, or comparing two servers: load, run, show, write."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from surefoot import __version__
from surefoot.cli.terminal import progress_bars
from surefoot.config import EngineConfig
from surefoot.errors import SurefootError

if TYPE_CHECKING:
    from surefoot.certify.certificate import Certificate
    from surefoot.certify.subject import Subject
    from surefoot.engine.llm import LLM

SERVER_TOKENS = 128


def issue(
    engine: dict[str, Any],
    prompts: Path | None,
    quick: bool,
    self_test: bool,
    json_file: Path | None,
    html_file: Path | None,
) -> int:
    """Make a certificate, show it, write what was asked for; returns the exit code."""
    from surefoot.bench.prompts import load_prompts

    chosen = None if prompts is None else load_prompts(prompts)
    from surefoot.certify.certificate import EXIT_CODES, certify
    from surefoot.certify.html import page
    from surefoot.certify.sizes import DEFAULT, QUICK
    from surefoot.certify.subject import check
    from surefoot.speculation.shipped import with_shipped

    check(with_shipped(EngineConfig.from_dict(engine)))
    llm = _load(engine)
    subject = _subject(llm, engine, chosen)
    setup = _setup(llm, subject)
    print(
        f"{setup['model']}: {setup['backend']} backend, {setup['dtype']}, {setup['weights']} "
        f"weights, {'recorded' if subject.recorded else 'called'} rounds; "
        f"drafts from {', '.join((*subject.proposers, *subject.hosts))}",
        file=sys.stderr,
    )
    with progress_bars() as progress:
        certificate = certify(subject, setup, progress, QUICK if quick else DEFAULT, self_test)
    _show(certificate)
    if json_file is not None:
        write(json_file, json.dumps(certificate.to_json(), indent=1) + "\n", "json")
    if html_file is not None:
        write(html_file, page(certificate), "html")
    return EXIT_CODES[certificate.result]


def _load(engine: dict[str, Any]) -> LLM:
    """The model and its tokenizer. The certificate makes its own engines of them."""
    with progress_bars() as progress:
        progress("Starting", 0, 0)
        from surefoot.engine.llm import LLM

        small = {"proposers": (), "proposer_options": {}, "kv_blocks": 8, "max_num_seqs": 1}
        return LLM(progress=progress, **(engine | small), generation_config="none")


def _subject(llm: LLM, engine: dict[str, Any], chosen: list[Any] | None) -> Subject:
    from surefoot.certify.prompts import default_prompts
    from surefoot.certify.subject import Subject
    from surefoot.speculation.shipped import with_shipped

    model = llm.engine.decoder.config
    config = with_shipped(EngineConfig.from_dict(engine))
    if chosen is None:
        prompts = default_prompts(model.vocab_size, model.max_positions, llm.tokenizer)
    else:
        patterns = default_prompts(model.vocab_size, model.max_positions)
        prompts = (*(_tokens(llm, item) for item in chosen), *patterns)
    return Subject(llm.engine.decoder, config, prompts, llm.tokenizer)


def _tokens(llm: LLM, prompt: Any) -> tuple[int, ...]:
    if prompt.text is not None:
        tokens = llm.tokenizer.encode(prompt.text, add_special_tokens=True)
    else:
        tokens = llm.render_chat(prompt.messages)
    longest = llm.engine.decoder.config.max_positions // 2
    if not 1 <= len(tokens) <= longest:
        raise SurefootError(
            "prompts", f"{prompt.name} has {len(tokens)} tokens", f"use 1 to {longest}"
        )
    return tuple(tokens)


def _setup(llm: LLM, subject: Subject) -> dict[str, Any]:
    from surefoot.bench.hardware import describe_hardware

    backend = llm.engine.decoder.backend
    gpu = None
    if backend.device.type == "cuda":
        import torch

        gpu = torch.cuda.get_device_name(backend.device)
    return {
        "surefoot": __version__,
        "model": subject.config.model,
        "backend": backend.name,
        "device": str(backend.device),
        "gpu": gpu,
        "dtype": str(backend.dtype).removeprefix("torch."),
        "weights": subject.config.weights_on(backend.name),
        "proposer_options": {k: dict(v) for k, v in subject.config.proposer_options.items()},
        "max_draft_tokens": subject.max_drafts,
        "prompts": len(subject.prompts),
        "hardware": describe_hardware(),
    }


def _show(certificate: Certificate) -> None:
    from rich.console import Console

    from surefoot.certify.terminal import show

    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 120
    show(certificate, console)


def compare(
    urls: list[str], prompts: Path | None, json_file: Path | None, html_file: Path | None
) -> int:
    """Compare two servers, show it, write what was asked for; returns the exit code."""
    from surefoot.bench.prompts import load_prompts
    from surefoot.certify.blackbox import compare_servers
    from surefoot.certify.blackbox_report import lines, page
    from surefoot.certify.certificate import EXIT_CODES
    from surefoot.certify.openai_client import Server
    from surefoot.certify.prompts import TEXTS

    if len(urls) != 2:
        raise SurefootError("url", f"was given {len(urls)} times", "name two servers")
    texts = list(TEXTS)
    if prompts is not None:
        chosen = load_prompts(prompts)
        for item in chosen:
            if item.text is None:
                raise SurefootError(
                    "prompts", f"{item.name} is a conversation", 'servers complete a "prompt"'
                )
        texts = [item.text or "" for item in chosen]
    servers = Server(urls[0]), Server(urls[1])
    with progress_bars() as progress:
        comparison = compare_servers(servers, texts, SERVER_TOKENS, progress)
    for server in servers:
        server.close()
    print(*lines(comparison), f"\n{comparison.result}", sep="\n")
    for reason in comparison.reasons:
        print(f"  {reason}")
    if json_file is not None:
        write(json_file, json.dumps(comparison.to_json(), indent=1) + "\n", "json")
    if html_file is not None:
        write(html_file, page(comparison), "html")
    return EXIT_CODES[comparison.result]


def check_writable(option: str, path: Path | None) -> None:
    """Before minutes of work, not after them."""
    if path is None:
        return
    if path.is_dir():
        raise SurefootError(option, f"{path} is a folder", "name a file")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise SurefootError(option, f"{path} cannot be written")


def write(path: Path, text: str, option: str) -> None:
    """Write a result's file; refused by the option's name."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise SurefootError(option, f"cannot be written: {error}") from None

"""The tokenizer inside a GGUF file, rebuilt with ``tokenizers``.

``tokenizer.ggml.model`` is ``gpt2`` (byte-level BPE with merges; ``tokenizer.ggml.pre`` says how
text is cut before) or ``llama`` (SentencePiece BPE: scores instead of merges, byte fallback).
"""

from __future__ import annotations

import math
from typing import Any

from surefoot.errors import SurefootError
from surefoot.models.loading.gguf_container import GgufFile
from surefoot.models.loading.hf_tokenizer import set_ends
from surefoot.models.loading.tokenizer import Tokenizer, TokenizerSettings, tokenizer_errors

PREFIX = "tokenizer.ggml."
UNKNOWN, CONTROL, USER_DEFINED = 2, 3, 4
LONGEST_PIECE = 1024
"""Of a SentencePiece vocabulary: all ways to cut each piece in two are tried."""
GPT2_SPLIT = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
# GPT-4's pattern, with numbers in runs of up to {digits}.
GPT4_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{digits}|"
    r" ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# Name of ``pre`` -> regular expressions that cut the text one after the other; each match and
# each rest becomes a piece of its own.
SPLITS: dict[str, tuple[str, ...]] = {
    # llama.cpp's fallback for files that do not say.
    "default": (r"[\p{P}\$\+<=>\^~\|]+", GPT2_SPLIT, r"\p{N}+", r"[0-9][0-9][0-9]"),
    "gpt-2": (GPT2_SPLIT,),
    "smollm": (r"\p{N}", GPT2_SPLIT),
    "qwen2": (GPT4_SPLIT.format(digits=""),),
    "llama-bpe": (GPT4_SPLIT.format(digits="{1,3}"),),
}
ALIASES = {
    "gpt2": "gpt-2",
    "phi-2": "gpt-2",
    "mpt": "gpt-2",
    "olmo": "gpt-2",
    "starcoder": "smollm",
    "refact": "smollm",
    "command-r": "smollm",
    "codeshell": "smollm",
    "deepseek-r1-qwen": "qwen2",
    "llama3": "llama-bpe",
    "llama-v3": "llama-bpe",
    "falcon3": "llama-bpe",
    "smaug-bpe": "llama-bpe",
    "dbrx": "llama-bpe",
}
NORMALIZED = ("qwen2",)
"""Kinds whose published tokenizers put text in Unicode's NFC first."""


def read_gguf_tokenizer(file: GgufFile) -> Tokenizer:
    """Rebuild the file's tokenizer and its chat templates. Raises SurefootError, by name, for a
    ``model`` or ``pre`` that is not known, and for a vocabulary that is missing or broken."""
    metadata = file.metadata
    model = metadata.get(PREFIX + "model")
    pieces = file.items(PREFIX + "tokens", str)
    if not pieces:
        raise file.broken("it has no tokenizer.ggml.tokens")
    if len(set(pieces)) != len(pieces):
        raise file.broken("its vocabulary names a token twice")
    kinds = file.items(PREFIX + "token_type", int) or [1] * len(pieces)
    if len(kinds) != len(pieces):
        raise file.broken(f"it has {len(pieces)} tokens and {len(kinds)} tokenizer.ggml.token_type")
    if model == "gpt2":
        backend, begins = _byte_level(file, pieces)
    elif model == "llama":
        backend, begins = _sentencepiece(file, pieces)
    else:
        raise SurefootError(
            "model",
            f"{file.path} has a tokenizer of model {model!r}, which is not supported",
            "supported: gpt2, llama",
        )
    special = {}
    for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        token = metadata.get(f"{PREFIX}{key}_token_id")
        if isinstance(token, int) and 0 <= token < len(pieces):
            special[f"{name}_token"] = pieces[token]
    first = special.get("bos_token") if metadata.get(PREFIX + "add_bos_token", begins) else None
    last = special.get("eos_token") if metadata.get(PREFIX + "add_eos_token", False) else None
    with tokenizer_errors("model", f"{file.path} has no usable tokenizer"):
        _add_tokens(backend, pieces, kinds)
        if first or last:
            set_ends(backend, first, last)
        return Tokenizer(backend, TokenizerSettings(special, _templates(metadata)))


def _byte_level(file: GgufFile, pieces: list[str]) -> tuple[Any, bool]:
    """(the tokenizer, whether texts begin with BOS by default)."""
    from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers
    from tokenizers import Tokenizer as Backend

    architecture = str(file.metadata.get("general.architecture"))
    # Files older than ``pre`` leave it out; the Qwen architectures only ever had one tokenizer.
    fallback = "qwen2" if architecture.startswith("qwen") else "default"
    pre = str(file.metadata.get(PREFIX + "pre", fallback))
    kind = ALIASES.get(pre, pre)
    if kind not in SPLITS:
        raise SurefootError(
            "model",
            f"{file.path} names the pre-tokenizer {pre!r}, which is not supported",
            "supported: " + ", ".join(sorted({*SPLITS, *ALIASES})),
        )
    merges = file.items(PREFIX + "merges", str)
    if PREFIX + "merges" not in file.metadata:
        raise file.broken("it has no tokenizer.ggml.merges")
    pairs = [tuple(merge.split(" ", 1)) for merge in merges]
    vocabulary = {piece: token for token, piece in enumerate(pieces)}
    with tokenizer_errors("model", f"the merges of {file.path} do not fit its vocabulary"):
        model = models.BPE(vocabulary, pairs, ignore_merges=kind == "llama-bpe")
    backend = Backend(model)
    cuts = [pre_tokenizers.Split(Regex(split), "isolated") for split in SPLITS[kind]]
    bytes_of = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([*cuts, bytes_of])
    backend.decoder = decoders.ByteLevel()
    if kind in NORMALIZED:
        backend.normalizer = normalizers.NFC()
    return backend, kind == "llama-bpe"


def _sentencepiece(file: GgufFile, pieces: list[str]) -> tuple[Any, bool]:
    """(the tokenizer, whether texts begin with BOS by default)."""
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, normalizers

    scores = file.items(PREFIX + "scores", float)
    if len(scores) != len(pieces) or not all(map(math.isfinite, scores)):
        raise file.broken("it has no tokenizer.ggml.scores of its vocabulary's length")
    longest = max(map(len, pieces))
    if longest > LONGEST_PIECE:
        raise file.broken(f"its vocabulary has a piece of {longest} characters")
    unknown = file.metadata.get(PREFIX + "unknown_token_id", 0)
    if not isinstance(unknown, int) or not 0 <= unknown < len(pieces):
        raise file.broken(f"tokenizer.ggml.unknown_token_id is {unknown!r}, no token of it")
    vocabulary = {piece: token for token, piece in enumerate(pieces)}
    with tokenizer_errors("model", f"{file.path} has no usable vocabulary"):
        model = models.BPE(
            vocabulary,
            merges_of_scores(vocabulary, scores),
            unk_token=pieces[unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
    backend = Backend(model)
    prefix = file.metadata.get(PREFIX + "add_space_prefix", True)
    spaces = normalizers.Replace(" ", "▁")
    steps = [normalizers.Prepend("▁"), spaces] if prefix else [spaces]
    backend.normalizer = normalizers.Sequence(steps)
    strip = [decoders.Strip(" ", 1, 0)] if prefix else []
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return backend, True


def merges_of_scores(vocabulary: dict[str, int], scores: list[float]) -> list[tuple[str, str]]:
    """BPE merges equal to SentencePiece's rule of merging the pair whose union scores highest:
    every cut of every piece into two others, best piece first."""
    merges = []
    for piece, token in vocabulary.items():
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if left in vocabulary and right in vocabulary:
                merges.append((-scores[token], token, vocabulary[left], left, right))
    merges.sort(key=lambda merge: merge[:3])
    return [(left, right) for *_, left, right in merges]


def _add_tokens(backend: Any, pieces: list[str], kinds: list[int]) -> None:
    from tokenizers import AddedToken

    added = [
        AddedToken(piece, special=kind != USER_DEFINED, normalized=False)
        for piece, kind in zip(pieces, kinds, strict=True)
        if kind in (CONTROL, USER_DEFINED, UNKNOWN)
    ]
    backend.add_tokens(added)


def _templates(metadata: dict[str, Any]) -> dict[str, str]:
    templates = {}
    for key, text in metadata.items():
        start, dot, name = key.partition("tokenizer.chat_template")
        if dot and not start and isinstance(text, str):
            templates[name.lstrip(".") or "default"] = text
    return templates

"""The tokenizer of a Hugging Face folder: tokenizer.json, tokenizer_config.json, templates."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from surefoot.errors import SurefootError
from surefoot.models.loading.json_reader import JsonReader
from surefoot.models.loading.text_growth import check_growth
from surefoot.models.loading.tokenizer import Tokenizer, TokenizerSettings, tokenizer_errors

SPECIAL_NAMES = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)
# Files of slow tokenizers, which transformers knows how to convert.
SLOW_FILES = ("tokenizer.model", "vocab.json", "merges.txt", "tekken.json", "spiece.model")


def read_hf_tokenizer(folder: Path) -> Tokenizer:
    """Read ``folder``'s tokenizer. Where there is a tokenizer.json it alone says what is put
    around a text, as in transformers 5. Raises SurefootError when there is none or it is broken."""
    config = _open_json(folder / "tokenizer_config.json")
    if (folder / "tokenizer.json").is_file():
        backend = _read_backend(folder / "tokenizer.json")
    elif any((folder / name).is_file() for name in SLOW_FILES):
        backend = _convert_slow(folder)
    else:
        raise SurefootError(
            "model", f"{folder} has no tokenizer.json", "copy the model's tokenizer files there"
        )
    special = _special_tokens(config, _open_json(folder / "special_tokens_map.json"))
    with tokenizer_errors("model", f"{folder} has no usable tokenizer"):
        _add_declared_tokens(backend, config, special)
        return Tokenizer(backend, TokenizerSettings(special, _templates(folder, config)))


def _open_json(path: Path) -> JsonReader:
    return JsonReader.open(path) if path.is_file() else JsonReader(path, {})


def _read_backend(path: Path) -> Any:
    from tokenizers import Tokenizer as Backend

    with tokenizer_errors("model", f"{path} is no usable tokenizer"):
        backend = Backend.from_file(str(path))
    check_growth(backend, path)
    return backend


def _convert_slow(folder: Path) -> Any:
    try:
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(folder, local_files_only=True).backend_tokenizer
    except Exception as error:  # whatever the conversion of an unknown format raises
        detail = " ".join(str(error).split())[:200]
        raise SurefootError(
            "model",
            f"{folder} has no tokenizer.json and its tokenizer cannot be converted: {detail}",
            "install transformers and sentencepiece, or add a tokenizer.json",
        ) from error


def _special_tokens(config: JsonReader, legacy: JsonReader) -> dict[str, str]:
    """Texts of the named special tokens; each may be spelled as a string or an object."""
    special = {}
    for name in SPECIAL_NAMES:
        value = config.data.get(name) or legacy.data.get(name)
        content = value.get("content") if isinstance(value, dict) else value
        if isinstance(content, str):
            special[name] = content
    return special


def _add_declared_tokens(backend: Any, config: JsonReader, special: dict[str, str]) -> None:
    """Tokens that only tokenizer_config.json declares, or that it makes special."""
    from tokenizers import AddedToken

    present = backend.get_added_tokens_decoder()
    declared = config.section("added_tokens_decoder")
    entries = declared.data if declared else {}
    for key, entry in entries.items():
        good = isinstance(entry, dict) and isinstance(entry.get("content"), str)
        flags = [entry.get(name, False) for name in FLAGS] if good else [None]
        if not (key.isdecimal() and len(key) < 10 and all(type(flag) is bool for flag in flags)):
            raise config.wrong(
                f"added_tokens_decoder.{key[:40]}", entry, "a token's id, and its content and flags"
            )
    for key in sorted(entries, key=int):
        entry = entries[key]
        known = present.get(int(key))
        if known and (known.content, known.special) == (entry["content"], entry.get("special")):
            continue
        flags = {name: entry[name] for name in FLAGS if name in entry}
        backend.add_tokens([AddedToken(entry["content"], **flags)])
        if backend.token_to_id(entry["content"]) != int(key):
            raise SurefootError(
                "model", f"{config.path} gives {entry['content']!r} an id that it cannot have"
            )
    known_special = {entry.content for entry in present.values() if entry.special}
    for text in special.values():
        if text not in known_special and backend.token_to_id(text) is not None:
            backend.add_special_tokens([AddedToken(text, special=True, normalized=False)])


FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")


def set_ends(backend: Any, first: str | None, last: str | None) -> None:
    """Make ``encode`` put the tokens ``first`` and ``last`` around a text (None: nothing)."""
    from tokenizers.processors import TemplateProcessing

    template = [*([first] if first else []), "$A", *([last] if last else [])]
    used = {text: backend.token_to_id(text) for text in (first, last) if text}
    backend.post_processor = TemplateProcessing(
        single=template, pair=[*template, "$B:1"], special_tokens=list(used.items())
    )


def _templates(folder: Path, config: JsonReader) -> dict[str, str]:
    """Chat templates by name: the .jinja files, else those of tokenizer_config.json."""
    files = {path.stem: path for path in (folder / "additional_chat_templates").glob("*.jinja")}
    if (folder / "chat_template.jinja").is_file():
        files["default"] = folder / "chat_template.jinja"
    if files:
        return {name: _read_template(path) for name, path in files.items()}
    value = config.data.get("chat_template")
    if value is None or isinstance(value, str):
        return {"default": value} if value else {}
    named = isinstance(value, list) and all(
        isinstance(item, dict)
        and all(isinstance(item.get(key), str) for key in ("name", "template"))
        for item in value
    )
    if not named:
        raise config.wrong("chat_template", value, "a template or a list of named ones")
    return {item["name"]: item["template"] for item in value}


def _read_template(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SurefootError("model", f"cannot read {path}: {error}") from error

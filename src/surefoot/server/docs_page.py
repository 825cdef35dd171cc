"""``/docs``: the OpenAPI document for people, without anything from elsewhere."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from html import escape
from typing import Any

STYLE = """body{font:16px/1.5 system-ui,sans-serif;max-width:56rem;margin:2rem auto;padding:0 1rem}
h2{font-size:1.1rem;margin:2rem 0 .3rem}code,td:first-child{font-family:ui-monospace,monospace}
table{border-collapse:collapse}td{padding:.15rem 1rem .15rem 0;vertical-align:top}
@media(prefers-color-scheme:dark){body{background:#111;color:#ddd}a{color:#8bf}}"""


def docs_page(document: Mapping[str, Any]) -> str:
    """HTML of all operations and the fields of their bodies."""
    head = (
        f"<!doctype html><meta charset=utf-8><title>{escape(document['info']['title'])}</title>"
        f"<meta name=viewport content='width=device-width'><style>{STYLE}</style>"
    )
    return head + "".join(_body(document))


def _body(document: Mapping[str, Any]) -> Iterator[str]:
    info = document["info"]
    yield f"<h1>{escape(info['title'])} {escape(info['version'])}</h1>"
    yield f"<p>{escape(info['description'])} <a href=openapi.json>openapi.json</a></p>"
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            yield f"<h2><code>{method.upper()} {escape(path)}</code></h2>"
            yield f"<p>{escape(operation.get('description', ''))}</p>"
            yield from _fields(document, operation)


def _fields(document: Mapping[str, Any], operation: Mapping[str, Any]) -> Iterator[str]:
    content = operation.get("requestBody", {}).get("content", {})
    schema = content.get("application/json", {}).get("schema")
    if schema is None:
        return
    schema = _resolved(document, schema)
    required = schema.get("required", ())
    yield "<table>"
    for name, field in schema.get("properties", {}).items():
        default = "required" if name in required else f"default {json.dumps(field.get('default'))}"
        about = escape(field.get("description", ""))
        yield f"<tr><td>{escape(name)}<td>{escape(_kind(document, field))}<td>{escape(default)}"
        yield f"<td>{about}"
    yield "</table>"


def _resolved(document: Mapping[str, Any], schema: Mapping[str, Any]) -> Mapping[str, Any]:
    if "$ref" in schema:
        return document["components"]["schemas"][schema["$ref"].rsplit("/", 1)[-1]]
    return schema


def _kind(document: Mapping[str, Any], schema: Mapping[str, Any]) -> str:
    """A field's type in words."""
    if "$ref" in schema:
        inner = _resolved(document, schema).get("properties", {})
        return "{" + ", ".join(inner) + "}"
    if "anyOf" in schema:
        kinds = (_kind(document, item) for item in schema["anyOf"])
        return " or ".join(kind for kind in kinds if kind != "null")
    if "enum" in schema or "const" in schema:
        return " or ".join(json.dumps(v) for v in schema.get("enum", [schema.get("const")]))
    if schema.get("type") == "array":
        return f"[{_kind(document, schema.get('items', {}))}, …]"
    return str(schema.get("type", "anything")) + _range(schema)


def _range(schema: Mapping[str, Any]) -> str:
    """Of a number, in words; limits of 64 bits are none to a person."""
    low, high = schema.get("minimum", schema.get("exclusiveMinimum")), schema.get("maximum")
    words = []
    if low is not None and abs(low) < 2**53:
        words.append(f"above {low:g}" if "exclusiveMinimum" in schema else f"from {low:g}")
    if high is not None and abs(high) < 2**53:
        words.append(f"to {high:g}")
    return " ".join(["", *words])

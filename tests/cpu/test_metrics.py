"""Metrics: how they are counted and named, and what reads them."""

from __future__ import annotations

import asyncio
import json
import os
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from surefoot.server.exposition import Exposition, by_replica, page_of
from surefoot.server.messages import Ready
from surefoot.server.metrics import DraftCounts, Histogram, Metrics

DOCS = Path(__file__).parents[2] / "docs"


def test_histogram_bounds_are_inclusive() -> None:
    histogram = Histogram((1, 2, 5))
    for value in (0.5, 1, 1.5, 5, 6):
        histogram.observe(value)
    histogram.observe(2, times=3)
    assert histogram.counts == [2, 4, 1, 1]
    assert histogram.total == pytest.approx(20)


def test_drafts_are_counted_by_position() -> None:
    counts = DraftCounts()
    counts.count(3, 1)
    counts.count(1, 1)
    counts.count(2, 0)
    for drafts in (2, 3):
        counts.count_offer(drafts)
    assert (counts.rounds, counts.verified, counts.accepted) == (3, [3, 2, 1], [2, 0, 0])
    assert counts.offered == [2, 2, 1]


@cache
def families() -> list[Any]:
    """Of the page of a replica with a GPU, on which everything has happened once."""
    sizes = {"total": 9, "weights": 4}
    build = {"version": "1", "backend": "torch", "device": "cpu", "dtype": "float32"}
    ready = Ready(
        "", 64, 64, 2, 3, 99, (2,), ["ngram"], saving_known=True, memory=sizes, build=build
    )
    metrics = Metrics(ready)
    metrics.statuses["GET", "/health", "200"] += 1
    metrics.drafts["ngram"].count_offer(3)
    metrics.drafts["ngram"].count(2, 1)
    own = Exposition(metrics, "model", core=os.getpid()).families()
    return list(text_string_to_metric_families(page_of(by_replica({"x": own})).decode()))


def labels() -> dict[str, set[str]]:
    """Of each sample's name."""
    found: dict[str, set[str]] = {}
    for family in families():
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found


def exported() -> tuple[set[str], set[str]]:
    """Names of a metrics page's samples, with their bare names (no suffix of a counter's or
    histogram's)."""
    samples = set(labels())
    return samples, samples | {family.name for family in families()}


def test_replicas_share_a_page() -> None:
    def own(value: int) -> list[Any]:
        metrics = Metrics(Ready("", 64, 64, 2, 3, 99, (2,), [], saving_known=True))
        metrics.prompt_tokens = value
        metrics.first_token.observe(value)
        return Exposition(metrics, "model").families()

    page = page_of(by_replica({"a": own(3), "b": own(5)})).decode()
    found = list(text_string_to_metric_families(page))
    assert len({family.name for family in found}) == len(found)
    [tokens] = [family for family in found if family.name == "surefoot_prompt_tokens"]
    assert {s.labels["replica"]: s.value for s in tokens.samples} == {"a": 3, "b": 5}
    for family in found:
        for sample in family.samples:
            assert "replica" in sample.labels, family.name


def test_memory_is_exported_by_part() -> None:
    def sizes_by_part(sizes: dict[str, int]) -> dict[str, float]:
        ready = Ready("", 64, 64, 2, 3, 99, (2,), [], saving_known=True, memory=sizes)
        page = asyncio.run(Exposition(Metrics(ready), "model").page()).decode()
        every = text_string_to_metric_families(page)
        [found] = [f for f in every if f.name == "surefoot_memory_bytes"] or [None]
        return {s.labels["part"]: s.value for s in found.samples} if found else {}

    assert sizes_by_part({"total": 9 << 30, "weights": 4}) == {
        "total": float(9 << 30),
        "weights": 4.0,
    }
    assert sizes_by_part({}) == {}


def board() -> dict[str, Any]:
    return json.loads((DOCS / "grafana.json").read_text())


def expressions(board: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """(title, expression) of every panel's targets and of the variables that are queries."""
    for panel in board["panels"]:
        for target in panel.get("targets", ()):
            yield panel["title"], target["expr"]
    for item in board["templating"]["list"]:
        if item["type"] == "query":
            yield item["name"], item["query"]["query"]


FUNCTIONS = {"rate", "deriv", "sum", "histogram_quantile", "label_values"}
WORDS = {"by", "and", "on", "le"}
SELECTOR = re.compile(r"(\w+)\{([^{}]*)\}")


def test_the_dashboard_reads_what_is_exported() -> None:
    """Every word of every expression is a function, a metric, or a label that its metrics have."""
    samples, _ = exported()
    labels_of = labels()
    found = dict(expressions(board()))
    assert len(found) > 25
    for title, expr in found.items():
        assert [expr.count(mark) for mark in "({["] == [expr.count(mark) for mark in ")}]"], title
        bare = re.sub(r'"[^"]*"|\$__?\w+', "", expr)
        metrics = set(re.findall(r"\b(?:surefoot_|process_)\w+", bare))
        assert metrics and metrics <= samples, title
        for name, selector in SELECTOR.findall(bare):
            assert set(re.findall(r"(\w+)\s*=", selector)) <= labels_of[name], title
        grouped = set(", ".join(re.findall(r"by \(([^)]*)\)", bare)).split(", ")) - {""}
        assert all(grouped <= labels_of[name] for name in metrics), title
        shared = set.union(*(labels_of[name] for name in metrics)) | {"instance"}
        words = set(re.findall(r"[A-Za-z_]\w*", bare))
        assert words <= FUNCTIONS | WORDS | metrics | shared, title


def test_the_dashboard_loads() -> None:
    """What Grafana wants of a board: places that do not overlap, ids, and known variables."""
    whole = board()
    variables = {item["name"] for item in whole["templating"]["list"]}
    assert whole["templating"]["list"][0]["type"] == "datasource"
    used = set(re.findall(r"\$\{?([a-z]\w*)", json.dumps(whole)))
    assert used == variables
    ids = [panel["id"] for panel in whole["panels"]]
    assert len(set(ids)) == len(ids)
    taken: set[tuple[int, int]] = set()
    for panel in whole["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        cells = {
            (place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])
        }
        assert not cells & taken, panel["title"]
        taken |= cells
        if panel["type"] == "row":
            continue
        targets = panel["targets"]
        references = [target["refId"] for target in targets]
        assert len(set(references)) == len(references) > 0
        for item in (panel, *targets):
            assert item["datasource"] == {"type": "prometheus", "uid": "${source}"}
        for target in targets:
            by = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
            [name, *_] = re.findall(r"\bsurefoot_\w+|\bprocess_\w+", target["expr"])
            assert by <= labels()[name], panel["title"]


def test_every_metric_is_documented_under_both_names() -> None:
    _, every = exported()
    names = {name for name in every if not re.match(r"(surefoot_core_)?process_", name)}
    section = (DOCS / "server.md").read_text().split("## Metrics")[1].split("\n## ")[0]
    rows = [line.split("|")[1:3] for line in section.splitlines() if line.startswith("| `")]
    documented = set()
    for row in rows[1:]:
        own = re.findall(r"`([a-z_]+)`", row[0])
        theirs = re.findall(r"`([a-z0-9_]+)`", row[1])
        theirs += own if "the same" in row[1] else []
        documented |= {f"surefoot_{name}" for name in own} | {f"vllm:{name}" for name in theirs}
    assert documented <= names, documented - names
    suffix = re.compile(r"_(bucket|count|sum|created|total)$")
    bare = {suffix.sub("", name) for name in documented}
    assert {suffix.sub("", name) for name in names} == bare


# What ``vllm bench serve`` and vLLM's own dashboards ask for.
READ_BY_OTHERS = [
    "spec_decode_num_drafts_total",
    "spec_decode_num_draft_tokens_total",
    "spec_decode_num_accepted_tokens_total",
    "spec_decode_num_accepted_tokens_per_pos_total",
    "e2e_request_latency_seconds_bucket",
    "e2e_request_latency_seconds_sum",
    "e2e_request_latency_seconds_count",
    "time_to_first_token_seconds_bucket",
    "time_to_first_token_seconds_sum",
    "inter_token_latency_seconds_bucket",
    "time_per_output_token_seconds_bucket",
    "num_requests_running",
    "num_requests_waiting",
    "prompt_tokens_total",
    "generation_tokens_total",
    "kv_cache_usage_perc",
    "request_success_total",
    "request_prompt_tokens_bucket",
    "request_generation_tokens_bucket",
    "num_preemptions_total",
    "prefix_cache_hits_total",
    "prefix_cache_queries_total",
]


def test_names_that_dashboards_for_vllm_read() -> None:
    assert {f"vllm:{name}" for name in READ_BY_OTHERS} <= exported()[0]

"""Metrics in Prometheus' text format, under Surefoot's names and under those that dashboards and
benchmarks for vLLM read. Both are views of the same numbers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from surefoot.server.metrics import Histogram, Metrics

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
Samples = Iterable[tuple[Mapping[str, str], float]]

# Surefoot's name -> vLLM's. Names of counters get ``_total`` when they are written.
VLLM_NAMES = {
    "requests_finished": "request_success",
    "requests_running": "num_requests_running",
    "requests_waiting": "num_requests_waiting",
    "prompt_tokens": "prompt_tokens",
    "generation_tokens": "generation_tokens",
    "kv_usage_ratio": "kv_cache_usage_perc",
    "prefix_queries_tokens": "prefix_cache_queries",
    "prefix_hits_tokens": "prefix_cache_hits",
    "preemptions": "num_preemptions",
    "time_to_first_token_seconds": "time_to_first_token_seconds",
    "inter_token_latency_seconds": "inter_token_latency_seconds",
    "time_per_output_token_seconds": "request_time_per_output_token_seconds",
    "request_queue_seconds": "request_queue_time_seconds",
    "request_latency_seconds": "e2e_request_latency_seconds",
    "request_prompt_tokens": "request_prompt_tokens",
    "request_generation_tokens": "request_generation_tokens",
}
# The name that vLLM used before ``inter_token_latency_seconds``; dashboards still read it.
OLD_INTER_TOKEN = "vllm:time_per_output_token_seconds"


class _Exporter(Collector):
    def __init__(self, metrics: Metrics, model: str) -> None:
        self.metrics = metrics
        self.model = model

    def collect(self) -> Iterator[Metric]:
        yield from self._requests()
        yield from self._engine()
        yield from self._speculation()
        yield from self._times()

    def _requests(self) -> Iterator[Metric]:
        metrics = self.metrics
        finished = [({"finished_reason": name}, n) for name, n in metrics.finished.items()]
        yield from self._counter("requests_finished", "Texts that ended, by reason.", finished)
        rejected = metrics.rejected
        yield from self._counter("requests_rejected", "Refused by a full queue.", [({}, rejected)])
        answers = [
            ({"method": method, "path": path, "status": status}, count)
            for (method, path, status), count in metrics.statuses.items()
        ]
        yield from self._counter("http_requests", "HTTP answers.", answers)
        build = GaugeMetricFamily(
            "surefoot_build_info", "What runs.", labels=[*metrics.ready.build]
        )
        build.add_metric([*metrics.ready.build.values()], 1)
        yield build
        for name, value in (
            ("prompt_tokens", metrics.prompt_tokens),
            ("generation_tokens", metrics.generation_tokens),
        ):
            yield from self._counter(name, f"{name.replace('_', ' ').capitalize()}.", [({}, value)])

    def _engine(self) -> Iterator[Metric]:
        totals = self.metrics.totals
        usage = totals.used_blocks / totals.blocks if totals.blocks else 0.0
        for name, help_, value in (
            ("requests_running", "Texts in the batch.", totals.running),
            ("requests_waiting", "Texts that wait for a slot or memory.", totals.waiting),
            ("kv_usage_ratio", "Share of the KV blocks in use, 0 to 1.", usage),
        ):
            yield from self._gauge(name, help_, value)
        for name, help_, value in (
            ("rounds", "Forward passes of the target.", totals.rounds),
            ("rows", "Rows of those passes, drafts included.", totals.rows),
            ("draft_rows", "Rows that verified drafts.", totals.draft_rows),
            ("preemptions", "Requests put back for lack of KV blocks.", totals.preemptions),
            ("prefix_queries_tokens", "Looked up in the prefix cache.", totals.prefix_queries),
            ("prefix_hits_tokens", "Found in the prefix cache.", totals.prefix_hits),
            (
                "requests_without_drafters",
                "Requests let in without drafters that they allow, as these did not pay lately.",
                totals.without_drafters,
            ),
            ("probe_rounds", "Rounds that tried what was not believed to be best.", totals.probes),
        ):
            yield from self._counter(name, help_, [({}, value)])
        memory = self.metrics.ready.memory
        if memory:
            about = "The GPU's memory, and what each part takes of it."
            labels = ["model_name", "part"]
            family = GaugeMetricFamily("surefoot_memory_bytes", about, labels=labels)
            for part, size in memory.items():
                family.add_metric([self.model, part], size)
            yield family

    def _speculation(self) -> Iterator[Metric]:
        drafts = self.metrics.drafts
        if drafts:
            about = "1, or 0 once it failed and was switched off."
            family = GaugeMetricFamily(
                "surefoot_proposer_active", about, labels=["model_name", "proposer"]
            )
            for name in drafts:
                family.add_metric([self.model, name], name not in self.metrics.switched_off)
            yield family
        kinds = ("offered", "verified", "accepted")
        by_name: dict[str, list] = {"rounds": [], **{kind: [] for kind in kinds}}
        by_position: dict[str, list] = {kind: [] for kind in kinds}
        for name, counts in drafts.items():
            label = {"proposer": name}
            by_name["rounds"].append((label, counts.rounds))
            for kind, per_position in by_position.items():
                values = getattr(counts, kind)
                by_name[kind].append((label, sum(values)))
                per_position += [({**label, "position": str(i)}, n) for i, n in enumerate(values)]
        rounds = [({}, self.metrics.request_rounds)]
        yield from self._counter("request_rounds", "A request's rounds that gave tokens.", rounds)
        about = "A request's rounds with drafts."
        yield from self._counter("draft_rounds", about, by_name["rounds"])
        for kind, per_position in by_position.items():
            about = f"Draft tokens {kind}"
            yield from self._counter(f"{kind}_tokens", f"{about}.", by_name[kind])
            yield from self._counter(
                f"{kind}_tokens_by_position", f"{about}, by position in the draft.", per_position
            )
        if self.metrics.ready.saving_known:
            totals = self.metrics.totals
            for name, help_, value in (
                ("estimated_saved_seconds", "Time that drafts saved.", totals.saved_seconds),
                (
                    "believed_round_seconds",
                    "What late rounds were believed to take, on average.",
                    totals.believed_seconds,
                ),
                (
                    "measured_round_seconds",
                    "What late rounds took, on average.",
                    totals.measured_seconds,
                ),
                (
                    "barren_rounds",
                    "Latest rounds in a row with drafts on offer and none verified.",
                    totals.barren_rounds,
                ),
            ):
                yield from self._gauge(name, help_, value)
        yield from self._vllm_speculation()

    def _vllm_speculation(self) -> Iterator[Metric]:
        """Sums over proposers, as vLLM has one."""
        counts = list(self.metrics.drafts.values())
        if not counts:
            return
        width = self.metrics.ready.max_draft_tokens
        accepted = [sum(c.accepted[i] for c in counts if i < len(c.accepted)) for i in range(width)]
        for name, about, value in (
            ("drafts", "Drafts.", sum(c.rounds for c in counts)),
            ("draft_tokens", "Draft tokens.", sum(sum(c.verified) for c in counts)),
            ("accepted_tokens", "Accepted draft tokens.", sum(accepted)),
        ):
            yield self._one_counter(f"vllm:spec_decode_num_{name}", about, [({}, value)])
        yield self._one_counter(
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            "Accepted draft tokens by position.",
            [({"position": str(index)}, value) for index, value in enumerate(accepted)],
        )

    def _times(self) -> Iterator[Metric]:
        metrics = self.metrics
        for name, help_, histogram in (
            ("time_to_first_token_seconds", "From arrival.", metrics.first_token),
            ("inter_token_latency_seconds", "Between tokens.", metrics.inter_token),
            ("time_per_output_token_seconds", "Mean of a text.", metrics.mean_token),
            ("request_queue_seconds", "Until it was let in.", metrics.queue_time),
            ("request_latency_seconds", "From arrival to the end.", metrics.request_time),
            ("request_prompt_tokens", "Tokens of a prompt.", metrics.prompt_lengths),
            ("request_generation_tokens", "Tokens of a text.", metrics.generation_lengths),
        ):
            for full in self._names(name):
                yield self._histogram(full, help_, histogram)
        yield self._histogram(OLD_INTER_TOKEN, "Between tokens.", metrics.inter_token)

    def _names(self, name: str) -> Iterator[str]:
        yield f"surefoot_{name}"
        if name in VLLM_NAMES:
            yield f"vllm:{VLLM_NAMES[name]}"

    def _counter(self, name: str, about: str, samples: Samples) -> Iterator[Metric]:
        samples = list(samples)
        for full in self._names(name):
            yield self._one_counter(full, about, samples)

    def _one_counter(self, name: str, about: str, samples: Samples) -> Metric:
        family = CounterMetricFamily(name, about)
        for labels, value in samples:
            family.add_sample(f"{name}_total", {"model_name": self.model, **labels}, value)
        return family

    def _gauge(self, name: str, about: str, value: float) -> Iterator[Metric]:
        for full in self._names(name):
            family = GaugeMetricFamily(full, about, labels=["model_name"])
            family.add_metric([self.model], value)
            yield family

    def _histogram(self, name: str, about: str, histogram: Histogram) -> Metric:
        buckets, count = [], 0
        bounds = [*(str(float(bound)) for bound in histogram.bounds), "+Inf"]
        for bound, more in zip(bounds, histogram.counts, strict=True):
            count += more
            buckets.append((bound, float(count)))
        family = HistogramMetricFamily(name, about, labels=["model_name"])
        family.add_metric([self.model], buckets, histogram.total)
        return family


def by_replica(pages: Mapping[str, Sequence[Metric]]) -> list[Metric]:
    """The metrics of several replicas: one family of each name, whose samples have the label
    ``replica``."""
    families: dict[str, Metric] = {}
    for replica, page in pages.items():
        for family in page:
            empty = Metric(family.name, family.documentation, family.type, family.unit)
            families.setdefault(family.name, empty).samples += [
                sample._replace(labels={"replica": replica, **sample.labels})
                for sample in family.samples
            ]
    return list(families.values())


class _Fixed(Collector):
    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families


def page_of(families: Iterable[Metric]) -> bytes:
    """Metrics in Prometheus' text format."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Fixed(families))
    return generate_latest(registry)


class Exposition:
    """The page that Prometheus reads."""

    def __init__(self, metrics: Metrics, model: str, core: int | None = None) -> None:
        """``core``: its process id, where there is one."""
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(_Exporter(metrics, model))
        ProcessCollector(registry=self._registry)
        if core is not None:
            ProcessCollector("surefoot_core", lambda: core, registry=self._registry)

    def families(self) -> list[Metric]:
        """All metrics, as they are now."""
        return list(self._registry.collect())

    async def page(self) -> bytes:
        """In Prometheus' text format."""
        return page_of(self.families())

"""Metrics for Prometheus, at /metrics."""

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from trt_nvfp4.builder.serve.engine import Engine

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)


class Metrics:
    """Times are in seconds, as clients see them but for the network."""

    def __init__(self, engine: Engine) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(_OfEngine(engine))
        self.requests = Counter(
            "trt_nvfp4_requests", "HTTP requests by path and status", ["path", "status"], registry=self.registry
        )
        self.first_token = self._histogram("time_to_first_token_seconds", "From a request's arrival to its first token")
        self.next_token = self._histogram("time_per_token_seconds", "Between two tokens of one text")

    def _histogram(self, name: str, what: str) -> Histogram:
        return Histogram(f"trt_nvfp4_{name}", what, buckets=_SECONDS, registry=self.registry)


class _OfEngine(Collector):
    """The scheduler's numbers at the time of reading."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def collect(self) -> Iterable[Metric]:
        scheduler, sums = self._engine.scheduler, self._engine.scheduler.statistics
        drafts = scheduler.drafting.statistics
        room = scheduler.capacity * len(scheduler.slots)
        for name, what, value in (
            ("queue_requests", "Requests that wait for a slot", len(self._engine.queue)),
            ("running_requests", "Requests in a slot", scheduler.running),
            ("slots", "Requests that run at once", len(scheduler.slots)),
            ("cache_use_ratio", "Cached tokens by those that fit", sum(len(s.cached) for s in scheduler.slots) / room),
        ):
            yield GaugeMetricFamily(f"trt_nvfp4_{name}", what, value)
        for name, what, value in (
            ("steps", "Steps of the decoder", sums.steps),
            ("prompt_tokens", "Tokens of prompts", sums.prompt_tokens),
            ("reused_tokens", "Tokens of prompts that were cached already", sums.reused_tokens),
            ("generated_tokens", "Tokens that were generated", sums.generated_tokens),
            ("drafted_tokens", "Tokens that were drafted", drafts.drafted),
            ("accepted_tokens", "Drafted tokens that the model chose, too", drafts.accepted),
        ):
            yield CounterMetricFamily(f"trt_nvfp4_{name}", what, value)
        for which, name in enumerate(("drafted", "accepted")):
            family = CounterMetricFamily(f"trt_nvfp4_{name}_tokens_by_place", "By place in the draft", labels=["place"])
            for place, counts in enumerate(list(drafts.by_position), 1):
                family.add_metric([str(place)], counts[which])
            yield family

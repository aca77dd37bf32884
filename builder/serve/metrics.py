"""Metrics for Prometheus, at /metrics."""

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from trt_nvfp4.builder.serve.decoder import Decoder

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)


class Metrics:
    """Times are in seconds, as clients see them but for the network."""

    def __init__(self, decoder: Decoder) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(_OfDecoder(decoder))
        self.requests = Counter(
            "trt_nvfp4_requests", "HTTP requests by path and status", ["path", "status"], registry=self.registry
        )
        self.first_token = self._histogram("time_to_first_token_seconds", "From a request's arrival to its first token")
        self.next_token = self._histogram("time_per_token_seconds", "Between two tokens of one text")

    def _histogram(self, name: str, what: str) -> Histogram:
        return Histogram(f"trt_nvfp4_{name}", what, buckets=_SECONDS, registry=self.registry)


class _OfDecoder(Collector):
    """The scheduler's numbers, as they came last."""

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder

    def collect(self) -> Iterable[Metric]:
        if (numbers := self._decoder.numbers) is None:
            return
        sums, drafts = numbers.sums, numbers.drafts
        for name, what, value in (
            ("queue_requests", "Requests that wait for a slot", numbers.waiting),
            ("running_requests", "Requests in a slot", numbers.running),
            ("slots", "Requests that run at once", numbers.slots),
            ("cache_use_ratio", "Cached tokens by those that fit", numbers.used),
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
            for place, counts in enumerate(drafts.by_position, 1):
                family.add_metric([str(place)], counts[which])
            yield family

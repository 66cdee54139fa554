"""What the server counts, in Prometheus' text form and as JSON for the page."""

from __future__ import annotations

import threading
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest


class Metrics:
    """Names end in their unit. What was never measured is absent, not 0."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "edgekv_requests",
            "Requests by endpoint and HTTP status",
            ["endpoint", "status"],
            registry=self.registry,
        )
        self.prompt_tokens = self._counter("prompt_tokens", "Tokens of prompts")
        self.cached_tokens = self._counter("cached_tokens", "Tokens of prompts that were cached and not computed")
        self.generated_tokens = self._counter("generated_tokens", "Tokens of answers")
        self.prefill_seconds = self._counter("prefill_seconds", "Time spent reading prompts")
        self.decode_seconds = self._counter("decode_seconds", "Time spent generating all but each first token")
        self.queue_length = self._gauge("queue_length", "Requests that wait")
        self.active = self._gauge("active", "Requests being answered")
        self.cache_bytes = self._gauge("cache_bytes", "KV caches of all conversations that are kept")
        self.sessions = self._gauge("sessions", "Conversations that are kept")
        self._latest: dict[str, Gauge] = {}
        self._lock = threading.Lock()

    def _counter(self, name: str, what: str) -> Counter:
        return Counter(f"edgekv_{name}", what, registry=self.registry)

    def _gauge(self, name: str, what: str) -> Gauge:
        return Gauge(f"edgekv_{name}", what, registry=self.registry)

    def latest(self, name: str, what: str, value: float | None) -> None:
        """Sets a gauge that exists from its first value on."""
        if value is not None:
            with self._lock:
                gauge = self._latest.get(name) or self._latest.setdefault(name, self._gauge(name, what))
            gauge.set(value)

    def text(self) -> bytes:
        """Prometheus' exposition format."""
        return bytes(generate_latest(self.registry))

    def as_json(self) -> dict[str, Any]:
        """Name to value, without the request counts."""
        return {
            sample.name: sample.value
            for metric in self.registry.collect()
            for sample in metric.samples
            if not sample.labels and not sample.name.endswith("_created")
        }

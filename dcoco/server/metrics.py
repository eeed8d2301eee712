"""What the server counts: for Prometheus under vLLM's names with the prefix `dcoco:`, and for the status page."""

import time
from collections import deque
from collections.abc import Iterator
from typing import Any

from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from dcoco.engine import Engine
from dcoco.loop import Ticket
from dcoco.output import Stats

RATE_SECONDS = 5.0  # tokens a second are counted over this time
FIRST_TOKEN_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 60.0, 120.0)
TOKEN_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 2.5)
REQUEST_BUCKETS = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 60.0, 120.0, 240.0, 480.0)
FINISHED_REASONS = {"stop": "stop", "length": "length", "cancelled": "abort", "error": "error"}  # as vLLM has them


def speculation(stats: Stats) -> dict[str, Any]:
    """How well drafting went, as the server reports it."""
    return {
        "rounds": stats.rounds,
        "drafts": stats.drafts,
        "draft_tokens": stats.draft_tokens,
        "accepted_tokens": stats.accepted_tokens,
        "mean_acceptance_length": stats.mean_acceptance_length,
        "acceptance_per_position": stats.acceptance_per_position,
    }


class Metrics:
    """The counts of one server. `record` is called in the engine's thread, everything else anywhere."""

    def __init__(self, engine: Engine, model: str):
        self.engine = engine
        self.model = model
        self.begun = time.time()
        self.stats = Stats()  # of all requests together
        self.prompt_tokens = 0
        self.generation_tokens = 0
        self.finished = dict.fromkeys(FINISHED_REASONS.values(), 0)
        self._recent: deque[tuple[float, int]] = deque()  # when tokens came, and how many
        self.registry = CollectorRegistry()
        self.registry.register(self)
        self._first_token = self._histogram(
            "time_to_first_token", "From arrival to the first token", FIRST_TOKEN_BUCKETS
        )
        self._token = self._histogram(
            "inter_token_latency", "Between tokens; those of one round share its time evenly", TOKEN_BUCKETS
        )
        self._request = self._histogram("e2e_request_latency", "From arrival to the last token", REQUEST_BUCKETS)

    def record(self, ticket: Ticket, now: float, new: int) -> None:
        """Count what a request has got since the last time: `new` tokens, and maybe its end."""
        request, stats = ticket.request, ticket.request.stats
        if new:
            first = ticket.tokens == 0
            if first:
                self.prompt_tokens += len(request.prompt_ids)
                self._first_token.observe(now - ticket.begun)
            # A prompt's first token and those of its first round may come in one step: then no time lies between them.
            for _ in range(new - first):
                self._token.observe(0.0 if first else (now - ticket.latest) / new)
            self.generation_tokens += new
            self._recent.append((now, new))
            while self._recent[0][0] < now - RATE_SECONDS:
                self._recent.popleft()
        if stats.rounds > ticket.rounds:
            drafted, accepted = stats.draft_tokens - ticket.draft_tokens, stats.accepted_tokens - ticket.accepted_tokens
            committed = stats.committed_tokens - ticket.committed_tokens
            self.stats.count(drafted, len(stats.accepted_at), accepted, committed, {})
        if request.done:
            reason = "error" if request.output is None else request.output.finish_reason
            self.finished[FINISHED_REASONS[reason]] += 1
            if reason in ("stop", "length"):
                self._request.observe(now - ticket.begun)

    @property
    def tokens_per_second(self) -> float:
        """New tokens of all requests, over the last seconds."""
        since = time.perf_counter() - RATE_SECONDS
        return sum(count for when, count in self._recent.copy() if when >= since) / RATE_SECONDS

    def status(self) -> dict[str, Any]:
        """What the status page shows."""
        return {
            "running": self.engine.running,
            "waiting": len(self.engine.waiting),
            "tokens_per_second": self.tokens_per_second,
            "finished": self.finished,
            "prompt_tokens": self.prompt_tokens,
            "generation_tokens": self.generation_tokens,
            "uptime_seconds": time.time() - self.begun,
            "speculation": speculation(self.stats),
        }

    def exposition(self) -> bytes:
        """All of it in Prometheus's text format."""
        return generate_latest(self.registry)

    def collect(self) -> Iterator[Metric]:
        """What is counted here, for the registry."""
        stats, model = self.stats, self.model
        for name, text, value in (
            ("num_requests_running", "Requests that hold a row", self.engine.running),
            ("num_requests_waiting", "Requests that wait for a row", len(self.engine.waiting)),
        ):
            gauge = GaugeMetricFamily(f"dcoco:{name}", text, labels=["model_name"])
            gauge.add_metric([model], value)
            yield gauge
        for name, text, value in (
            ("prompt_tokens", "Prompt tokens run", self.prompt_tokens),
            ("generation_tokens", "Tokens generated", self.generation_tokens),
            ("spec_decode_num_drafts", "Drafts verified, at most one a round", stats.drafts),
            ("spec_decode_num_draft_tokens", "Tokens drafted and verified", stats.draft_tokens),
            ("spec_decode_num_accepted_tokens", "Draft tokens accepted", stats.accepted_tokens),
        ):
            counter = CounterMetricFamily(f"dcoco:{name}", text, labels=["model_name"])
            counter.add_metric([model], value)
            yield counter
        accepted = CounterMetricFamily(
            "dcoco:spec_decode_num_accepted_tokens_per_pos",
            "Rounds that accepted the draft's token at this position",
            labels=["model_name", "position"],
        )
        for position, count in enumerate(list(stats.accepted_at)):
            accepted.add_metric([model, str(position)], count)
        yield accepted
        finished = CounterMetricFamily(
            "dcoco:request_success", "Requests ended, by reason", labels=["model_name", "finished_reason"]
        )
        for reason, count in self.finished.items():
            finished.add_metric([model, reason], count)
        yield finished

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        histogram = Histogram(
            f"dcoco:{name}_seconds", f"{text}, in seconds", ["model_name"], registry=self.registry, buckets=buckets
        )
        return histogram.labels(self.model)

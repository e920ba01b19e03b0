"""The server's Prometheus metrics, under vLLM's names, so that vLLM dashboards work.

Does not depend on the generated text.
"""

import time
from collections import Counter as Counts
from collections.abc import Sequence
from typing import Any, TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from foredraft.contracts import StepRecord
from foredraft.engine.statistics import summarize
from foredraft.server.writer import Event, Job, Writer

# bucket limits of the histograms, in seconds (chosen)
_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.25, 2.5, 5, 10, 20, 40, 80, 160)
Kind = TypeVar("Kind", Counter, Gauge, Histogram)


class Metrics:
    """The metrics of one server; `model` is the model's name for clients. The gauges read `writer` when asked."""

    def __init__(self, model: str, writer: Writer) -> None:
        self._registry, self._model = CollectorRegistry(), model
        for name, words, read in (
            ("num_requests_running", "Texts in the batch.", lambda: writer.running),
            ("num_requests_waiting", "Texts that wait to join the batch.", lambda: writer.waiting),
            ("kv_cache_usage_perc", "Share of the KV cache in use, 0 to 1.", lambda: writer.batch.passes.memory_use),
        ):
            self._made(Gauge, name, words).set_function(read)
        self._prompts = self._made(Counter, "prompt_tokens", "Tokens of prompts.")
        self._asked = self._made(Counter, "prefix_cache_queries", "Tokens of prompts looked for in the KV cache.")
        self._cached = self._made(Counter, "prefix_cache_hits", "Tokens of prompts that were found there.")
        self._written = self._made(Counter, "generation_tokens", "Tokens generated.")
        self._drafts = self._made(Counter, "spec_decode_num_drafts", "Drafts verified.")
        self._drafted = self._made(Counter, "spec_decode_num_draft_tokens", "Drafted tokens verified.")
        self._accepted = self._made(Counter, "spec_decode_num_accepted_tokens", "Drafted tokens accepted.")
        self._per_position = self._family(
            Counter, "spec_decode_num_accepted_tokens_per_pos", "Accepted tokens by position in the draft.", "position"
        )
        self._finished = self._family(Counter, "request_success", "Finished texts by reason.", "finished_reason")
        self._first = self._timed("time_to_first_token", "From arrival to the first token.")
        self._between = self._timed("inter_token_latency", "Between tokens; the time of a step divided by its tokens.")
        self._queued = self._timed("request_queue_time", "From arrival to the batch.")
        self._whole = self._timed("e2e_request_latency", "From arrival to the end.")

    def advanced(self, job: Job, event: Event) -> None:
        now, total = time.monotonic(), summarize(event.records, 0.0)
        if not total.emitted:
            return
        self._written.inc(total.emitted)
        self._drafts.inc(total.drafting_steps)
        self._drafted.inc(total.drafted)
        self._accepted.inc(total.accepted)
        for record in event.records:
            for position in range(record.accepted):
                self._per_position.labels(self._model, str(position)).inc()
        if job.last_event:
            for _ in range(total.emitted):
                self._between.observe((now - job.last_event) / total.emitted)
        else:
            for counter in (self._prompts, self._asked):
                counter.inc(job.run.seq.prompt_length)
            self._cached.inc(job.run.cached_tokens or 0)
            self._queued.observe(job.started - job.submitted)
            self._first.observe(now - job.submitted)
        job.last_event = now

    def ended(self, job: Job, finish: str | None) -> None:
        """Count a finished text, or a cancelled one, whose finish reason is None."""
        self._whole.observe(time.monotonic() - job.submitted)
        self._finished.labels(self._model, finish or "abort").inc()

    def text(self) -> bytes:
        return generate_latest(self._registry)

    def _family(self, kind: type[Kind], name: str, words: str, *labels: str, **options: Any) -> Kind:
        return kind(f"vllm:{name}", words, ("model_name", *labels), registry=self._registry, **options)

    def _made(self, kind: type[Kind], name: str, words: str, **options: Any) -> Kind:
        return self._family(kind, name, words, **options).labels(self._model)

    def _timed(self, name: str, words: str) -> Histogram:
        return self._made(Histogram, f"{name}_seconds", words, buckets=_SECONDS)


def drafting_of(records: Sequence[StepRecord]) -> dict[str, object]:
    """Return a request's number of steps, and its drafting figures in vLLM's `metrics.speculative_decoding`."""
    total, accepted = summarize(records, 0.0), Counts(record.accepted for record in records if record.drafted)
    speculative = {
        "mean_acceptance_length": total.mean_acceptance_length,
        "draft_acceptance_rate": total.draft_acceptance_rate,
        "acceptance_histogram": [accepted[count] for count in range(max(accepted, default=-1) + 1)],
        "num_spec_steps": total.drafting_steps,
        "num_accepted_draft_tokens": total.accepted,
        "num_draft_tokens": total.drafted,
        "num_spec_tokens": max((record.drafted for record in records), default=0),
    }
    return {"speculative_decoding": speculative, "steps": total.steps}

"""Calls as OpenTelemetry traces: one a call, its pieces as children, sent to an OTLP endpoint (runs per call's end)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from ostinato.engines.errors import OstinatoError

from .call import CallRecord

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace import TracerProvider

ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"  # the standard's name; its other variables hold as well
_CLOSE_MS = 5000


def open_tracer(endpoint: str | None, environment: Mapping[str, str]) -> Tracer | None:
    """None where no endpoint is named. Raises OstinatoError where the packages for it are missing."""
    base = endpoint or environment.get(ENDPOINT)
    return Tracer(base) if base else None


class Tracer:
    """Sends records in batches from a thread of its own; what the collector does not take is dropped and logged."""

    def __init__(self, endpoint: str) -> None:
        if not endpoint.startswith(("http://", "https://")):
            raise OstinatoError(f"the OTLP endpoint is {endpoint!r}: give a collector's address, http://HOST:4318")
        self._provider = _provider(endpoint.rstrip("/") + "/v1/traces")
        self._tracer = self._provider.get_tracer("ostinato")

    def export(self, record: CallRecord, head: Iterable[tuple[bytes, bytes]] = ()) -> None:
        """A trace of its own, or part of the caller's where `head` names one, and unless that is not sampled. It has
        counts and times, no text.
        """
        from opentelemetry.trace import SpanKind, set_span_in_context

        def unix_ns(at: float) -> int:
            return int((record.began_unix + at - record.began_at) * 1e9)

        call = self._tracer.start_span(
            record.route,
            _parent(head),
            kind=SpanKind.SERVER,
            start_time=unix_ns(record.began_at),
            attributes=_about(record),
        )
        inside = set_span_in_context(call)
        for name, began_at, ended_at, spans in record.pieces:
            parts = {f"ostinato.{part}_ms": round(seconds * 1e3, 3) for part, seconds in spans.items()}
            piece = self._tracer.start_span(name, inside, start_time=unix_ns(began_at), attributes=parts)
            piece.end(unix_ns(ended_at))
        call.end(unix_ns(record.began_at + record.seconds))

    def close(self) -> None:
        """Send what is left."""
        self._provider.force_flush(_CLOSE_MS)
        self._provider.shutdown()


def _provider(endpoint: str) -> TracerProvider:
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ModuleNotFoundError as error:
        raise OstinatoError(
            f"traces need {error.name}, which is not installed: pip install 'ostinato[otel]', or unset {ENDPOINT}"
        ) from None
    provider = TracerProvider(resource=Resource.create({"service.name": "ostinato"}), shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint)))
    return provider


def _parent(head: Iterable[tuple[bytes, bytes]]) -> Context:
    """The caller's span, by the W3C's Trace Context; nobody's where its field is malformed or comes twice.

    Its tracestate is for those that we would call, and there are none.
    """
    from opentelemetry.context import Context
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    given = [value.decode("latin-1") for name, value in head if name == b"traceparent"]
    if len(given) != 1:
        return Context()
    return TraceContextTextMapPropagator().extract({"traceparent": given}, Context())


def _about(record: CallRecord) -> dict[str, str | int | float]:
    """By the names of the semantic conventions for generative models, where they have one."""
    first = record.first_token_seconds
    return {
        "http.route": record.route,
        "http.response.status_code": record.status,
        "ostinato.request.id": record.id,
        "gen_ai.usage.input_tokens": record.num_prompt,
        "gen_ai.usage.output_tokens": record.num_output,
        "ostinato.cached_tokens": record.num_cached,
        "ostinato.choices": record.num_choices,
        "ostinato.preemptions": record.num_preemptions,
        **({} if first is None else {"ostinato.ttft_ms": round(first * 1e3, 3)}),
    }

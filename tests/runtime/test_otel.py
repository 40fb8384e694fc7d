"""Traces that a collector gets over OTLP: one a call, its pieces as children that lie in it."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from ostinato.engines.errors import OstinatoError
from ostinato.runtime.otel import ENDPOINT, Tracer, open_tracer
from tests.fakes import PosLM, make_limits
from tests.http_calls import complete
from tests.serving import MODEL, VOCAB_SIZE, await_true, serving

LIMITS = make_limits()


class Collector:
    """Keeps the spans that are posted to /v1/traces."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.bodies: list[bytes] = []
        spans, bodies = self.spans, self.bodies

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                assert self.path == "/v1/traces"
                bodies.append(body)
                for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                    spans.extend(span for scope in resource.scope_spans for span in scope.spans)
                self.send_response(200)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, *args: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


@pytest.fixture
def collector() -> Iterator[Collector]:
    made = Collector()
    yield made
    made.close()


def test_each_call_is_a_trace_whose_children_fill_it(tmp_path: Path, collector: Collector) -> None:
    with serving(tmp_path, LIMITS, PosLM(LIMITS, VOCAB_SIZE)) as server, server.client() as client:
        server.bridge.ledger.tracer = open_tracer(None, {ENDPOINT: collector.url})
        assert complete(client, prompt="a secret text", max_tokens=4, ignore_eos=True).status_code == 200
        assert complete(client, temperature=-1).status_code == 400
        await_true(lambda: len(server.bridge.ledger.recent.last()) == 2, "calls are missing")
    calls = [span for span in collector.spans if not span.parent_span_id]
    assert [call.name for call in calls] == ["/v1/completions"] * 2
    assert len({call.trace_id for call in calls}) == 2
    for call, names in zip(calls, ({"read", "queue", "prefill", "decode", "host"}, {"read", "parse"}), strict=True):
        pieces = [span for span in collector.spans if span.parent_span_id == call.span_id]
        assert names <= {piece.name for piece in pieces}
        assert all(piece.trace_id == call.trace_id for piece in pieces)
        assert all(piece.start_time_unix_nano <= piece.end_time_unix_nano for piece in pieces)
        length = sum(piece.end_time_unix_nano - piece.start_time_unix_nano for piece in pieces)
        assert abs(length - (call.end_time_unix_nano - call.start_time_unix_nano)) < 1e6
    about = {attribute.key: attribute.value for attribute in calls[0].attributes}
    assert about["gen_ai.usage.output_tokens"].int_value == 4
    assert about["http.response.status_code"].int_value == 200
    assert not any(b"secret" in body for body in collector.bodies)


TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
GIVEN = f"00-{TRACE}-{PARENT}-01"


def spans_of(tmp_path: Path, collector: Collector, *heads: list[tuple[str, str]]) -> list[Span]:
    """One call with each of these heads; what the collector gets of them, but not their pieces."""
    with serving(tmp_path, LIMITS, PosLM(LIMITS, VOCAB_SIZE)) as server, server.client() as client:
        recent = server.bridge.ledger.recent
        server.bridge.ledger.tracer = open_tracer(None, {ENDPOINT: collector.url})
        for head in heads:
            body = {"model": MODEL, "prompt": "x", "max_tokens": 1}
            fields = httpx.Headers(head, encoding="latin-1")
            assert client.post("/v1/completions", json=body, headers=fields).status_code == 200
        await_true(lambda: len(recent.last()) == len(heads), "calls are missing")
    return [span for span in collector.spans if span.name == "/v1/completions"]


def test_a_callers_span_is_the_parent(tmp_path: Path, collector: Collector, caplog: pytest.LogCaptureFixture) -> None:
    states = [("tracestate", "a=1"), ("tracestate", "canary" * 1000)]
    later = [("traceparent", f"cc-{TRACE}-{PARENT}-01-what-the-future-brings")]
    unsampled = [("traceparent", GIVEN[:-1] + "0")]
    calls = spans_of(tmp_path, collector, [("TraceParent", GIVEN), *states], later, unsampled)
    assert len(calls) == 2  # who asks not to be sampled is not
    for call in calls:
        assert (call.trace_id.hex(), call.parent_span_id.hex()) == (TRACE, PARENT)
        assert call.kind == Span.SPAN_KIND_SERVER
        pieces = [span for span in collector.spans if span.parent_span_id == call.span_id]
        assert len(pieces) > 3
        assert {piece.trace_id.hex() for piece in pieces} == {TRACE}
    assert "canary" not in caplog.text


def test_a_malformed_parent_is_none(tmp_path: Path, collector: Collector) -> None:
    wrong = [
        "", "x", GIVEN.upper(), GIVEN[:-1], GIVEN + "-00", GIVEN + "0", GIVEN.replace("-", "_"), "ff" + GIVEN[2:],
        f"00-{'0' * 32}-{PARENT}-01", f"00-{TRACE}-{'0' * 16}-01", f"00-{TRACE}-{PARENT}-é1",
        "cc" + GIVEN[2:] + "-" * 600,
    ]  # fmt: skip
    twice = [("traceparent", GIVEN)] * 2
    calls = spans_of(tmp_path, collector, *([("traceparent", value)] for value in wrong), twice)
    assert len(calls) == len(wrong) + 1
    assert not any(call.parent_span_id for call in calls)
    assert len({call.trace_id for call in calls} | {bytes.fromhex(TRACE)}) == len(calls) + 1


def test_without_an_endpoint_nothing_is_sent_and_a_wrong_one_is_refused() -> None:
    assert open_tracer(None, {}) is None
    with pytest.raises(OstinatoError, match="give a collector's address"):
        Tracer("collector:4317")


def test_without_the_packages_the_extra_is_named() -> None:
    code = (
        "import sys; sys.modules['opentelemetry.sdk.trace'] = None\n"
        "from ostinato.runtime.otel import open_tracer\n"
        "from ostinato.engines.errors import OstinatoError\n"
        "try:\n    open_tracer('http://127.0.0.1:1', {})\n"
        "except OstinatoError as error:\n    print(error)"
    )
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert "ostinato[otel]" in told

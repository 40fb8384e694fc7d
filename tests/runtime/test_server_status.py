"""Routes that tell of the server: models, health, metrics; and the hint of a full queue."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx

from tests.fakes import PosLM, make_limits
from tests.http_calls import complete, error_of
from tests.serving import MODEL, VOCAB_SIZE, GatedLM, serving


def test_models_and_health(client: httpx.Client) -> None:
    (card,) = client.get("/v1/models").json()["data"]
    assert (card["id"], card["object"], card["max_model_len"]) == (MODEL, "model", 128)
    assert client.get(f"/v1/models/{MODEL}").json() == card
    assert client.get("/health").status_code == client.get("/health/ready").status_code == 200


def test_metrics_count_and_have_no_label_of_a_client(tmp_path: Path) -> None:
    limits = make_limits(max_rows=4)
    with serving(tmp_path, limits, PosLM(limits, VOCAB_SIZE)) as server, server.client() as client:
        before = server.metrics()
        complete(client, prompt=[5] * 33, n=2, max_tokens=4, ignore_eos=True)
        complete(client, prompt=[5] * 33, max_tokens=4, ignore_eos=True)
        for number in range(20):
            client.get(f"/nowhere/{number}")
            complete(client, model=f"canary{number}", user=f"canary{number}")
        server.await_idle()
        text = server.metrics()
    values = {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in text.splitlines() if line[0] != "#"}
    assert values["ostinato:prompt_tokens_total"] == 99
    assert values["ostinato:generation_tokens_total"] == 12
    assert values['ostinato:request_success_total{finished_reason="length"}'] == 3
    assert values["ostinato:time_to_first_token_seconds_count"] == 3
    assert values["ostinato:inter_token_latency_seconds_count"] == 9
    assert values["ostinato:e2e_request_latency_seconds_count"] == 3
    assert values["ostinato:prefix_cache_queries_total"] == 99
    assert values["ostinato:prefix_cache_hits_total"] >= 32
    for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "num_preemptions_total"):
        assert values[f"ostinato:{name}"] == 0
    assert "canary" not in text
    known = {line.rpartition(" ")[0] for line in before.splitlines()}
    new = {name for line in text.splitlines() if (name := line.rpartition(" ")[0]) not in known}
    assert new == {
        'ostinato:http_requests_total{handler="/metrics",method="GET",status="2xx"}',
        'ostinato:http_requests_total{handler="/v1/completions",method="POST",status="2xx"}',
        'ostinato:http_requests_total{handler="/v1/completions",method="POST",status="4xx"}',
        'ostinato:http_requests_total{handler="other",method="GET",status="4xx"}',
    }


def test_a_full_queue_is_refused_with_a_hint(tmp_path: Path) -> None:
    limits = make_limits(max_rows=2)
    gated = GatedLM(PosLM(limits, VOCAB_SIZE))
    with serving(tmp_path, limits, gated, 3) as server, server.client() as client, ThreadPoolExecutor(1) as pool:
        first = pool.submit(complete, client, n=4, max_tokens=2, ignore_eos=True)
        gated.await_step()
        response = complete(client, n=2)
        assert error_of(response, 429)["code"] == "queue_full"
        assert int(response.headers["retry-after"]) > 0
        second = pool.submit(complete, client, n=1, max_tokens=2, ignore_eos=True)
        gated.permit(100)
        assert first.result().status_code == second.result().status_code == 200
        assert complete(client, n=2, max_tokens=1).status_code == 200

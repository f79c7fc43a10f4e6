"""Requests that a busy native engine answered give the same tokens again, one by one."""

import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.servers.served import serve

NUM_REQUESTS = 100
WORDS = ("tell", "me", "a", "story", "about", "the", "sea", "and", "an", "old", "red", "boat")


def body_of(seed: int, model: str) -> dict[str, Any]:
    rng = random.Random(seed)
    words = rng.choices(WORDS, k=rng.choice([4, 40, 120]))
    body: dict[str, Any] = {"model": model, "max_tokens": rng.choice([4, 12, 24])}
    body["messages"] = [{"role": "user", "content": " ".join(words)}]
    body |= {"temperature": rng.choice([0, 0.7, 1.2]), "n": rng.choice([1, 1, 2])}
    if seed % 4 == 0:
        body["response_format"] = {"type": "json_object"}
    if seed % 5 == 0:
        body |= {"top_p": 0.9, "frequency_penalty": 0.5}
    return body


@pytest.mark.slow
def test_replaying_100_recorded_requests_gives_the_same_tokens(tmp_path: Path) -> None:
    env = {"LLM_ENGINE_REQUESTS__RECORD": "true", "LLM_ENGINE_STORAGE__PATH": str(tmp_path)}
    with serve("--batch-size", "8", env=env) as server:
        model = server.model
        with httpx.Client(base_url=server.url, timeout=600) as client:

            def answer(seed: int) -> str:
                reply = client.post("/v1/chat/completions", json=body_of(seed, model))
                assert reply.status_code == 200, reply.text
                return str(reply.json()["id"])

            def replay(request_id: str) -> dict[str, Any]:
                reply = client.post(f"/v1/admin/requests/{request_id}/replay", json={})
                assert reply.status_code == 200, reply.text
                found: dict[str, Any] = reply.json()
                return found

            with ThreadPoolExecutor(8) as pool:
                ids = list(pool.map(answer, range(NUM_REQUESTS)))
            client.post("/v1/admin/cache/flush", json={})
            results = [replay(each) for each in ids]
    assert [each["id"] for each in results if not each["same"]] == []
    assert all(each["same_fingerprint"] for each in results)

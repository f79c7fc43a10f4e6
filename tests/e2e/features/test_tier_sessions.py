"""A conversation continues from its blocks after a restart, and on another replica."""

import time
from pathlib import Path
from typing import Any

import httpx

from tests.support.servers.served import ServedEngine, serve

MODEL = "smollm2-135m-instruct"
STORY = "Once upon a time there was a fox who lived beside a river and counted boats. " * 12
SESSION = {"X-Session-Id": "fox"}
STORED_S = 10.0
TIER = '[cache.tiers]\ndisk_path = "{folder}/kv"\n'
REPLICAS = """
[backends.pair]
kind = "native"
model = "{model}"
replicas = 2
[models."{model}"]
backends = ["pair"]
policy = "round_robin"
"""


def post(server: ServedEngine, path: str, **body: Any) -> Any:
    answer = httpx.post(server.url + path, json=body, headers=SESSION, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer.json()


def respond(server: ServedEngine, text: str, **fields: Any) -> Any:
    fixed = {"model": server.model, "temperature": 0, "max_output_tokens": 16}
    return post(server, "/v1/responses", input=text, **fixed, **fields)


def chat(server: ServedEngine, *said: str) -> Any:
    roles = ("user", "assistant") * len(said)
    messages = [{"role": role, "content": text} for role, text in zip(roles, said, strict=False)]
    fixed = {"model": server.model, "temperature": 0, "max_tokens": 16}
    return post(server, "/v1/chat/completions", messages=messages, **fixed)


def from_tiers(server: ServedEngine, answer: Any) -> dict[str, int]:
    """How many tokens came from which tier, as the explanation of a request tells it. A request is
    explained when it has ended, which is just after its answer.
    """
    until = time.monotonic() + STORED_S
    while (told := httpx.get(f"{server.url}/v1/admin/requests/{answer['id']}")).status_code == 404:
        assert time.monotonic() < until, "the request has no explanation"
        time.sleep(0.05)
    return told.json()["cache"]["loaded_tokens"]


def wait_until_stored(folder: Path, num_tokens: int) -> None:
    """Wait until the tier has all whole blocks of this many tokens."""
    until = time.monotonic() + STORED_S
    while len(list(folder.rglob("*.full"))) < num_tokens // 16:
        assert time.monotonic() < until, "the blocks were not stored"
        time.sleep(0.05)


def test_conversations_continue_from_disk_after_a_restart(default_model, tmp_path: Path) -> None:
    (tmp_path / "kv").mkdir(mode=0o700)
    config = tmp_path / "engine.toml"
    config.write_text(TIER.format(folder=tmp_path))
    words = (MODEL, "--config", str(config), "--storage-path", str(tmp_path / "stored"))
    with serve(*words) as server:
        first = respond(server, STORY, store=True)
        said = chat(server, "Tell me: " + STORY)
    with serve(*words) as server:
        second = respond(server, "Go on.", previous_response_id=first["id"])
        cached = second["usage"]["input_tokens_details"]["cached_tokens"]
        assert cached >= first["usage"]["input_tokens"] // 16 * 16 > 100
        assert from_tiers(server, second) == {"disk": cached}
        text = said["choices"][0]["message"]["content"]
        more = chat(server, "Tell me: " + STORY, text, "Go on.")
        cached = more["usage"]["prompt_tokens_details"]["cached_tokens"]
        loaded = from_tiers(server, more)
        assert cached >= said["usage"]["prompt_tokens"] // 16 * 16 > 100
        assert cached - 32 <= loaded["disk"] <= cached, "all but the template's first tokens"


def test_another_replica_reuses_blocks_from_the_shared_disk_tier(
    default_model, tmp_path: Path
) -> None:
    (tmp_path / "kv").mkdir(mode=0o700)
    config = tmp_path / "engine.toml"
    config.write_text(TIER.format(folder=tmp_path) + REPLICAS.format(model=MODEL))
    words = ("--config", str(config), "--storage-path", str(tmp_path / "stored"))
    with serve(*words) as server:
        first = respond(server, STORY, store=True)
        # The last token is never computed.
        wait_until_stored(tmp_path / "kv", first["usage"]["total_tokens"] - 1)
        second = respond(server, "Go on.", previous_response_id=first["id"])
        cached = second["usage"]["input_tokens_details"]["cached_tokens"]
        assert cached >= first["usage"]["input_tokens"] // 16 * 16
        assert from_tiers(server, second) == {"disk": cached}, "nothing of it was in its KV pool"

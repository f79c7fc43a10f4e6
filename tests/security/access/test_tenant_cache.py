"""What one tenant has asked is no quicker for another, and a flood of one does not push out what
another has warmed (SEC-31; T1).

Times are measured by the scoreboard; here the engine's own counters are the gate.
"""

import json
from pathlib import Path

import httpx
import pytest

from engine.core.key_file import add_key
from engine.core.observability.metrics import Metrics
from engine.servers.app import create_app
from tests.support.fakes.fake_backend import MODEL, FakeBackend
from tests.support.servers.live_server import chat, make_settings
from tests.support.servers.served import serve
from tests.support.toy_engine.engine import ToyEngine

PREFIX = [(7 * number) % 20 + 1 for number in range(2048)]


def ask(engine: ToyEngine, name: str, tenant: str, prompt: list[int]) -> int:
    """Tokens that were found in the cache."""
    engine.submit(name, prompt, max_tokens=1, salt=f"salt of {tenant}", tenant=tenant)
    engine.run()
    return int(engine.outcomes[name, 0].num_cached)


def test_a_prefix_cached_by_another_tenant_is_never_found() -> None:
    engine = ToyEngine(num_blocks=2200, block_size=2, max_seq_len=4096, budget=512)
    assert ask(engine, "a1", "a", PREFIX) == 0
    assert ask(engine, "b1", "b", PREFIX) == 0
    assert engine.kv.num_hit == 0
    assert ask(engine, "a2", "a", PREFIX) > 2000 and ask(engine, "b2", "b", PREFIX) > 2000
    engine.check()


@pytest.mark.parametrize("num_floods", [1, 3])
def test_a_flood_leaves_another_tenant_its_cache_share(num_floods: int) -> None:
    engine = ToyEngine(num_blocks=129, block_size=2, max_seq_len=128, budget=128)
    warm = PREFIX[:40]  # of 128 blocks 20, and one for its answer
    ask(engine, "warm", "victim", warm)
    for number in range(300):
        unique = [number % 19 + 1, number // 19 % 19 + 1, *PREFIX[number : number + 30]]
        ask(engine, f"f{number}", f"flood{number % num_floods}", unique)
    assert engine.kv.radix.num_evicted > 1000
    assert ask(engine, "again", "victim", warm) >= 38
    engine.check()


async def test_each_key_has_its_own_cache_namespace_unless_keys_share_a_tenant(
    tmp_path: Path,
) -> None:
    file, backend = tmp_path / "keys.json", FakeBackend()
    keys = [add_key(file, name, tenant=tenant)[0] for name, tenant in KEYS]
    settings = make_settings(server={"keys_file": file})
    app = create_app(settings, backend, Metrics(MODEL))
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        for key in keys:
            headers = {"authorization": f"Bearer {key}"}
            assert (
                await client.post("/v1/chat/completions", json=chat(), headers=headers)
            ).is_success
    salts = [request.context.salt for request in backend.requests]
    assert all(salts) and salts[2] == salts[3] and len(set(salts)) == 3


KEYS = [("alice", None), ("bob", None), ("old", "team"), ("new", "team")]


@pytest.mark.slow
def test_cached_tokens_over_http_are_never_another_tenants(
    default_model: Path, tmp_path: Path
) -> None:
    file = tmp_path / "keys.json"
    keys = [add_key(file, name)[0] for name in ("alice", "bob")]
    text = " ".join(f"word{number}" for number in range(300))
    with serve(str(default_model), env={"LLM_ENGINE_SERVER__KEYS_FILE": str(file)}) as server:

        def cached(key: str) -> int:
            body = {"prompt": text, "max_tokens": 1}
            headers = {"authorization": f"Bearer {key}"}
            model = httpx.get(f"{server.url}/v1/models", headers=headers).json()["data"][0]["id"]
            reply = httpx.post(
                f"{server.url}/v1/completions",
                json=body | {"model": model},
                headers=headers,
                timeout=60,
            )
            usage = json.loads(reply.text)["usage"]
            return int(usage["prompt_tokens_details"]["cached_tokens"])

        assert [cached(key) for key in (keys[0], keys[1])] == [0, 0]
        assert min(cached(key) for key in keys) > 500

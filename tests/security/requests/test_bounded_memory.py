"""What clients can make up without end (names, salts, keys, users, sessions, schemas) is kept
nowhere without a bound (SEC-17; T1, T2).

A few of each, and that nothing of them stays, are in test_leaks.py; 5,000 schemas in
test_grammar_bombs.py.
"""

import gc
from pathlib import Path

import httpx
import psutil
import pytest

from engine.core.observability.metrics import Metrics
from engine.servers.access import rate_windows as windows
from engine.servers.app import create_app
from tests.support.fakes.fake_backend import MODEL, FakeBackend
from tests.support.servers.live_server import chat, make_settings
from tests.support.toy_engine.engine import ToyEngine

KEY = "k" * 32
MAX_GROWTH_BYTES = 32 * 2**20
COUNT = 5_000


def files_below(folder: Path) -> dict[Path, int]:
    return {path: path.stat().st_size for path in folder.rglob("*") if path.is_file()}


@pytest.mark.slow
async def test_5000_distinct_names_keys_and_sessions_do_not_grow_memory(tmp_path: Path) -> None:
    metrics, backend = Metrics(MODEL), FakeBackend(["x"])
    limits = {"requests_per_minute": 10**6, "auth_failures_per_minute": 10**6}
    settings = make_settings(server={"api_key": KEY}, storage={"path": tmp_path}, limits=limits)
    app = create_app(settings, backend, metrics)
    good = {"authorization": f"Bearer {KEY}"}

    async def ask(number: int) -> None:
        address = f"2001:db8:{number:x}::1"
        transport = httpx.ASGITransport(app=app, client=(address, 1))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            schema = {"type": "object", "properties": {f"n{number}": {"type": "string"}}}
            body = chat(
                user=f"u{number}",
                cache_salt=f"s{number}",
                prompt_cache_key=f"c{number}",
                metadata={f"m{number}": "x"},
                response_format={
                    "type": "json_schema",
                    "json_schema": {"name": "n", "schema": schema},
                },
            )
            headers = {"x-request-id": f"r{number}", "x-session-id": f"x{number}"}
            reply = await client.post("/v1/chat/completions", json=body, headers=headers | good)
            assert reply.status_code == 200, reply.text
            body["model"] = f"model-{number}"
            reply = await client.post("/v1/chat/completions", json=body, headers=good)
            assert reply.status_code == 404
            wrong = {"authorization": f"Bearer wrong-{number}"}
            assert (await client.get(f"/v1/files/f{number}", headers=wrong)).status_code == 401
            assert (await client.get(f"/no/such/{number}", headers=good)).status_code == 404
        backend.requests.clear()

    for number in range(300):
        await ask(number)
    gc.collect()
    process = psutil.Process()
    before, series = process.memory_info().rss, len(metrics.render()[0].splitlines())
    kept = files_below(tmp_path)
    for number in range(300, 300 + COUNT):
        await ask(number)
    gc.collect()
    assert process.memory_info().rss - before < MAX_GROWTH_BYTES
    assert len(metrics.render()[0].splitlines()) == series
    assert files_below(tmp_path) == kept


async def test_throttling_entries_of_addresses_and_keys_expire(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert windows.MAX_NAMES <= 20_000
    monkeypatch.setattr(windows, "MAX_NAMES", 500)
    counts = windows.Windows()
    for number in range(2_000):
        await counts.add(f"address-{number}", 1)
        assert len(counts._memory.storage) <= 501


def test_cached_salts_and_tenants_are_bounded_by_the_pool() -> None:
    engine = ToyEngine(num_blocks=33, block_size=2, max_slots=4)
    for number in range(200):
        engine.submit(
            f"r{number}", (1, 2, 3, 4, 5), max_tokens=1, salt=str(number), tenant=str(number)
        )
        engine.run()
        engine.outcomes.clear()
        engine.requests.clear()
    radix = engine.kv.radix
    assert len(radix._roots) <= 32
    leaves = radix._leaves
    assert max(len(leaves.by_tenant), len(leaves._seen), len(leaves._present)) <= 32
    assert len(leaves) <= 64 + 4 * 32
    engine.check()

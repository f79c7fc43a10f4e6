"""A plugin that raises, sleeps, lies or leaks harms nobody but its own work (FLT-23; T1).

Plugin code is trusted not to attack; what is shown here is that its faults stay where they are, and
that it is never handed what it has no need of.
"""

import asyncio
import gc
import logging
import threading
import time
from typing import Any

import httpx
import msgspec
import pytest

from engine.core.config_tables import PluginTable
from engine.core.errors import UnavailableError
from engine.core.interfaces.backend import TextEvent
from engine.core.interfaces.plugin import (
    Edit,
    Filtered,
    InferencePlugin,
    OnFailure,
    PluginRequest,
    PluginResponse,
)
from engine.plugins.host import MAX_FAILURES
from tests.support.fakes.fake_backend import FakeBackend
from tests.support.fakes.plugin_hosts import a_chat, fed, plugged, running
from tests.support.servers.live_server import chat, live_server

TEXT = "Hello from a fake model."


class Faulty(InferencePlugin):
    """Does `fault` in one of its hooks."""

    name = "faulty"
    version = "1"

    def __init__(self, hook: str, fault: Any, rewrites: bool = False) -> None:
        self.hook, self.fault = hook, fault
        self.num_calls = 0
        if rewrites:
            self.rewrites_response = True  # type: ignore[misc]

    def _do(self, hook: str, value: Any = None) -> Any:
        if hook == self.hook:
            self.num_calls += 1
            return self.fault(value)
        return None

    async def initialize(self, config: Any) -> None:
        self._do("initialize")

    async def pre_inference(self, request: PluginRequest) -> PluginRequest | None:
        return self._do("pre", request)

    async def post_inference(self, response: PluginResponse) -> PluginResponse | None:
        return self._do("post", response)

    def text_filter(self, request: PluginRequest) -> Any:
        if not self.hook.startswith("filter"):
            return None
        self._do("filter_made", request)
        return lambda pending, last: self._do("filter", pending) or Filtered(len(pending))


def raises(kind: type[BaseException]) -> Any:
    def fault(_: Any) -> Any:
        raise kind("the client said: my secret words")

    return fault


def text_of(events: list[Any]) -> str:
    return "".join(each.text for each in events if isinstance(each, TextEvent))


FAULTS = [
    raises(ValueError),
    raises(SystemExit),
    raises(asyncio.CancelledError),
    lambda _: "not what was asked for",
    lambda _: time.sleep(0.3),
]
NONSENSE, SLEEPS = 3, 4


def limit(fault: int) -> float:
    """Short only where it is to pass: the machine may be busy."""
    return 0.1 if fault == SLEEPS else 20.0


@pytest.mark.parametrize("hook", ["pre", "post", "filter", "filter_made"])
@pytest.mark.parametrize("fault", range(len(FAULTS)))
async def test_a_failing_plugin_with_on_failure_pass_is_skipped(hook: str, fault: int) -> None:
    plugin = Faulty(hook, FAULTS[fault], rewrites=True)
    async with running([plugin], timeout_s=limit(fault)) as made:
        (host,) = made.hosts
        for _ in range(MAX_FAILURES + 2):
            assert text_of(await fed(made, a_chat())) == TEXT
        if hook == "filter_made" and fault == NONSENSE:
            return  # nobody looks at what that returns
        assert not host.is_active and host.num_failures >= MAX_FAILURES
        assert made.health().ready
        calls = plugin.num_calls
        await fed(made, a_chat())
        assert plugin.num_calls == calls


async def test_failures_of_several_plugin_hooks_add_up() -> None:
    """A hook that hangs holds up the thread, so another may fail in its place."""

    class FailsTwice(Faulty):
        def _do(self, hook: str, value: Any = None) -> Any:
            if hook in ("pre", "post"):
                raise ValueError

    async with running([FailsTwice("", None, rewrites=True)]) as made:
        (host,) = made.hosts
        await fed(made, a_chat())
        assert host.is_active and host.num_failures == 2
        await fed(made, a_chat())
        assert not host.is_active and host.num_failures == MAX_FAILURES


@pytest.mark.parametrize("hook", ["pre", "post", "filter"])
@pytest.mark.parametrize("fault", range(len(FAULTS)))
async def test_a_failing_plugin_with_on_failure_refuse_refuses_requests(
    hook: str, fault: int
) -> None:
    backend = FakeBackend()
    plugin = Faulty(hook, FAULTS[fault], rewrites=True)
    async with running([plugin], backend, timeout_s=limit(fault), on_failure="refuse") as made:
        for attempt in range(MAX_FAILURES):
            assert made.health().ready, attempt
            with pytest.raises(UnavailableError, match="faulty") as refused:
                await fed(made, a_chat())
            assert refused.value.status == 503 and "secret" not in str(refused.value)
        num_asked = len(backend.requests)
        with pytest.raises(UnavailableError, match="'faulty' is off after 3 failures"):
            await fed(made, a_chat())
        assert len(backend.requests) == num_asked
        health = made.health()
        assert not health.ready and "faulty" in health.detail
        made.hosts[0].enable()
        assert made.health().ready
        for _ in range(MAX_FAILURES - 1):  # failures from before count no more
            with pytest.raises(UnavailableError, match="faulty"):
                await fed(made, a_chat())
            assert made.hosts[0].is_active


async def test_no_text_leaks_when_a_filter_fails_midway() -> None:
    seen: list[str] = []

    def fault(pending: str) -> Any:
        if "fake" in pending:
            raise ValueError
        seen.append(pending)
        return Filtered(len(pending), (Edit(0, len(pending), "x"),))

    events: list[Any] = []
    async with running([Faulty("filter", fault)], on_failure="refuse") as made:
        with pytest.raises(UnavailableError):
            await made.chat(a_chat()).feed(events.append)  # type: ignore[attr-defined]
    assert set(text_of(events)) <= {"x"} and seen


@pytest.mark.parametrize("on_failure", ["pass", "refuse"])
async def test_a_plugin_that_fails_to_initialize_is_skipped_or_ends_the_start(
    on_failure: OnFailure,
) -> None:
    made = plugged([Faulty("initialize", raises(ValueError))], on_failure=on_failure)
    if on_failure == "refuse":
        with pytest.raises(Exception, match=r"plugins\.faulty: the plugin could not start"):
            await made.start()
        return
    await made.start()
    assert text_of(await fed(made, a_chat())) == TEXT
    await made.stop()


async def test_a_plugin_that_sleeps_does_not_block_the_event_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its thread sleeps for as long as it likes: other requests, and the end, don't wait for it."""
    monkeypatch.setattr("engine.plugins.host.CLOSE_S", 0.1)
    monkeypatch.setattr("engine.plugins.host.JOIN_S", 0.1)
    release = threading.Event()
    plugin = Faulty("pre", lambda _: release.wait(60))
    made = plugged([plugin], timeout_s=0.5)
    await made.start()
    ticks = 0

    async def tick() -> None:
        nonlocal ticks
        while True:
            await asyncio.sleep(0.01)
            ticks += 1

    ticking = asyncio.create_task(tick())
    try:
        async with asyncio.timeout(30):
            answers = await asyncio.gather(*(fed(made, a_chat()) for _ in range(8)))
        assert [text_of(each) for each in answers] == [TEXT] * 8
        assert ticks >= 5
        ticking.cancel()
        await asyncio.wait_for(made.stop(), 30)
    finally:
        release.set()


async def test_observing_plugins_run_in_the_background_and_are_bounded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("engine.plugins.host.MAX_OBSERVING", 4)
    release = threading.Event()

    class Slow(InferencePlugin):
        name = "slow"
        version = "1"

        async def post_inference(self, response: PluginResponse) -> None:
            release.wait(60)

    async with running([Slow()], timeout_s=30) as made:
        for _ in range(20):
            assert text_of(await fed(made, a_chat())) == TEXT
        assert len(made.hosts[0]._observing) <= 4
        release.set()


class Hoarding(InferencePlugin):
    """Keeps all that it is given, and scribbles on it when it is too late."""

    name = "hoarding"
    version = "1"

    def __init__(self) -> None:
        self.kept: list[Any] = []

    async def pre_inference(self, request: PluginRequest) -> PluginRequest | None:
        self.kept.append(request)
        request.messages[0]["content"] += " scribble"
        return None

    async def post_inference(self, response: PluginResponse) -> PluginResponse | None:
        self.kept.append(response)
        for kept in self.kept:
            if isinstance(kept, PluginRequest):
                kept.messages[0]["content"] = "scribble"
        return None


def test_a_plugin_sees_no_api_key_and_changes_only_what_it_returns() -> None:
    key = "a-key-of-this-server-0123456789"
    backend, plugin = FakeBackend(), Hoarding()
    made = plugged([plugin], backend)
    with live_server(made, server={"api_key": key}) as server:  # type: ignore[arg-type]
        headers = {"Authorization": f"Bearer {key}", "X-Session-Id": "session-of-somebody"}
        for _ in range(2):
            body = chat(user="somebody", metadata={"m": "private"}, cache_salt="salted")
            answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, headers=headers)
            assert answer.status_code == 200
    assert [each.messages[0]["content"] for each in backend.requests] == ["say hello"] * 2
    context = backend.requests[0].context
    everything = repr(plugin.kept) + repr([gc.get_referents(each) for each in plugin.kept])
    for secret in (key, context.salt, context.tenant, "session-of-somebody", "somebody", "private"):
        assert secret and secret not in everything
    tenants = {each.tenant for each in plugin.kept if isinstance(each, PluginRequest)}
    assert len(tenants) == 1 and "" not in tenants


@pytest.mark.parametrize(
    "change",
    [
        {"request_id": "other"},
        {"tenant": "other"},
        {"model": "other"},
        {"messages": ()},
        {"messages": ({"role": "user"},)},
        {"messages": ({"role": "root", "content": "x"},)},
        {"messages": "text"},
        {"prompt": "text"},
        {"params": None},
    ],
)
async def test_a_change_that_a_plugin_may_not_make_is_a_failure(change: dict[str, Any]) -> None:
    backend = FakeBackend()
    plugin = Faulty("pre", lambda request: msgspec.structs.replace(request, **change))
    async with running([plugin], backend) as made:
        assert text_of(await fed(made, a_chat())) == TEXT
        assert made.hosts[0].num_failures == 1
    assert backend.requests[0] == a_chat()


@pytest.mark.parametrize(
    "change", [{"n": 4}, {"logprobs": 5}, {"temperature": float("nan")}, {"max_tokens": 0}]
)
async def test_a_plugin_cannot_set_sampling_parameters_out_of_bounds(
    change: dict[str, Any],
) -> None:
    def fault(request: PluginRequest) -> PluginRequest:
        assert request.params is not None
        params = msgspec.structs.replace(request.params, **change)
        return msgspec.structs.replace(request, params=params)

    async with running([Faulty("pre", fault)]) as made:
        await fed(made, a_chat())
        assert made.hosts[0].num_failures == 1


async def test_plugin_failures_are_logged_without_client_text(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.INFO):
        async with running([Faulty("pre", raises(ValueError))]) as made:
            await fed(made, a_chat())
    assert "plugin faulty failed in pre_inference: ValueError" in caplog.text
    assert "secret" not in caplog.text and "Traceback" not in caplog.text


def test_plugin_tables_reject_invalid_values() -> None:
    for wrong in ({"timeout_s": 0}, {"timeout_s": True}, {"order": -1}, {"on_failure": "ignore"}):
        with pytest.raises(ValueError):
            PluginTable(**wrong)  # type: ignore[arg-type]

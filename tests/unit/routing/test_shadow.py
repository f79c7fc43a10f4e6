"""Shadow traffic: who is copied, what is compared, and that nobody has to wait for it."""

import asyncio
import gc
import typing
from typing import Any

import msgspec
import pytest
from prometheus_client import CollectorRegistry

from engine.core.errors import UnavailableError
from engine.core.interfaces.backend import (
    LISTENERS,
    ChatRequest,
    FinishEvent,
    GenerationContext,
    TextEvent,
    UsageEvent,
)
from engine.core.interfaces.interp import Capture, Edit, InterpRequest, Lens
from engine.core.interfaces.request import RequestNotes, SamplingParams
from engine.routing.metrics import ShadowMetrics
from engine.routing.shadow import traffic as shadow_module
from engine.routing.shadow.traffic import Mirror, Shadow, ShadowRoute
from tests.support.fakes.fake_backend import DEFAULT_WORDS, FakeBackend

USAGE = UsageEvent(prompt_tokens=1, completion_tokens=1, cached_tokens=0)


class Shadowed:
    """A model `m` whose requests are all copied to a fake backend."""

    def __init__(self, **options: Any) -> None:
        self.backend = FakeBackend()
        self.backend.token_s = None
        self.registry = CollectorRegistry()
        share = options.pop("share", 1.0)
        self.shadow = Shadow(
            [ShadowRoute("m", "other", (self.backend,), share)],
            ShadowMetrics(self.registry),
            chance=lambda: 0.5,
            **options,
        )

    def request(self, **params: Any) -> ChatRequest:
        context = GenerationContext(
            request_id="r1",
            params=SamplingParams(**{"temperature": 0.0, "max_tokens": 99} | params),
        )
        return ChatRequest(context=context, messages=({"role": "user", "content": "hi"},))

    def mirror(self, **params: Any) -> Mirror | None:
        return self.shadow.mirror("m", self.request(**params))

    def answer(self, *words: str, reason: str = "stop", **params: Any) -> None:
        """The primary answers one request."""
        mirror = self.mirror(**params)
        assert mirror is not None
        for word in words:
            mirror.primary(TextEvent(0, word, 1))
        mirror.primary(FinishEvent(0, reason))
        mirror.primary(USAGE)

    @property
    def lane(self) -> dict[str, Any]:
        (lane,) = self.shadow.report()["models"]
        return lane

    async def settle(self) -> None:
        async with asyncio.timeout(60):
            while self.lane["in_flight"] or self.lane["waiting"]:
                await asyncio.sleep(0)

    def value(self, name: str, **labels: str) -> float | None:
        return self.registry.get_sample_value(
            name, {"model_name": "m", "backend": "other"} | labels
        )


async def test_an_equal_shadow_answer_is_counted_as_identical():
    each = Shadowed()
    each.answer(*DEFAULT_WORDS)
    await each.settle()
    assert each.lane["outcomes"] == {"identical": 1}
    assert each.lane["differences"] == {}
    assert each.value("engine_shadow_requests_total", outcome="identical") == 1
    (sent,) = each.backend.requests
    assert sent.context.request_id == "shadow-r1"  # it may be the primary's own backend
    assert sent.messages == each.request().messages
    (record,) = each.shadow.report()["recent"]
    assert record["request_id"] == "r1" and record["num_tokens"] == [6, 6]


async def test_the_first_difference_of_a_shadow_answer_is_counted_in_tokens():
    each = Shadowed()
    each.answer("Hello", " from", " a", " real", " model", reason="length")
    await each.settle()
    assert each.lane["outcomes"] == {"different": 1}
    assert each.lane["differences"] == {"text": 1, "finish_reason": 1, "num_tokens": 1}
    assert each.value("engine_shadow_differences_total", kind="text") == 1
    assert each.value("engine_shadow_divergence_tokens_sum") == 3
    (record,) = each.shadow.report()["recent"]
    assert record["first_divergence_token"] == 3
    assert record["finish_reasons"] == [["length"], ["stop"]]
    assert not {"real", "Hello", "hi"} & set(str(record).split())  # nobody's words


async def test_the_latest_shadow_copies_are_listed_first():
    each = Shadowed()
    for reason in ("length", "stop"):
        each.answer(*DEFAULT_WORDS, reason=reason)
        await each.settle()
    recent = each.shadow.report()["recent"]
    assert [record["finish_reasons"][0] for record in recent] == [["stop"], ["length"]]


async def test_sampled_shadow_answers_are_not_compared():
    each = Shadowed()
    each.answer("something", " else", temperature=1.0)
    await each.settle()
    assert each.lane["outcomes"] == {"sampled": 1}
    assert each.lane["differences"] == {}


async def test_top_k_1_is_compared_like_temperature_0():
    each = Shadowed()
    each.answer(*DEFAULT_WORDS, temperature=1.0, top_k=1)
    await each.settle()
    assert each.lane["outcomes"] == {"identical": 1}


@pytest.mark.parametrize("places", [(5, 6), (5, 2), (3, 4)])
async def test_choices_of_a_shadow_answer_are_compared_separately(places):
    each = Shadowed()
    mirror = each.mirror(n=2)
    for choice, place in enumerate(places):
        for word in (*DEFAULT_WORDS[:place], *("!" for _ in DEFAULT_WORDS[place:])):
            mirror.primary(TextEvent(choice, word, 1))
        mirror.primary(FinishEvent(choice, "stop"))
    mirror.primary(USAGE)
    await each.settle()
    assert each.shadow.report()["recent"][0]["first_divergence_token"] == min(places)


async def test_only_the_configured_share_of_the_models_requests_is_copied():
    assert Shadowed(share=0.5).mirror() is None
    assert Shadowed(share=0.6).mirror() is not None
    each = Shadowed()
    assert each.shadow.mirror("another", each.request()) is None


async def test_the_shadow_copy_of_a_request_without_an_answer_is_dropped():
    each = Shadowed(max_held=1)
    mirror = each.mirror()
    mirror.primary(TextEvent(0, "Hello", 1))
    assert each.mirror() is None
    del mirror  # the primary failed, or its client left
    gc.collect()
    assert each.mirror() is not None
    await each.settle()
    assert not each.backend.requests
    assert each.lane["outcomes"] == {"dropped": 1}


async def test_requests_that_the_shadow_backend_cannot_serve_are_not_copied():
    each = Shadowed()
    each.backend.set_card(lacks=("min_p",))
    assert each.mirror(min_p=0.1) is None
    each.backend.ready = False
    assert each.mirror() is None
    assert each.lane["outcomes"] == {"unsupported": 1, "unavailable": 1}


@pytest.mark.parametrize("fault", [UnavailableError("it died"), RuntimeError("a bug")])
async def test_a_failing_shadow_backend_is_counted(fault):
    each = Shadowed()
    each.backend.failure, each.backend.fail_after = fault, 2
    each.answer(*DEFAULT_WORDS)
    await each.settle()
    assert each.lane["outcomes"] == {"error": 1}
    assert each.shadow.report()["recent"][0]["error"]


async def test_a_hanging_shadow_backend_holds_a_bounded_number_of_copies(monkeypatch):
    monkeypatch.setattr(shadow_module, "MAX_SECONDS", 0.05)
    each = Shadowed(max_concurrent=2, max_held=5)
    each.backend.prefill_s = 3600
    for _ in range(5):
        each.answer("x")
    assert each.mirror() is None
    await asyncio.sleep(0)
    assert (each.lane["in_flight"], each.lane["waiting"]) == (2, 3)
    assert each.backend.num_open == 2
    assert each.value("engine_shadow_in_flight") == 2
    await each.settle()
    assert each.lane["outcomes"] == {"dropped": 1, "error": 5}
    assert each.backend.num_open == 0


async def test_a_shadow_copys_timeout_is_the_requests_up_to_a_maximum(monkeypatch):
    monkeypatch.setattr(shadow_module, "MAX_SECONDS", 7.0)
    each = Shadowed()
    for timeout_s in (None, 5.0, 3600.0):
        asked = each.request()
        context = msgspec.structs.replace(asked.context, timeout_s=timeout_s)
        mirror = each.shadow.mirror("m", msgspec.structs.replace(asked, context=context))
        mirror.primary(USAGE)
        await each.settle()
    assert [sent.context.timeout_s for sent in each.backend.requests] == [7.0, 5.0, 7.0]


async def test_a_shadow_copy_does_not_report_its_prompt_length():
    each = Shadowed()
    asked, told = each.request(), []
    context = msgspec.structs.replace(asked.context, on_prompt=told.append)
    mirror = each.shadow.mirror("m", msgspec.structs.replace(asked, context=context))
    mirror.primary(USAGE)
    await each.settle()
    assert len(each.backend.requests) == 1 and told == []


async def test_large_shadow_copies_count_by_their_size(monkeypatch):
    monkeypatch.setattr(shadow_module, "MAX_HELD_CHARS", 3 * shadow_module.MAX_ANSWER_CHARS)
    each = Shadowed()
    held = [each.mirror(), each.mirror()]
    assert None not in held
    assert each.mirror() is None
    assert Shadowed().mirror(n=2) is not None
    assert Shadowed().mirror(n=3) is None, "each choice is an answer to keep"


async def test_stopping_the_shadow_cancels_its_copies():
    each = Shadowed(max_concurrent=1)
    each.backend.prefill_s = 3600
    late = each.mirror()
    for _ in range(3):
        each.answer("x")
    await asyncio.sleep(0)
    await each.shadow.stop()
    assert each.backend.num_open == 0
    late.primary(USAGE)
    await each.settle()
    assert len(each.backend.requests) == 1
    await each.shadow.stop()


async def test_a_shadow_copy_calls_no_callbacks_of_the_original():
    """Every field by which a client hears of its request is left out of the copy, and so is what
    the request reads. What changes the answer stays.
    """
    heard = [
        name
        for name, hint in typing.get_type_hints(GenerationContext).items()
        if "Callable" in str(hint) or "RequestNotes" in str(hint)
    ]
    assert sorted(heard) == sorted(LISTENERS)
    edit = Edit("hook_embed", "scale", 0.5)
    each, called = Shadowed(), []
    listeners = {name: called.append for name in LISTENERS if name != "notes"}
    request = each.request()
    interp = InterpRequest((Capture("hook_embed"),), (edit,), lens=Lens((0,), 1))
    context = msgspec.structs.replace(
        request.context, notes=RequestNotes(), interp=interp, **listeners
    )
    mirror = each.shadow.mirror("m", msgspec.structs.replace(request, context=context))
    for event in (TextEvent(0, "x", 1), FinishEvent(0, "stop"), USAGE):
        mirror.primary(event)
    await each.settle()
    (sent,) = each.backend.requests
    assert [getattr(sent.context, name) for name in LISTENERS] == [None] * len(LISTENERS)
    assert sent.context.interp == InterpRequest(edits=(edit,))
    assert called == []

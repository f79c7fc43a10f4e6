"""Requests that continue in a new engine after theirs died: every token once, and no error."""

import os
import signal

import pytest
from msgspec.structs import replace

from engine.backends.custom.frontend.engine_client import ProcessClient
from engine.backends.custom.frontend.engine_link import EngineLink
from engine.backends.custom.options import EngineOptions
from engine.backends.process import RestartPolicy
from engine.core.errors import InferenceError
from engine.core.interfaces.request import GenerateRequest, SamplingParams
from tests.toy_runner import CRASH_TOKEN, generate_alone
from tests.unit.test_engine_link import WORKER, until

pytestmark = pytest.mark.seconds  # each engine is a process


class Inbox:
    """Collects the deltas of a request, by choice."""

    def __init__(self, asked: GenerateRequest) -> None:
        self.asked = asked
        self.tokens: list[list[int]] = [[] for _ in range(asked.params.n)]
        self.logprobs: list[list] = [[] for _ in range(asked.params.n)]
        self.open = set(range(asked.params.n))
        self.error: Exception | None = None

    def deliver(self, item) -> None:
        if isinstance(item, Exception):
            self.error = item
            self.open.clear()
            return
        assert item.choice in self.open, "a choice goes on after its end"
        assert item.finish_reason != "error", item.error_message
        self.tokens[item.choice] += item.token_ids
        self.logprobs[item.choice] += item.logprobs or ()
        if item.finish_reason is not None:
            self.open.remove(item.choice)

    def is_right(self) -> bool:
        params = self.asked.params
        oracle = [
            generate_alone(self.asked.prompt, params, choice, frozenset(), 256)[0]
            for choice in range(params.n)
        ]
        return self.error is None and self.tokens == oracle


PARAMS = [
    SamplingParams(max_tokens=150, temperature=0.0, seed=1),
    SamplingParams(max_tokens=150, seed=7),
    SamplingParams(max_tokens=120, seed=8, n=3, top_p=0.9),
    SamplingParams(max_tokens=150, seed=9, repetition_penalty=1.3, frequency_penalty=0.5),
    SamplingParams(max_tokens=150, seed=11, mirostat=2, mirostat_eta=0.5),
    SamplingParams(max_tokens=150, seed=10, logprobs=2, min_tokens=100),
]


def make_link(model: str = "toy", max_revivals: int = 8) -> EngineLink:
    options = EngineOptions(model_path=model, framework="toy")

    def client(on_message, on_exit):
        return ProcessClient(WORKER, options, on_message, on_exit)

    return EngineLink(client, RestartPolicy(first_delay_s=0.01), max_revivals=max_revivals)


def submit(link: EngineLink, number: int, params: SamplingParams, *prompt: int) -> Inbox:
    asked = GenerateRequest(request_id=f"r{number}", prompt=prompt or (1, number), params=params)
    inbox = Inbox(asked)
    link.submit(asked, inbox)
    return inbox


async def ended(*inboxes: Inbox) -> None:
    await until(lambda: not any(inbox.open for inbox in inboxes))


async def test_killed_twice_every_choice_has_the_tokens_of_an_undisturbed_one():
    link = make_link()
    await link.start()
    inboxes = [submit(link, number, params) for number, params in enumerate(PARAMS)]
    for number in (1, 2):
        await until(lambda: all(len(own) > 20 * number for i in inboxes for own in i.tokens))  # noqa: B023
        os.kill(link.pid, signal.SIGKILL)
        await until(lambda: link.ready is None)
        await until(lambda: link.ready is not None)
    await ended(*inboxes)
    assert all(inbox.is_right() for inbox in inboxes)
    assert len(inboxes[-1].logprobs[0]) == 150
    assert link.num_revived == 2 * len(PARAMS) and link.num_revivals("r0") == 2
    await link.stop()


async def test_a_seed_that_the_client_left_open_is_the_same_in_the_next_engine():
    link = make_link()
    await link.start()
    inbox = submit(link, 1, SamplingParams(max_tokens=100))
    await until(lambda: len(inbox.tokens[0]) > 20)
    os.kill(link.pid, signal.SIGKILL)
    opened = link._requests._requests["r1"].request
    await ended(inbox)
    inbox.asked = replace(inbox.asked, params=opened.params)
    assert inbox.is_right()
    await link.stop()


@pytest.mark.parametrize("model", ["deadly", "fragile"])
async def test_a_request_that_ends_its_engine_ends_alone(model):
    link = make_link(model)
    await link.start()
    inboxes = [submit(link, number, params) for number, params in enumerate(PARAMS)]
    await until(lambda: all(inbox.tokens[0] for inbox in inboxes))
    poison = submit(link, 99, PARAMS[0], 1, CRASH_TOKEN)
    await ended(poison, *inboxes)
    assert isinstance(poison.error, InferenceError) and "each time" in poison.error.message
    assert all(inbox.is_right() for inbox in inboxes)
    assert link.num_restarts <= 3
    await link.stop()


async def test_alone_in_its_engine_it_is_tried_twice():
    link = make_link("deadly")
    await link.start()
    poison = submit(link, 1, PARAMS[0], 1, CRASH_TOKEN)
    await ended(poison)
    assert isinstance(poison.error, InferenceError)
    await until(lambda: link.num_restarts == 2 and link.ready is not None)
    await link.stop()

"""Runs a history over HTTP, runs each of its requests alone, and says what differs."""

import json
import logging
import random
from collections.abc import Coroutine, Iterator
from dataclasses import replace
from typing import Any, TypeVar

from tests.oracle.check import Report
from tests.oracle.histories import History, Shape, Stage, draw_history, draw_pool
from tests.oracle.http.cached import cache_problems
from tests.oracle.http.explained import count_problems, explanation_problems
from tests.oracle.http.judge import judged, sayable
from tests.oracle.http.reading import Whole
from tests.oracle.http.run import Asked, HttpRun, adapter_of
from tests.oracle.http.spellings import NAMES, WORDS, Call, prompt_text, spell
from tests.oracle.http.toy_backend import ADAPTERS, ALONE
from tests.oracle.http.toy_model import END
from tests.oracle.http.toy_server import ToyServer
from tests.oracle.requests import FEATURES, DrawnRequest, Menu
from tests.oracle.toy_model import SITES

T = TypeVar("T")
MAX_ALONE = 4096
UNKNOWN_PROMPT = 200  # at most the tokens of a prompt whose request fails
MENU = Menu(
    num_words=len(WORDS),
    max_prompt=8,
    max_tokens=24,
    tokens=(*b"abc d", 256, 257),
    ends=(END,),
    stops=("ab", "c", "é", "\n", "1.", "☺", "bc"),
    stop_patterns=("a+b", "[0-3]{2}"),
    bad_words=("ab", "cd"),
    breakers=("\n",),
    grammars=("regex", "choice", "json"),
    num_tools=2,
    has_reasoning=True,
    adapters=ADAPTERS,
    steerings=("up", "down"),
    captures=tuple(site.name for site in SITES),
    images=("cat", "dog"),
    apis=NAMES,
)
SHAPES = {
    "block_size": (2, 4, 4, 16),
    "depth": (0, 1),
    "tight": (True, True, False),  # whether the pool has room for little more than one request
    "max_slots": (1, 3, 8),
    "budget": (16, 48, 256),
    "sharing": (True, True, True, False),
    "speculates": (True, False),
    "num_adapters": (1, 2),
    "grammar_delay": (0, 0, 3),
    "limit_s": (None, None, None, None, None, None, 0.04, 2.0),  # a request's time
}
OCCASIONAL = ("cancel", "evict", "flush", "fault", "memory", "swap", "freeze", "late", "wait")
UNLIKE = frozenset({"nan", "tier_lost", "tier_fails"})
STAGE = Stage(MENU, SHAPES, without=UNLIKE, max_requests=5, max_events=16)
# What a request has beside its tokens, and what must not be lost when it goes on elsewhere
STATEFUL = ("mirostat", "grammar", "tools", "reasoning", "n", "score_prompt", "stop", "dry")
ALWAYS = frozenset({"seed", "max_tokens", "temperature", "api", "follows"})
THEMES = tuple(name for name in FEATURES if name not in ALWAYS)
POOL_SEEDS = 5  # whose histories share requests, because what they give alone takes long
POOL_REQUESTS = 8


def drawn_history(seed: int) -> History:
    """The history of a seed. Its pool has a theme: a few features are frequent, so that rare ones
    meet each other.
    """
    rng = random.Random(f"http pool {seed // POOL_SEEDS}")
    frequent = {*rng.sample(STATEFUL, 2), *rng.sample(THEMES, 3)}
    chances = {name: FEATURES[name].chance / 2 for name in THEMES}
    menu = replace(MENU, chances=chances | dict.fromkeys(frequent, 0.5))
    pool = draw_pool(rng, replace(STAGE, menu=menu), 3, POOL_REQUESTS)
    rng = random.Random(f"http {seed}")
    without = UNLIKE | set(rng.sample(OCCASIONAL, 4))
    history = draw_history(rng, replace(STAGE, without=without), pool)
    if rng.random() < 0.3:
        events = list(history.events)
        events.insert(rng.randint(0, len(events)), ("load_adapter", rng.randrange(4)))
        history = replace(history, events=tuple(events))
    return _crowded(rng, history) if rng.random() < 0.5 else history


def _crowded(rng: random.Random, history: History) -> History:
    """The history, in which blocks run out while requests decode, so that some are preempted."""
    last = max(index for index, each in enumerate(history.events) if each[0] == "submit")
    crowd = [("turns", rng.randint(2, 6)), ("shrink", 12), ("turns", rng.randint(2, 4)), ("grow",)]
    events = (*history.events[: last + 1], *crowd, *history.events[last + 1 :])
    return replace(history, events=events)


class HttpOracle:
    """Checks histories on one server. It keeps what requests give alone."""

    def __init__(self, server: ToyServer) -> None:
        self._server = server
        self._alone: dict[str, Whole] = {}

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work` without logging: injected faults are logged like real ones."""
        before = logging.root.manager.disable
        logging.disable(logging.CRITICAL)
        try:
            return self._server.run(work)
        finally:
            logging.disable(before)

    def check(self, history: History) -> Report:
        return self.run(self._check(history))

    async def _check(self, history: History) -> Report:
        asked, weights = list[Asked](), _weights(history)
        for index, drawn in enumerate(history.requests):
            asked.append(await self._asked(drawn, history.requests, weights[index]))
        alone = [await self.alone(each) for each in asked]
        longest = max(map(_num_stored, history.requests, alone))
        shape = history.shape | {"num_blocks": _pool(history.shape, longest)}
        run = HttpRun(self._server, replace(history, shape=shape), asked)
        outcome = await run.go()
        wrong = list(outcome.wrong)
        for index, client in outcome.clients.items():
            kills = outcome.seen["kill"]
            ends = (client.has_left, kills)
            limited = bool(history.shape.get("limit_s"))
            told = list(judged(client.whole, alone[index], *ends, is_limited=limited))
            told += await explanation_problems(self._server, client)
            told += cache_problems(self._server.backend.seen, outcome, index)
            wrong += [f"request {index} ({client.asked.name}): {each}" for each in told]
        wrong += count_problems(outcome)
        return Report(wrong, outcome.seen)

    async def _asked(
        self, drawn: DrawnRequest, requests: tuple[DrawnRequest, ...], weights: str
    ) -> Asked:
        drawn, name = sayable(drawn)
        call = spell(drawn, name)
        assert call is not None
        if drawn["follows"] is not None:
            call = await self._following(name, call, requests[drawn["follows"]])
        return Asked(name, call, drawn["reader"] == "slow", drawn["tenant"], weights)

    async def _following(self, name: str, call: Call, before: DrawnRequest) -> Call:
        """The call as the next turn of a conversation, whose first turn is answered alone."""
        plain = DrawnRequest(before.prompt, {"max_tokens": {"max_tokens": 6}, "seed": {"seed": 1}})
        api = "responses" if name.startswith("responses") else "chat"
        first = spell(plain, api)
        assert first is not None
        first = replace(first, headers=dict(call.headers))
        told = await self.alone(Asked(api, first))
        body = dict(call.body)
        if api == "responses":
            body["previous_response_id"] = told.answer_id
        elif isinstance(body.get("messages"), list):
            said = {"role": "assistant", "content": told.choices[0].text or "a"}
            before_it = [{"role": "user", "content": prompt_text(before)}, said]
            body["messages"] = [*before_it, *body["messages"]]
        return replace(call, body=body)

    async def alone(self, asked: Asked) -> Whole:
        """What a request gives alone, on a fresh engine."""
        call = asked.call
        told = [asked.name, call.body, dict(call.headers), call.model, asked.weights]
        key = json.dumps(told, sort_keys=True)
        if key not in self._alone:
            if len(self._alone) >= MAX_ALONE:
                self._alone.clear()
            before = [("load_adapter", each) for each in _loads(call.model, asked.weights)]
            history = History(ALONE, (), (*before, ("submit", 0)))
            outcome = await HttpRun(self._server, history, [replace(asked, is_slow=False)]).go()
            whole = outcome.clients[0].whole
            assert whole is not None and not outcome.wrong, (outcome.wrong, asked)
            self._alone[key] = whole
        return self._alone[key]


def _weights(history: History) -> dict[int, str]:
    """The model or adapter by whose name each request asks, when it is submitted."""
    named, found = dict[str, str](), dict[int, str]()
    for kind, *rest in history.events:
        if kind == "load_adapter":
            name, path = adapter_of(rest[0])
            named[name] = path.rpartition("/")[2]
        elif kind == "submit":
            model = history.requests[rest[0]]["adapter"] or ""
            found[rest[0]] = named.get(model, model)
    return found


def _loads(model: str, weights: str) -> Iterator[int]:
    """The loads after which a name of an adapter has these weights."""
    if weights and model != weights:
        yield next(n for n in range(4) if adapter_of(n) == (model, f"/toy/{weights}"))


def _num_stored(drawn: DrawnRequest, alone: Whole) -> int:
    """Tokens for which a request needs room."""
    return (alone.prompt_tokens or UNKNOWN_PROMPT) + int(drawn.sampling["max_tokens"])


def _pool(shape: Shape, longest: int) -> int:
    size = shape["block_size"]
    return -(-longest // size) + 1 if shape["tight"] else 2048 // size

"""Shadow traffic: a share of a model's requests is copied to a second backend, and the two answers
are compared.

A copy is sent after the original was answered, so that it does not slow down the original. For each
model, a `Lane` limits the number of copies in memory and their characters. Copies beyond these
limits are dropped and counted. Prompts and answers are deleted after the comparison.
"""

import asyncio
import logging
import random
import time
import weakref
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from engine.backends.base import InferenceBackend
from engine.core.errors import EngineError
from engine.core.interfaces.backend import (
    ChatRequest,
    CompletionRequest,
    Event,
    UsageEvent,
)
from engine.core.interfaces.request import SamplingParams
from engine.routing.metrics import Difference, Outcome, ShadowMetrics
from engine.routing.shadow.agreement import find_divergence
from engine.routing.shadow.compared_answer import ComparedAnswer

logger = logging.getLogger(__name__)

MAX_CONCURRENT = 4
# Max copies of one model's requests in memory. Copies whose original request still runs count too.
MAX_HELD = 256
MAX_HELD_CHARS = 16 * 2**20
MAX_ANSWER_CHARS = 32 * 2**10  # only this many characters of a choice are kept and compared
MAX_SECONDS = 120.0
MAX_RECENT = 200

Request = ChatRequest | CompletionRequest
_DEFAULT_PARAMS = SamplingParams()


@dataclass(frozen=True, slots=True)
class ShadowRoute:
    """The shadow backend of a model. Copies of the model's requests go to the replicas of this
    backend in turn.
    """

    model: str
    backend_name: str
    replicas: Sequence[InferenceBackend]
    share: float  # share of the model's requests that is copied, 0 to 1


class Shadow:
    """The shadow traffic of all models. Call `mirror` for every request. Call `stop` before the
    backends are stopped.
    """

    def __init__(
        self,
        routes: Sequence[ShadowRoute],
        metrics: ShadowMetrics,
        *,
        chance: Callable[[], float] = random.random,
        max_concurrent: int = MAX_CONCURRENT,
        max_held: int = MAX_HELD,
    ) -> None:
        self._recent: deque[dict[str, Any]] = deque(maxlen=MAX_RECENT)
        self._lanes = {
            route.model: Lane(route, metrics, self._recent, max_concurrent, max_held)
            for route in routes
        }
        self._chance = chance

    def mirror(self, model: str, request: Request) -> "Mirror | None":
        """Prepare a copy of a request; never waits. Returns None if the request is not in the
        random share that is copied, or if it can't be copied.
        """
        lane = self._lanes.get(model)
        if lane is None or self._chance() >= lane.route.share:
            return None
        return lane.mirror(request)

    async def stop(self) -> None:
        """Abort running copies and drop waiting ones. Idempotent."""
        await asyncio.gather(*(lane.stop() for lane in self._lanes.values()))

    def report(self) -> dict[str, Any]:
        """Counts for each model, and the results of the latest copies, newest first."""
        return {
            "models": [lane.report() for lane in self._lanes.values()],
            "recent": list(reversed(self._recent)),
        }


class Mirror:
    """A request that is copied to the shadow backend, with the answer that its client gets.

    A lane keeps the object until the shadow's answer has been compared with it. If the request
    fails, there is nothing to compare: the router drops the only reference, and the object is
    freed.
    """

    def __init__(self, request: Request, on_answered: "Callable[[Mirror], None]") -> None:
        self.request = request
        self.answers = _answers(request)  # choice -> answer
        self.elapsed_s = 0.0
        self.num_chars = _size(request)
        self._on_answered = on_answered
        self._began = time.monotonic()

    def primary(self, event: Event) -> None:
        """Add an event of the client's answer. The last event is a `UsageEvent`. Never waits."""
        if isinstance(event, UsageEvent):
            self.elapsed_s = time.monotonic() - self._began
            self._on_answered(self)
        elif answer := self.answers.get(event.choice):
            answer.add(event)


class Lane:
    """Limits, queues, runs and counts the copies of one model's requests."""

    def __init__(
        self,
        route: ShadowRoute,
        metrics: ShadowMetrics,
        recent: deque[dict[str, Any]],
        max_concurrent: int,
        max_held: int,
    ) -> None:
        self.route = route
        self._metrics = metrics
        self._recent = recent
        self._max_concurrent = max_concurrent
        self._max_held = max_held
        self._is_stopped = False
        self._turn = 0
        self._open: weakref.WeakSet[Mirror] = weakref.WeakSet()
        self._waiting: deque[Mirror] = deque()
        self._running: dict[asyncio.Task[None], Mirror] = {}
        self._outcomes: Counter[Outcome] = Counter()
        self._differences: Counter[Difference] = Counter()

    def mirror(self, request: Request) -> Mirror | None:
        if refusal := self._refusal(request):
            self._count(refusal)
            return None
        mirror = Mirror(request, self._take)
        self._open.add(mirror)
        return mirror

    async def stop(self) -> None:
        self._is_stopped = True
        self._waiting.clear()
        for task in self._running:
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)

    def report(self) -> dict[str, Any]:
        return {
            "id": self.route.model,
            "backend": self.route.backend_name,
            "share": self.route.share,
            "waiting": len(self._waiting),
            "in_flight": len(self._running),
            "outcomes": dict(self._outcomes),
            "differences": dict(self._differences),
        }

    def _refusal(self, request: Request) -> Outcome | None:
        """Why a request is not copied. None if it is copied."""
        backend = self._next_ready()
        if backend is None:
            return "unavailable"
        cards = backend.models()
        lacks = cards[0].lacks if cards else ()
        params = request.context.params
        if any(getattr(params, name) != getattr(_DEFAULT_PARAMS, name) for name in lacks):
            return "unsupported"
        interp = request.context.interp
        edits = interp is not None and interp.edits
        if edits and not any("interp" in card.capabilities for card in cards):
            return "unsupported"
        held = [*self._open, *self._waiting, *self._running.values()]
        num_chars = sum(each.num_chars for each in held)
        has_room = len(held) < self._max_held and num_chars + _size(request) <= MAX_HELD_CHARS
        return None if has_room else "dropped"

    def _next_ready(self) -> InferenceBackend | None:
        for _ in self.route.replicas:
            self._turn = (self._turn + 1) % len(self.route.replicas)
            if self.route.replicas[self._turn].health().ready:
                return self.route.replicas[self._turn]
        return None

    def _take(self, mirror: Mirror) -> None:
        self._open.discard(mirror)
        if not self._is_stopped:
            self._waiting.append(mirror)
            self._begin_next()

    def _begin_next(self) -> None:
        if self._is_stopped or not self._waiting or len(self._running) >= self._max_concurrent:
            return
        mirror = self._waiting.popleft()
        task = asyncio.get_running_loop().create_task(self._run(mirror))
        self._running[task] = mirror
        task.add_done_callback(self._done)
        self._metrics.in_flight(self.route.model, self.route.backend_name, len(self._running))

    def _done(self, task: asyncio.Task[None]) -> None:
        del self._running[task]
        self._metrics.in_flight(self.route.model, self.route.backend_name, len(self._running))
        self._begin_next()

    async def _run(self, mirror: Mirror) -> None:
        began = time.monotonic()
        # If no replica is ready, ask the first one, because its error says why.
        backend = self._next_ready() or self.route.replicas[0]
        answers, error = await _answer(backend, mirror.request)
        elapsed_s = time.monotonic() - began
        outcome, position = self._judge(mirror, answers, error)
        self._count(outcome)
        self._recent.append(
            {
                "request_id": mirror.request.context.request_id,
                "model": self.route.model,
                "backend": self.route.backend_name,
                "outcome": outcome,
                "error": error,
                "first_divergence_token": position,
                "finish_reasons": [_reasons(mirror.answers), _reasons(answers)],
                "num_tokens": [_num_tokens(mirror.answers), _num_tokens(answers)],
                "seconds": [round(mirror.elapsed_s, 3), round(elapsed_s, 3)],
                "at": int(time.time()),
            }
        )

    def _judge(
        self, mirror: Mirror, answers: Mapping[int, ComparedAnswer], error: str | None
    ) -> tuple[Outcome, int | None]:
        """The outcome of a copy, and the index of the first token that differs, if any."""
        if error is not None:
            return "error", None
        if not _is_greedy(mirror.request.context.params):
            return "sampled", None
        both = [(ours, answers[choice]) for choice, ours in mirror.answers.items()]
        positions = [
            find_divergence(ours, theirs).position
            for ours, theirs in both
            if ours.said != theirs.said
        ]
        if positions:
            self._differs("text")
            self._metrics.diverged(self.route.model, self.route.backend_name, min(positions))
        if _reasons(mirror.answers) != _reasons(answers):
            self._differs("finish_reason")
        if _num_tokens(mirror.answers) != _num_tokens(answers):
            self._differs("num_tokens")
        return ("different", min(positions)) if positions else ("identical", None)

    def _count(self, outcome: Outcome) -> None:
        self._outcomes[outcome] += 1
        self._metrics.ended(self.route.model, self.route.backend_name, outcome)

    def _differs(self, kind: Difference) -> None:
        self._differences[kind] += 1
        self._metrics.differs(self.route.model, self.route.backend_name, kind)


async def _answer(
    backend: InferenceBackend, request: Request
) -> tuple[Mapping[int, ComparedAnswer], str | None]:
    """The shadow backend's answer to a copy, and the text of the error that ended it, if any."""
    answers = _answers(request)
    limit_s = min(request.context.timeout_s or MAX_SECONDS, MAX_SECONDS)
    try:
        async with asyncio.timeout(limit_s):
            async for event in _ask(backend, request, limit_s):
                if not isinstance(event, UsageEvent) and event.choice in answers:
                    answers[event.choice].add(event)
    except TimeoutError:
        return answers, f"no end within {limit_s:g} s"
    except EngineError as error:
        return answers, f"{error.error_code}: {error.message}"
    except Exception:
        # Whatever a shadow backend raises, it must not affect the clients' requests.
        logger.exception("A shadow backend's stream failed without an EngineError.")
        return answers, "internal error, see the log"
    return answers, None


def _ask(backend: InferenceBackend, request: Request, timeout_s: float) -> AsyncIterator[Event]:
    """Send the copy under a new request id, because the same backend may also have answered the
    original request.
    """
    context = request.context
    context = context.copied(f"shadow-{context.request_id}", timeout_s=timeout_s)
    copy = msgspec.structs.replace(request, context=context)
    return backend.chat(copy) if isinstance(copy, ChatRequest) else backend.complete(copy)


def _answers(request: Request) -> dict[int, ComparedAnswer]:
    return {choice: ComparedAnswer(MAX_ANSWER_CHARS) for choice in range(request.context.params.n)}


def _is_greedy(params: SamplingParams) -> bool:
    return params.temperature == 0 or params.top_k == 1


def _size(request: Request) -> int:
    """Approximate number of characters that a request and its answer take in memory."""
    asked = (
        (request.prompt, request.suffix)
        if isinstance(request, CompletionRequest)
        else (request.messages, request.tools)
    )
    return _num_chars(asked) + request.context.params.n * MAX_ANSWER_CHARS


def _num_chars(value: Any) -> int:
    if isinstance(value, str):
        return len(value)
    if isinstance(value, Mapping):
        return sum(map(_num_chars, value.values()))
    if isinstance(value, list | tuple):
        return sum(map(_num_chars, value))
    return 1


def _reasons(answers: Mapping[int, ComparedAnswer]) -> list[str | None]:
    return [answer.finish_reason for answer in answers.values()]


def _num_tokens(answers: Mapping[int, ComparedAnswer]) -> int:
    return sum(answer.num_tokens for answer in answers.values())

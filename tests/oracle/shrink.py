"""Makes a failing history small: leaves out events, requests and features as long as it fails."""

from collections.abc import Callable, Iterator
from dataclasses import replace

from tests.oracle.histories import History
from tests.oracle.requests import DrawnRequest

MAX_TRIALS = 400
Fails = Callable[[History], bool]


def shrunk(history: History, fails: Fails, max_trials: int = MAX_TRIALS) -> History:
    """A smaller history that fails too. Each round tries all smaller ones, largest steps first,
    until none of them fails.
    """
    left = max_trials
    again = True
    while again and left > 0:
        again = False
        for smaller in _smaller(history):
            left -= 1
            if left < 0:
                break
            if fails(smaller):
                history, again = smaller, True
                break
    return history


def _smaller(history: History) -> Iterator[History]:
    yield from _fewer_requests(history)
    yield from _fewer_events(history)
    yield from _fewer_features(history)
    yield from _shorter_prompts(history)


def _fewer_events(history: History) -> Iterator[History]:
    events = history.events
    size = max(1, len(events) // 2)
    while size:
        for start in range(0, len(events), size):
            part = events[start : start + size]
            if not any(each[0] == "submit" for each in part):
                yield replace(history, events=events[:start] + events[start + size :])
        size //= 2


def _fewer_requests(history: History) -> Iterator[History]:
    if len(history.requests) == 1:
        return
    for gone in range(len(history.requests)):
        if any(each["follows"] == gone for each in history.requests):
            continue
        requests = history.requests[:gone] + history.requests[gone + 1 :]
        events = []
        for kind, *rest in history.events:
            if kind in ("submit", "cancel"):
                if rest[0] == gone:
                    continue
                rest[0] -= rest[0] > gone
            events.append((kind, *rest))
        yield History(
            history.shape, tuple(_renumbered(each, gone) for each in requests), (*events,)
        )


def _renumbered(request: DrawnRequest, gone: int) -> DrawnRequest:
    before = request["follows"]
    return request if before is None or before < gone else request.using(follows=before - 1)


def _with(history: History, index: int, request: DrawnRequest) -> History:
    requests = history.requests[:index] + (request,) + history.requests[index + 1 :]
    return replace(history, requests=requests)


def _fewer_features(history: History) -> Iterator[History]:
    for index, request in enumerate(history.requests):
        for name in request.features:
            if name not in ("max_tokens", "seed"):
                yield _with(history, index, request.without(name))


def _shorter_prompts(history: History) -> Iterator[History]:
    for index, request in enumerate(history.requests):
        length = len(request.prompt)
        for kept in sorted({1, length // 2, length - 1} - {0, length}):
            yield _with(history, index, DrawnRequest(request.prompt[:kept], request.features))
        most = request.sampling["max_tokens"]
        for fewer in sorted({1, most // 2, most - 1} - {0, most}):
            yield _with(history, index, request.using(max_tokens={"max_tokens": fewer}))

"""R05: an out-of-range number is refused at once, in every field of every route.

A quick run shares the machine with other tests, so it measures the server's CPU time, not wall
time.
"""

import time
from urllib.parse import quote

import httpx

from tests.scoreboard.figure import Run, Values, at_most, figure
from tests.scoreboard.http.bodies import least_bodies
from tests.scoreboard.http.numbers import Number, numbers_of
from tests.scoreboard.http.target import Target, held_server, served_default_model

SLOW_S = 0.05
MAX_BODY_BYTES = 4096
QUICK_FIELDS = 8


@figure(
    "R05",
    "numbers at and beyond their bounds, every field of every route",
    minutes=2,
    limits={
        "wrong_answers": at_most(0),
        "slower_than_50_ms": at_most(0),
        "engine_deaths": at_most(0),
        "fields_without_bounds": at_most(0),
    },
)
def numeric_edges(run: Run) -> Values:
    with held_server() if run.quick else served_default_model() as target:
        before = target.children()
        found = list(numbers_of(target.description()))
        if run.quick:
            found = run.random("fields").sample(found, QUICK_FIELDS)
        unbounded = [each for each in found if not each.is_bounded]
        for each in unbounded:
            run.fail(f"{each.method} {each.path}: {each.place} has no bounds")
        tries = _Tries(run, target)
        with httpx.Client(base_url=target.url, timeout=60) as client:
            for each in found:
                tries.field(client, each)
        dead = before - target.children() if target.is_healthy() else {0}
    run.notes |= {"fields": len(found), "slow_at_first": tries.slow_at_first, **tries.statuses}
    return {
        "wrong_answers": tries.wrong,
        "slower_than_50_ms": tries.slow,
        "engine_deaths": len(dead),
        "fields_without_bounds": len(unbounded),
    }


class _Tries:
    """Sends requests with one number each, and collects what is wrong with the answers."""

    def __init__(self, run: Run, target: Target) -> None:
        self.run = run
        self.target = target
        self.bodies = least_bodies(target.model)
        self.statuses: dict[str, int] = {}
        self.wrong = self.slow = self.slow_at_first = 0

    def field(self, client: httpx.Client, number: Number) -> None:
        administers = number.path.startswith("/v1/admin/")
        for text in number.values():
            content = text.encode()
            if not number.in_query:
                content = number.body(self.bodies[number.path], text)
            is_valid = number.allows(content)
            if is_valid and administers:
                continue  # it would change the server
            self.run.cases += 1
            answer, seconds = self._send(client, number, content)
            what = f"{number.method} {number.path} {number.place} = {text[:30]}"
            status = answer.status_code
            self.statuses[str(status)] = self.statuses.get(str(status), 0) + 1
            if status >= 500 or (not is_valid and not 400 <= status < 500):
                self.wrong += 1
                self.run.fail(f"{what}: {status} {answer.text[:100]}")
            elif status >= 400 and len(answer.content) >= MAX_BODY_BYTES:
                self.wrong += 1
                self.run.fail(f"{what}: an error of {len(answer.content)} bytes")
            if status >= 400 and seconds > SLOW_S:
                self._look_again(client, number, content, what)

    def _look_again(self, client: httpx.Client, number: Number, content: bytes, what: str) -> None:
        """Repeat a slow request: the machine may have been busy. The value is slow if every attempt
        is.
        """
        self.slow_at_first += 1
        best = min(self._send(client, number, content)[1] for _ in range(5))
        if best > SLOW_S:
            self.slow += 1
            self.run.fail(f"{what}: {1000 * best:.0f} ms")

    def _send(
        self, client: httpx.Client, number: Number, content: bytes
    ) -> tuple[httpx.Response, float]:
        path = number.path.replace("{", "").replace("}", "")
        headers = self.target.key_for(number.path) | {"content-type": "application/json"}
        clock = self.target.processor_s if self.run.quick else time.monotonic
        began = clock()
        if number.in_query:
            answer = client.get(f"{path}?{number.place[0]}={quote(content)}", headers=headers)
        else:
            answer = client.request(number.method, path, content=content, headers=headers)
        return answer, clock() - began

"""R07: chat templates that try to escape the sandbox, and templates, grammars, schemas and regular
expressions that try to run forever. Each ends within a second and delays no other request.

The server renders with a hostile chat template, as if it came with a model. The rest is what a
client may send.
"""

import json
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

import httpx

from tests.scoreboard.figure import Run, Values, at_most, figure
from tests.scoreboard.http.bodies import MESSAGES
from tests.scoreboard.http.target import CLIENT, Target, held_server
from tests.security.requests.test_grammar_bombs import GRAMMAR_BOMBS, REGEX_BOMBS, SCHEMA_BOMBS
from tests.security.requests.test_jinja import BOMBS, ESCAPES

SLOW_S = 1.0
STALL_S = 0.05
NUM_CASES = 300
PLAIN_TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"
# Where a template can contain the expression.
POSITIONS = (
    "{{ %s }}",
    "{%% set x = %s %%}{{ x }}",
    "{%% for y in [0] %%}{{ %s }}{%% endfor %%}",
    "{%% macro m() %%}{{ %s }}{%% endmacro %%}{{ m() }}",
)


class Bomb(NamedTuple):
    name: str
    template: str | None  # None: the model's own template is used
    fields: dict[str, Any]
    must_fail: bool


@figure(
    "R07",
    "templates, grammars, schemas and regular expressions made to hurt",
    minutes=3,
    limits={
        "escapes": at_most(0),
        "server_errors": at_most(0),
        "longer_than_1_s": at_most(0),
        "loop_stalls_over_50_ms": at_most(0),
    },
    in_quick=False,  # test_jinja.py and test_grammar_bombs.py of tests/security have every case
)
def bombs(run: Run) -> Values:
    chosen = list(all_bombs())
    run.random("order").shuffle(chosen)
    with held_server(native=True) as target:
        tries = _Tries(run, target)
        tries.warm_up()
        for bomb in chosen[:NUM_CASES]:
            tries.throw(bomb)
        assert target.is_healthy(), "the server did not survive it"
    run.notes |= {"slowest_ms": round(1000 * tries.slowest), **tries.endings}
    run.notes["longest_stall_ms"] = round(1000 * tries.longest_stall)
    return {
        "escapes": tries.escapes,
        "server_errors": tries.server_errors,
        "longer_than_1_s": tries.slow,
        "loop_stalls_over_50_ms": tries.stalls,
    }


def all_bombs() -> Iterator[Bomb]:
    for expression in ESCAPES:
        for position in POSITIONS:
            yield Bomb(expression, position % expression, {}, must_fail=True)
    for name, source in BOMBS.items():
        yield Bomb(name, source, {}, must_fail=True)
    for name, source in REGEX_BOMBS.items():
        yield Bomb(name, None, {"guided_regex": source}, must_fail=False)
        yield Bomb(name, None, {"structured_outputs": {"regex": source}}, must_fail=False)
        pattern = json.dumps({"type": "string", "pattern": source})
        yield Bomb(name, None, {"guided_json": pattern}, must_fail=False)
    for name, source in SCHEMA_BOMBS.items():
        yield Bomb(name, None, {"guided_json": source}, must_fail=False)
        yield Bomb(name, None, {"structured_outputs": {"json": source}}, must_fail=False)
    for name, source in GRAMMAR_BOMBS.items():
        yield Bomb(name, None, {"guided_grammar": source}, must_fail=False)
        yield Bomb(name, None, {"structured_outputs": {"grammar": source}}, must_fail=False)


class _Tries:
    def __init__(self, run: Run, target: Target) -> None:
        self.run = run
        self.target = target
        self.client = httpx.Client(base_url=target.url, headers=CLIENT, timeout=60)
        self.endings: Counter[str] = Counter()
        self.escapes = self.server_errors = self.slow = self.stalls = 0
        self.slowest = self.longest_stall = 0.0

    def warm_up(self) -> None:
        """Trigger one-time initialization, so that it is not attributed to a bomb."""
        for fields in ({}, {"guided_regex": "a+"}, {"guided_json": {"type": "boolean"}}):
            assert self._post(fields).status_code == 200
        self.target.ask("stalls")

    def throw(self, bomb: Bomb) -> None:
        self.run.cases += 1
        if self.target.ask("template", bomb.template or PLAIN_TEMPLATE) == "refused":
            self.endings["refused_at_load"] += 1
            return
        self.target.ask("stalls")
        began = time.monotonic()
        answer = self._post(bomb.fields)
        seconds = time.monotonic() - began
        stall = float(self.target.ask("stalls"))
        self.endings[str(answer.status_code)] += 1
        self._judge(bomb, answer, seconds, stall)

    def _judge(self, bomb: Bomb, answer: httpx.Response, seconds: float, stall: float) -> None:
        self.slowest = max(self.slowest, seconds)
        self.longest_stall = max(self.longest_stall, stall)
        what = f"{bomb.name} in {[*bomb.fields] or 'a template'}"
        if answer.status_code >= 500:
            self.server_errors += 1
            self.run.fail(f"{what}: {answer.status_code} {answer.text[:100]}")
        if bomb.must_fail and answer.status_code < 400:
            self.escapes += 1
            self.run.fail(f"{what}: it was rendered: {bomb.template}")
        if seconds > SLOW_S:
            self.slow += 1
            self.run.fail(f"{what}: {seconds:.2f} s, {answer.status_code} {answer.text[:100]}")
        if stall > STALL_S:
            self.stalls += 1
            self.run.fail(f"{what}: the loop stood still for {1000 * stall:.0f} ms")

    def _post(self, fields: dict[str, Any]) -> httpx.Response:
        body = {"model": self.target.model, "messages": MESSAGES, "max_tokens": 1} | fields
        return self.client.post("/v1/chat/completions", json=body)

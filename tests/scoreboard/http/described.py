"""Generates valid and invalid requests from the server's OpenAPI description, and checks the
answers against it.
"""

import re
from collections import Counter
from collections.abc import Iterable
from typing import Any

import hypothesis
import requests
import schemathesis
from hypothesis import HealthCheck, Phase
from hypothesis.errors import Unsatisfiable
from schemathesis import GenerationMode
from schemathesis.checks import CHECKS
from schemathesis.core.failures import FailureGroup

from engine.core.key_file import LIMIT_NAMES
from tests.scoreboard.figure import Run
from tests.scoreboard.http.bodies import least_bodies
from tests.scoreboard.http.target import ADMIN, MAX_ERROR_BYTES, Target

TIMEOUT_S = 120
CHECK_NAMES = (
    *("status_code_conformance", "content_type_conformance", "response_schema_conformance"),
    "negative_data_rejection",
)
# Requests that undo an administrator's request, so that the next one can be answered.
RESTORING = {
    "/v1/admin/undrain": {},
    "/v1/admin/limits": dict.fromkeys(LIMIT_NAMES),
    "/v1/admin/log-level": {"level": "info"},
}
# Fields that determine the length of an answer; requests are kept short.
LENGTHS = ("max_tokens", "max_completion_tokens", "max_output_tokens", "min_tokens")


class Described:
    """Sends generated cases to one server and counts the wrong answers."""

    def __init__(self, run: Run, target: Target) -> None:
        self.run = run
        self.target = target
        self.bodies = least_bodies(target.model)
        self.session = requests.Session()
        self.statuses: Counter[int] = Counter()
        self.server_errors = self.violations = self.large_errors = 0
        description = target.description()
        del description["security"]  # otherwise random keys would be sent, which R06 covers
        schema = schemathesis.openapi.from_dict(description)
        self.operations = [found.ok() for found in schema.get_all_operations()]
        self.checks = [CHECKS.get_one(name) for name in CHECK_NAMES]

    def send(self, count: int, *, administer: bool, num_routes: int | None = None) -> None:
        """Send at least `count` cases, in rounds over all routes or over `num_routes` of them.

        `administer` says whether the administrator's routes are included.
        """
        chosen = [each for each in self.operations if administer or not _is_admin(each.path)]
        if num_routes is not None:
            chosen = self.run.random("routes").sample(chosen, num_routes)
        sent, turn = 0, 0
        while sent < count:
            before = sum(self.statuses.values())
            per_turn = min(10, -(-count // (2 * len(chosen))))
            for operation in chosen:
                for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE):
                    if sent + sum(self.statuses.values()) - before < count:
                        self._send_some(operation, mode, turn, per_turn)
            sent += sum(self.statuses.values()) - before
            turn += 1

    def _send_some(self, operation: Any, mode: GenerationMode, turn: int, count: int) -> None:
        if mode is GenerationMode.NEGATIVE and not _takes_anything(operation):
            return  # nothing can be wrong with this case

        @hypothesis.seed(f"{self.run.seed}/{operation.label}/{mode}/{turn}")
        @hypothesis.settings(
            max_examples=count,
            database=None,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            phases=[Phase.generate],
        )
        @hypothesis.given(operation.as_strategy(generation_mode=mode))
        def some(case: Any) -> None:
            hypothesis.assume(not _vanishes(case))
            self._send_one(case, is_sound=mode is GenerationMode.POSITIVE)

        try:
            some()
        except Unsatisfiable:
            if mode is GenerationMode.POSITIVE:
                raise
            # Any text is a sound path, for example.

    def _send_one(self, case: Any, *, is_sound: bool) -> None:
        if is_sound and isinstance(case.body, dict) and case.operation.path in self.bodies:
            case.body = _short(case.body | self.bodies[case.operation.path])
        self.run.cases += 1
        headers = self.target.key_for(case.operation.path)
        response = case.call(
            self.target.url, session=self.session, headers=headers, timeout=TIMEOUT_S
        )
        self.statuses[response.status_code] += 1
        what = f"{case.operation.label}: {response.status_code}"
        if response.status_code >= 500:
            self.server_errors += 1
            self.run.fail(f"{what} {response.text[:100]} for {_shown(case)}")
        if response.status_code >= 400 and len(response.content) > MAX_ERROR_BYTES:
            self.large_errors += 1
            self.run.fail(f"{what}: an error of {len(response.content)} bytes")
        try:
            case.validate_response(response, checks=self.checks, headers=headers)
        except FailureGroup as group:
            self.violations += 1
            reasons = "; ".join(_line(str(each)) for each in group.exceptions)
            self.run.fail(f"{what} {reasons} for {_shown(case)}")
        if _is_admin(case.operation.path):
            self._restore()

    def _restore(self) -> None:
        for path, body in RESTORING.items():
            answer = self.session.post(self.target.url + path, json=body, headers=ADMIN)
            assert answer.status_code == 200, (path, answer.text)


def check_spread(statuses: Counter[int]) -> None:
    """Check that requests were answered in different ways: a run that is refused everywhere shows
    nothing.
    """
    total = sum(statuses.values())
    assert statuses[401] + statuses[429] < total / 10, f"most were kept out: {statuses}"
    answered = sum(count for status, count in statuses.items() if status < 300)
    assert answered > total / 10, f"hardly any was answered: {statuses}"


def _vanishes(case: Any) -> bool:
    """An empty list in a form is not sent at all, so the case is no longer invalid."""
    is_form = (case.media_type or "").startswith("multipart/")
    return is_form and isinstance(case.body, dict) and [] in case.body.values()


def _is_admin(path: str) -> bool:
    return path.startswith("/v1/admin/")


def _takes_anything(operation: Any) -> bool:
    return bool(operation.body) or any(_all(operation))


def _all(operation: Any) -> Iterable[Any]:
    for place in (operation.path_parameters, operation.query, operation.headers):
        yield from place


def _short(body: dict[str, Any]) -> dict[str, Any]:
    """The body with a small number of tokens."""
    return {key: value for key, value in body.items() if key not in LENGTHS} | {
        key: 2 for key in LENGTHS if key in body
    }


def _shown(case: Any) -> str:
    return f"{case.formatted_path} {case.query or ''} {str(case.body)[:200]}"


def _line(text: str) -> str:
    return re.sub(r"\s+", " ", text)[:120]

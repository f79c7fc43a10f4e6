"""A training file with one malformed line: the job is refused with the line's number, or the line
is one that can be trained. Seeded mutations of good lines.
"""

import copy
import json
import random
from typing import Any

import httpx
import pytest

from tests.support.fakes.fake_backend import MODEL
from tests.support.fakes.scripted_trainer import HTTP
from tests.support.servers.live_server import LiveServer

CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
CHAT = {
    "messages": [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "Hi", "name": "bob"},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "content": "1", "tool_call_id": "c"},
        {"role": "assistant", "content": "Hello.", "weight": 1},
    ],
    "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}],
    "parallel_tool_calls": False,
}
PAIR = {
    "input": {"messages": CHAT["messages"][:2]},
    "preferred_output": [{"role": "assistant", "content": "Hello."}],
    "non_preferred_output": [{"role": "assistant", "content": "What?"}],
}
GOOD = {"supervised": CHAT, "dpo": PAIR}
NUM_LINES = 150


def nested(depth: int) -> str:
    return "[" * depth + "]" * depth


def strange(rng: random.Random) -> Any:
    return rng.choice(
        [
            *(None, True, 0, -1, 2**64, 1e300, "", "x", "\x00", [], {}, [[]], [None], {"": None}),
            *("{", nested(70), nested(50_000), '{"a": ' + nested(5000) + "}", '"\\ud800"', "1e999"),
            *(json.loads(nested(60)), json.loads(nested(200)), [CALL, [CALL]], {"function": CALL}),
        ]
    )


def places(value: Any) -> list[tuple[Any, Any]]:
    """Each place in a value, as (container, key)."""
    found = []
    keys = value.keys() if isinstance(value, dict) else range(len(value))
    for key in keys:
        found.append((value, key))
        if isinstance(value[key], dict | list):
            found += places(value[key])
    return found


def mutated(rng: random.Random, good: dict[str, Any]) -> bytes:
    value = copy.deepcopy(good)
    for _ in range(rng.randint(1, 2)):
        container, key = rng.choice(places(value))
        action = rng.randrange(4)
        if action == 0:
            del container[key]
        elif action == 1 and isinstance(container, dict):
            container[rng.choice(("x", "tool_calls", "role", "weight"))] = strange(rng)
        else:
            container[key] = strange(rng)
        if not value:
            break
    line = json.dumps(value).encode()
    if rng.random() < 0.2:
        at = rng.randrange(len(line))
        line = line[:at] + rng.choice((b"", b"\xff", b"\\ud800", b"NaN", b"[" * 3000)) + line[at:]
    return line.replace(b"\n", b"")


def ask(server: LiveServer, method: str, line: bytes) -> httpx.Response:
    content = json.dumps(GOOD[method]).encode() + b"\n" + line + b"\n"
    form = {"file": ("train.jsonl", content), "purpose": (None, "fine-tune")}
    file_id = HTTP.post(f"{server.url}/v1/files", files=form).json()["id"]
    body = {"model": MODEL, "training_file": file_id, "method": {"type": method}}
    return HTTP.post(f"{server.url}/v1/fine_tuning/jobs", json=body)


@pytest.mark.parametrize("method", GOOD)
def test_a_malformed_line_is_refused_by_its_number(server: LiveServer, method: str) -> None:
    rng = random.Random(f"malformed {method}")
    num_refused = 0
    for _ in range(NUM_LINES):
        line = mutated(rng, GOOD[method])
        answer = ask(server, method, line)
        if answer.status_code == 200:
            job = answer.json()["id"]
            HTTP.post(f"{server.url}/v1/fine_tuning/jobs/{job}/cancel")
            continue
        assert answer.status_code == 400, (line[:500], answer.text)
        assert "line 2 of the training file" in answer.json()["error"]["message"], answer.text
        num_refused += 1
    assert num_refused > NUM_LINES / 2


@pytest.mark.parametrize("depth", [65, 2000, 100_000])
def test_deeply_nested_tool_calls_are_refused(server: LiveServer, depth: int) -> None:
    call = {"function": {"name": "f", "arguments": '{"a":' + nested(depth) + "}"}}
    answer_of = {"role": "assistant", "content": "", "tool_calls": [call]}
    line = json.dumps({"messages": [{"role": "user", "content": "Hi"}, answer_of]}).encode()
    answer = ask(server, "supervised", line)
    assert answer.status_code == 400 and "64 levels deep" in answer.text

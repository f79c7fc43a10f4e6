"""Fault points, and what is left when each stage of the engine's loop fails: everybody else."""

import asyncio
import importlib
import inspect
import json
import os
import re
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import psutil
import pytest

from engine.core import faults
from engine.core.errors import ConfigError, ResourceError
from engine.core.faults import Fault, FaultError
from engine.core.parsing.parser import OutputParser
from engine.core.sandbox.private_files import write_private
from engine.servers.files.draft import Draft
from engine.servers.storage.database import Database
from tests.support.servers.live_server import chat, events_of, live_server
from tests.support.toy_engine.engine import ToyEngine
from tests.support.toy_engine.grammar import END, Grammars, lark, vocabulary
from tests.unit.ipc.test_engine_link import ask, expected, make_link

ENGINE = Path(faults.__file__).parents[1]
PROMPTS = [(n, 1, 2, 3) for n in range(8)]


def found(place: faults.FaultTarget) -> Callable:
    """As it stands in its module or class, and not in one that this inherits from."""
    owner, name = place.find(importlib.import_module(place.module))
    return vars(owner)[name]


def test_every_fault_point_names_an_existing_function_once():
    functions = {place: found(place) for places in faults.PLACES.values() for place in places}
    assert len(set(functions.values())) == len(functions), "one call would strike twice"
    for place, function in functions.items():
        first = (place.subject or "").partition(".")[0]
        assert not first or first in inspect.signature(function).parameters, place


def test_only_process_entry_points_arm_faults():
    used = {}
    for path in ENGINE.rglob("*.py"):
        words = re.findall(r"^from engine\.core.* faults$|\bfaults\.\w+", path.read_text(), re.M)
        if words and path != ENGINE / "core/faults.py":
            used[str(path.relative_to(ENGINE))] = words
    armed = ["from engine.core import faults", "faults.arm"]
    assert used == {"cli/serve.py": armed, "worker/main.py": armed}


def test_wrapped_functions_are_restored_when_the_fault_plan_ends():
    places = [place for point in faults.POINTS for place in faults.PLACES[point]]
    before, finders = {place: found(place) for place in places}, list(sys.meta_path)
    with faults.planned(Fault("forward"), Fault("check_grammar")):
        wrapped = {place for place in places if found(place) != before[place]}
    assert wrapped == {*faults.PLACES["forward"], *faults.PLACES["check_grammar"]}
    assert {place: found(place) for place in places} == before and sys.meta_path == finders


def test_arming_faults_imports_nothing_and_wraps_later_imports():
    code = """
import sys
from engine.core import faults
loaded = set(sys.modules)
faults.arm()
assert not [name for name in set(sys.modules) - loaded if name.startswith("engine")]
import asyncio
from engine.core.grammar.checker import GrammarChecker
from engine.core.sandbox.private_files import write_private
struck = 0
for call in (lambda: write_private(None, b""), lambda: asyncio.run(GrammarChecker().check("", ""))):
    try:
        call()
    except faults.FaultError:
        struck += 1
sys.exit(struck != 2)
"""
    planned = faults.environment(Fault("keep_file"), Fault("check_grammar"))
    env = {**os.environ, **planned}
    done = subprocess.run([sys.executable, "-c", code], env=env, stderr=subprocess.PIPE, timeout=60)
    assert done.returncode == 0, done.stderr.decode()


def test_a_fault_strikes_at_its_call_count_and_token():
    with faults.planned(Fault("forward", at=2, times=2, within=7)) as plan:
        struck = []
        for tokens in ([7], [1], [7], [7], [7], None):
            try:
                plan.strike("forward", tokens)
                struck.append(False)
            except FaultError:
                struck.append(True)
    assert struck == [False, False, True, True, False, False] and plan.num_strikes == 2


def test_a_kept_reference_to_a_wrapped_function_does_nothing_after_the_plan():
    with faults.planned(Fault("parse", times=2)) as plan:
        push = OutputParser(None, frozenset()).push
        with pytest.raises(FaultError):
            push("text")
    assert push("text") and plan.num_strikes == 1


async def test_a_disk_fault_fails_one_call_and_leaves_no_file(tmp_path):
    database, draft = Database(tmp_path / "rows", ""), Draft(tmp_path / "upload")
    points = ("database", "upload", "keep_file")
    with faults.planned(*(Fault(point, "disk") for point in points)) as plan:
        with pytest.raises(ResourceError):
            await database.run(lambda connection: None)
        with pytest.raises(ResourceError):
            async with draft:
                await draft.publish()
        with pytest.raises(OSError, match="No space"):
            write_private(tmp_path / "kept", b"content")
    assert plan.num_strikes == len(points) and not list(tmp_path.iterdir())
    await database.stop()


def test_environment_faults_need_the_guard_variable():
    planned, finders = faults.environment(Fault("forward")), list(sys.meta_path)
    with pytest.raises(ConfigError, match="tests alone"):
        faults.arm({faults.PLAN_VARIABLE: planned[faults.PLAN_VARIABLE]})
    for text in ("[{]", '[{"point": "nowhere"}]', '[{"point": "forward", "action": "laugh"}]'):
        with pytest.raises(ConfigError, match=faults.PLAN_VARIABLE):
            faults.arm({**planned, faults.PLAN_VARIABLE: text})
    assert sys.meta_path == finders


@pytest.mark.seconds
def test_a_server_with_a_fault_plan_and_no_guard_does_not_start():
    done = subprocess.run(
        [sys.executable, "-m", "engine.cli.main", "serve", "no-model", "--port", "0"],
        env={**os.environ, faults.PLAN_VARIABLE: "[]"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2 and "tests alone" in done.stderr and "Traceback" not in done.stderr


def eight(**options) -> ToyEngine:
    engine = ToyEngine(max_slots=8, num_blocks=64, budget=16, **options)
    for number, prompt in enumerate(PROMPTS):
        engine.submit(
            str(number), prompt, max_tokens=8, presence_penalty=0.5, repetition_penalty=1.5
        )
    return engine


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("at", [1, 5, 12])
@pytest.mark.parametrize("point", ["allocate", "update", "nonfinite", "intake"])
def test_a_failing_per_request_stage_fails_one_request(point, at, depth):
    at = min(at, 8) if point in ("intake", "allocate") else at
    engine = eight(depth=depth)
    with faults.planned(Fault(point, "mark" if point == "nonfinite" else "raise", at=at)) as plan:
        engine.run()
    assert plan.num_strikes == 1
    failed = [key for key, outcome in engine.outcomes.items() if outcome.error_code]
    assert len(failed) == 1 and engine.outcomes[failed[0]].error_code == "inference_error"
    engine.num_pardons = 1
    engine.check()
    assert engine.pool.num_free + engine.pool.num_evictable == engine.pool.num_usable


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("at", [1, 3, 7])
@pytest.mark.parametrize("point", ["schedule", "forward", "sample", "wait", "publish"])
def test_a_failing_batch_stage_fails_no_request(point, at, depth):
    engine = eight(depth=depth)
    with faults.planned(Fault(point, at=at)) as plan:
        engine.run()
    assert plan.num_strikes == 1
    assert all(outcome.finish_reason == "length" for outcome in engine.outcomes.values())
    engine.check()


def test_blocks_of_a_failed_admission_are_released(monkeypatch):
    engine = ToyEngine(max_slots=4)
    engine.submit("first", (1, 2, 3, 4, 5), max_tokens=3)
    engine.run()
    make_room, failures = engine.kv._make_room, iter([True])

    def fails_once(needed):
        if next(failures, False):
            raise FaultError
        make_room(needed)

    monkeypatch.setattr(engine.kv, "_make_room", fails_once)
    engine.submit("second", (1, 2, 3, 4, 6), max_tokens=3)  # it shares blocks with the first
    engine.run()
    assert engine.outcomes["second", 0].error_code == "inference_error"
    engine.num_pardons = 1
    engine.check()


def test_blocks_of_a_sequence_that_failed_to_publish_can_be_evicted():
    engine = ToyEngine(block_size=1)
    engine.submit("first", (1, 2, 3), max_tokens=4)
    while not engine.pool.num_cached:
        engine.turn()
    assert engine.kv.radix.evict(3) == 0  # in use
    with faults.planned(Fault("publish")) as plan:
        engine.run()
    assert plan.num_strikes == 1
    assert engine.kv.radix.evict(3) == 3


def test_a_request_whose_blocks_are_never_allocated_fails_alone():
    engine = eight()
    with faults.planned(Fault("allocate", at=2, times=1000, within=7)):  # not when it is admitted
        engine.run()
    failed = {request_id for (request_id, _), o in engine.outcomes.items() if o.error_code}
    assert "7" in failed and len(failed) < 8  # others may have drawn the token
    assert engine.outcomes["7", 0].error_code == "inference_error"


def test_a_scheduler_that_always_fails_ends_the_engine():
    engine = eight()
    with faults.planned(Fault("schedule", times=100)), pytest.raises(FaultError):
        engine.run()


def test_a_grammar_that_fails_to_compile_once_fails_no_request():
    engine = ToyEngine(grammars=Grammars(vocabulary), max_slots=4)
    with faults.planned(Fault("compile")) as plan:
        for number in range(3):  # which wait for one compilation
            engine.submit(str(number), (1, 2), grammar=lark("a{3}b?"), eos=(END,), max_tokens=6)
        while not all(outcome.finish_reason for outcome in engine.outcomes.values()):
            engine.turn()
    assert plan.num_strikes == 1
    assert {outcome.finish_reason for outcome in engine.outcomes.values()} == {"stop"}


def test_a_grammar_that_fails_to_compile_fails_its_request_and_is_retried_later():
    engine = ToyEngine(grammars=Grammars(vocabulary), max_slots=4)
    with faults.planned(Fault("compile", times=2)):
        engine.submit("bad", (1, 2), grammar=lark("a{3}b?"), eos=(END,), max_tokens=6)
        engine.submit("plain", (1, 2), max_tokens=6)
        while engine.outcomes["bad", 0].finish_reason is None:
            engine.turn()
    engine.submit("good", (1, 2), grammar=lark("a{3}b?"), eos=(END,), max_tokens=6)
    while engine.outcomes["good", 0].finish_reason is None:
        engine.turn()
    engine.run()
    assert engine.outcomes["bad", 0].error_code == "inference_error"
    assert engine.outcomes["good", 0].finish_reason == "stop"


def test_an_out_of_memory_step_is_halved_and_later_steps_stay_small():
    engine = ToyEngine(max_slots=8, num_blocks=64, budget=32)
    sizes, forward = [], engine.runner.forward

    def hungry(inputs):
        sizes.append(len(inputs.token_ids))
        if len(inputs.token_ids) > 10:
            raise MemoryError
        return forward(inputs)

    engine.runner.forward = hungry
    for number, prompt in enumerate(PROMPTS):
        engine.submit(str(number), prompt, max_tokens=9)
    engine.run()
    largest = max(sizes)
    sizes.clear()
    for number, prompt in enumerate(PROMPTS):
        engine.submit(f"later {number}", (9, *prompt), max_tokens=9)
    engine.run()
    assert all(outcome.finish_reason == "length" for outcome in engine.outcomes.values())
    assert max(sizes) <= largest // 2
    engine.check()


@pytest.mark.parametrize("at", [1, 3])  # in a task, and where a token arrives
def test_a_stream_write_failure_ends_with_an_error_event(at):
    with live_server() as server, faults.planned(Fault("format", at=at)):
        reply = httpx.post(server.url + "/v1/chat/completions", json=chat(stream=True))
    events = events_of(reply.text)
    assert set(events[-1]["error"]) == {"message", "type", "param", "code"}
    assert "[DONE]" not in events and "planned" not in reply.text


def test_a_clock_jump_changes_nothing(monkeypatch):
    with live_server() as server:
        server.backend.token_s = 0.02
        days, wall = iter((1, -1) * 1000), time.time
        monkeypatch.setattr(time, "time", lambda: wall() + 86400 * next(days))
        reply = httpx.post(server.url + "/v1/chat/completions", json=chat(stream=True))
        assert events_of(reply.text)[-1] == "[DONE]"
        assert httpx.get(server.url + "/health").status_code == 200


@pytest.mark.skipif(sys.platform != "linux", reason="the score is Linux's")
@pytest.mark.seconds
async def test_the_engine_process_prefers_oom_kill_and_survives_a_memory_limit(monkeypatch):
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "1")
    link = make_link("hungry")
    await link.start()
    with open(f"/proc/{link.pid}/oom_score_adj") as file:
        assert int(file.read()) == 500
    used = psutil.Process(link.pid).memory_info().vms
    resource.prlimit(link.pid, resource.RLIMIT_AS, (used + (160 << 20), resource.RLIM_INFINITY))
    inboxes = await asyncio.gather(*(ask(link, n, 8) for n in range(8)))
    assert [inbox.tokens for inbox in inboxes] == [expected(n, 8) for n in range(8)]
    assert link.num_restarts == 0
    await link.stop()


def test_fault_plans_survive_serialization():
    planned = [Fault("forward", "sleep", 2, 3, "x", 1.5), Fault("load", "exit")]
    variables = faults.environment(*planned)
    assert json.loads(variables[faults.PLAN_VARIABLE])[0]["seconds"] == 1.5
    assert variables[faults.GUARD_VARIABLE] == faults.GUARD

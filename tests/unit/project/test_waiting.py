"""Tests wait for conditions and not for times, so they pass beside a process that takes the CPU."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

TESTS = Path(__file__).parents[2]
# The scoreboard measures times, and the rest runs other projects' programs.
OTHERS = ("scoreboard", "clients", "llamacpp_suite", "vllm_suite", "teeth")
WORDS = re.compile(r"\bsleep\(|timeout|wait_for|monotonic")  # other files need not be parsed
LEAST_S = 30  # a bound that only a hang reaches

# Tests that sleep, and why no condition is there to wait for.
SLEEPS = {
    "test_a_hung_step_is_interrupted_even_if_describing_the_loop_fails": "the sleep is the hang",
    "test_all_watchers_share_one_snapshot": "nothing is to happen meanwhile",
    "test_an_engine_that_is_stopped_validates_nothing": "a sandboxed child can't say it has begun",
    "test_an_engine_whose_frontend_does_not_read_waits_without_loss": "nothing is to happen",
    "test_an_interp_request_in_front_of_vllm_runs_without_other_requests": "nothing is to happen",
    "test_keep_alive_0_unloads_the_model": "nothing is to happen meanwhile",
    "test_no_request_fails_when_a_node_is_lost": "the node is lost at any moment of its requests",
    "test_stream_headers_are_sent_as_soon_as_the_request_is_scheduled_and_not_before": (
        "nothing is to be sent meanwhile"
    ),
    "test_systemd_is_notified_of_ready_watchdog_and_stopping": "nothing is to be said meanwhile",
}
# Functions with a shorter bound, or an elapsed time that a test asserts.
SHORT = {
    "interrupt": "the key is pressed again after it",
    "test_a_blocked_event_loop_still_answers_probes_on_their_own_port": "it is to pass",
    "test_a_cancelled_caller_does_not_stop_the_grammar_check": "it is to pass",
    "test_a_replicas_refusal_of_a_waiting_stream_is_retried_on_another": "it is to pass",
    "test_a_refusal_after_a_long_queue_time_is_an_http_status_in_every_dialect": "it is to pass",
    "connect": "it is to fail",
    "endless": "a part that is sent later than this is what is waited for",
    "test_a_frozen_redis_is_waited_for_only_once": "each wait would be as long",
    "test_a_server_stops_although_its_trace_collector_is_gone": "exporters alone try for longer",
    "test_sigkill_of_the_server_leaves_no_vllm_process_after_5_s": "the documents say so",
}


@cache
def functions() -> list[tuple[Path, ast.FunctionDef | ast.AsyncFunctionDef]]:
    return [
        (path, node)
        for path in sorted(TESTS.rglob("*.py"))
        if path.relative_to(TESTS).parts[0] not in OTHERS and WORDS.search(path.read_text())
        for node in ast.walk(ast.parse(path.read_bytes()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]


def own(*nodes: ast.AST, loops: bool) -> Iterator[ast.AST]:
    """What is in a function but not in functions inside of it; with what its loops repeat, or
    without.
    """
    left_out: tuple[type[ast.AST], ...] = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
    if not loops:
        left_out += (ast.For, ast.AsyncFor, ast.While)
    for node in nodes:
        if not isinstance(node, left_out):
            yield node
            yield from own(*ast.iter_child_nodes(node), loops=loops)


def test_no_test_sleeps_for_a_result() -> None:
    found = {}
    for path, function in functions():
        if function.name.startswith("test_") and function.name not in SLEEPS:
            nodes = [each for each in own(*function.body, loops=False) if is_sleep(each)]
            found.update({f"{path}:{each.lineno}": function.name for each in nodes})
    assert not found, "wait for a condition in a loop, or say in SLEEPS why there is none"


def name_of(node: ast.AST) -> str:
    if isinstance(node, ast.Call):
        node = node.func
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def is_sleep(node: ast.AST) -> bool:
    if not isinstance(node, ast.Call) or name_of(node) != "sleep" or not node.args:
        return False
    return not (isinstance(node.args[0], ast.Constant) and node.args[0].value == 0)


def test_bounds_of_waits_are_reached_only_by_hangs() -> None:
    found = {}
    for path, function in functions():
        if function.name not in SHORT:
            for each in own(*function.body, loops=True):
                if is_short(each) or asserts_elapsed_time(each):
                    found[f"{path}:{each.lineno}"] = function.name  # type: ignore[attr-defined]
    assert not found, f"give them {LEAST_S} s at least, or say in SHORT why not"


def is_short(node: ast.AST) -> bool:
    bound: ast.AST | None = None
    if isinstance(node, ast.Call):
        if name_of(node) == "timeout" and node.args:
            bound = node.args[0]
        elif name_of(node) == "wait_for" and len(node.args) > 1:
            bound = node.args[1]
        else:
            bound = next((each.value for each in node.keywords if each.arg == "timeout"), None)
    elif isinstance(node, ast.BinOp) and name_of(node.left) == "monotonic":
        bound = node.right if isinstance(node.op, ast.Add) else None
    if not isinstance(bound, ast.Constant) or not isinstance(bound.value, int | float):
        return False
    return 0 < bound.value < LEAST_S


def asserts_elapsed_time(node: ast.AST) -> bool:
    if not isinstance(node, ast.Assert):
        return False
    differences = [each for each in ast.walk(node.test) if isinstance(each, ast.BinOp)]
    return any(name_of(each.left) == "monotonic" for each in differences)


def test_exceptions_are_still_needed() -> None:
    names = {function.name for _, function in functions()}
    assert not (SLEEPS.keys() | SHORT.keys()) - names

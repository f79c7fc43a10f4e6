"""The conformance kit as a whole: what it runs, when it fails, and what it prints.

The rules themselves are tested one by one in `test_conformance_rules.py`.
"""

import json

import httpx
import pytest
from rich.console import Console
from typer.testing import CliRunner

from engine.cli.commands import app
from engine.core.errors import InvalidRequestError, UnavailableError
from engine_tools.conformance.expect import RuleFailed, RuleSkipped
from engine_tools.conformance.report import as_table, counts
from engine_tools.conformance.rule import Group, RuleResult
from engine_tools.conformance.rules import GROUPS
from engine_tools.conformance.run import find_target, new_client, root_of, run_rule, run_rules
from engine_tools.conformance.sse import read_stream
from engine_tools.conformance.target import Target
from tests.support.fakes.tiny_openai.app import TinyServer
from tests.support.fakes.tiny_openai.faults import put, status
from tests.support.servers.live_server import live_server

# What a backend without a model can be held to.
OVER_THE_FAKE = ["errors", "models", "robustness"]


@pytest.fixture(scope="module")
def served():
    with live_server() as server:
        yield server


def run_cli(*arguments: str):
    return CliRunner(env={"COLUMNS": "200"}).invoke(app, ["conformance", *arguments])


async def run_on(fault, only=()):
    transport = httpx.ASGITransport(app=TinyServer(fault).app)
    async with httpx.AsyncClient(transport=transport, base_url="http://tiny") as client:
        return await run_rules(await find_target(client, None), GROUPS, only)


def test_rules_are_complete_and_their_ids_unique():
    rules = [rule for group in GROUPS for rule in group.rules]
    assert len({rule.id for rule in rules}) == len(rules)
    for rule in rules:
        assert rule.title and rule.client and rule.sees, rule.id
        assert not rule.sees.endswith("."), f"{rule.id}: it is put into a sentence"


def test_our_server_passes_the_rules_that_need_no_model(served):
    named = [part for group in OVER_THE_FAKE for part in ("--only", group)]
    done = run_cli(served.url, "--json", *named)
    report = json.loads(done.stdout)
    failed = [rule for rule in report["rules"] if rule["outcome"] in ("fail", "advice")]
    assert not failed
    assert done.exit_code == 0
    assert {rule["group"] for rule in report["rules"]} == set(OVER_THE_FAKE)
    assert report["model"] == "tests/fake-model"
    assert sum(report["summary"].values()) == len(report["rules"])


def test_the_report_names_rule_failure_and_client(served):
    done = run_cli(f"{served.url}/v1/", "--only", "models", "--model", "nobody/knows-this")
    assert done.exit_code == 1
    (line,) = [line for line in done.stdout.splitlines() if "MOD-03" in line]
    assert "FAIL" in line
    assert "openai-python: models.retrieve" in " ".join(done.stdout.replace("│", " ").split())
    assert "failed" in done.stdout.splitlines()[-1]


async def test_a_rule_group_without_endpoint_is_skipped_unless_named():
    absent = status(404, lambda outgoing: outgoing.path == "/v1/embeddings")
    for only, outcome in (([], "skipped"), (["embeddings"], "fail")):
        results = await run_on(absent, only)
        assert {r.outcome for r in results if r.rule.group == "embeddings"} == {outcome}


def test_conformance_argument_errors_say_what_to_change(served):
    unknown = run_cli(served.url, "--only", "smells")
    assert unknown.exit_code == 2 and "Groups: errors, models" in unknown.output
    nobody = run_cli("http://127.0.0.1:1")
    assert nobody.exit_code == 1 and "Nothing answers at" in nobody.output
    assert run_cli("127.0.0.1:8000").exit_code == 2
    no_key = run_cli(served.url, "--api-key-file", "/nobody/has/this")
    assert no_key.exit_code == 2 and "can't be read" in no_key.output


def test_rules_for_keys_and_cors_run_if_configured(tmp_path):
    key = "k" * 32
    (tmp_path / "key").write_text(key)
    with live_server(server={"api_key": key, "enable_cors": True}) as server:
        done = run_cli(
            server.url, "--json", "--only", "errors", "--api-key-file", str(tmp_path / "key")
        )
    rules = {rule["id"]: rule["outcome"] for rule in json.loads(done.stdout)["rules"]}
    assert set(rules.values()) == {"pass"}, rules


def test_the_server_url_may_end_with_v1():
    for url in ("http://host:1", "http://host:1/", "http://host:1/v1", "http://host:1/v1/"):
        assert root_of(url) == "http://host:1"
    with pytest.raises(InvalidRequestError):
        root_of("host:1")


async def test_the_api_key_is_sent_to_the_tested_server():
    async with new_client("http://host", "secret", 5) as client:
        assert client.headers["authorization"] == "Bearer secret"
        assert client.headers["x-stainless-lang"] == "python"


async def test_a_server_that_lists_no_models_needs_a_model_name():
    transport = httpx.ASGITransport(app=TinyServer(put("data", [])).app)
    async with httpx.AsyncClient(transport=transport, base_url="http://tiny") as client:
        with pytest.raises(InvalidRequestError, match="--model"):
            await find_target(client, None)
        assert (await find_target(client, "x")).model == "x"
    async with new_client("http://127.0.0.1:1", None, 5) as client:
        with pytest.raises(UnavailableError):
            await find_target(client, "x")


def endings() -> Group:
    """A group with one rule for each way to end."""
    group = Group("endings")

    def add(id, ending, severity="must"):
        @group.rule(id, id, client="some client", sees="something odd", severity=severity)
        async def check(target):
            if ending is not None:
                raise ending

    add("A", None)
    add("B", RuleFailed("it broke"))
    add("C", RuleFailed("it could be better"), severity="advice")
    add("D", RuleFailed("it is lenient", is_advice=True))
    add("E", RuleSkipped("there is none"))
    add("F", httpx.ReadTimeout("slow"))
    add("G", KeyError("choices"))
    return group


async def test_outcomes_of_rules_that_pass_fail_advise_and_skip():
    async with new_client("http://host", None, 5) as client:
        target = Target(client, "m", None)
        results = [await run_rule(rule, target) for rule in endings().rules]
    found = [result.outcome for result in results]
    assert found == ["pass", "fail", "advice", "advice", "skipped", "fail", "fail"]
    assert "ReadTimeout" in results[-2].detail
    assert "choices" in results[-1].detail, "an answer of another shape is no traceback"
    assert counts(results) == {"pass": 1, "fail": 3, "advice": 2, "skipped": 1}


async def test_shared_requests_of_several_rules_are_sent_once():
    calls = []

    async def fail():
        calls.append(1)
        raise RuleFailed("no")

    async with new_client("http://host", None, 5) as client:
        target = Target(client, "m", None)
        for _ in range(2):
            with pytest.raises(RuleFailed):
                await target.once("key", fail)
    assert calls == [1]


def test_server_text_is_escaped_in_the_report():
    (rule,) = endings().rules[1:2]
    console = Console(width=200)
    with console.capture() as captured:
        console.print(as_table([RuleResult(rule, "fail", "[red]x[/red]\x1b[2J")]))
    assert "[red]x[/red] [2J. some client: something odd" in captured.get()


def test_sse_events_are_parsed():
    raw = b': note\r\nevent: a\r\ndata: {"x":\r\ndata: 1}\r\n\r\ndata: [DONE]\n\n'
    stream = read_stream(httpx.Headers(), raw)
    assert [(event.name, event.data) for event in stream.events] == [
        ("a", '{"x":\n1}'),
        (None, "[DONE]"),
    ]
    assert stream.chunks == [{"x": 1}]
    assert stream.num_done == 1 and not stream.problems
    cut = read_stream(httpx.Headers(), b'data: {"x": 1}')
    assert cut.problems == ("the last event is not ended by an empty line",)
    empty = read_stream(httpx.Headers(), b"data:\ndata:  spaced \n\n")
    assert empty.problems == ("an empty data line",)
    assert [event.data for event in empty.events] == ["\n spaced "], "one space is the field's"
    with pytest.raises(RuleFailed, match="error"):
        read_stream(httpx.Headers(), b'data: {"error": {"message": "no"}}\n\n').chunks  # noqa: B018

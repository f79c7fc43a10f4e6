"""Plugins around a backend: what they see, what they may change, and that an answer stays one."""

import importlib
import json
import re
from pathlib import Path
from typing import Any, cast

import httpx
import msgspec
import pytest
from prometheus_client import CollectorRegistry, generate_latest
from typer.testing import CliRunner

from engine.cli.commands import app
from engine.core.config import load_settings
from engine.core.config_tables import PluginTable
from engine.core.errors import ConfigError, ForbiddenError, InvalidRequestError
from engine.core.interfaces.backend import (
    EmbedRequest,
    FinishEvent,
    ReasoningEvent,
    TextEvent,
    TokenText,
    ToolCallEvent,
    UsageEvent,
)
from engine.core.interfaces.plugin import (
    Edit,
    Filtered,
    InferencePlugin,
    PluginChoice,
    PluginRequest,
    PluginResponse,
    RefusedError,
)
from engine.plugins.answer import Held
from engine.plugins.audit_log import RequestAudit
from engine.plugins.backend import describe
from engine.plugins.build import plug_in
from engine.plugins.pii import PiiRedactor
from tests.support.fakes.fake_backend import FakeBackend, call_script, reasoning_script
from tests.support.fakes.plugin_hosts import a_chat, a_completion, fed, plugged, running
from tests.support.servers.live_server import chat, events_of, live_server


def text_of(events: list[Any]) -> str:
    return "".join(each.text for each in events if isinstance(each, TextEvent))


class Shouting(InferencePlugin):
    """Changes requests, and whole answers."""

    name = "shouting"
    version = "1"
    rewrites_response = True

    async def pre_inference(self, request: PluginRequest) -> PluginRequest | None:
        messages = tuple({**each, "content": each["content"].upper()} for each in request.messages)
        assert request.params is not None
        params = msgspec.structs.replace(request.params, temperature=0.5)
        return msgspec.structs.replace(request, messages=messages, params=params)

    async def post_inference(self, response: PluginResponse) -> PluginResponse | None:
        choices = tuple(
            msgspec.structs.replace(each, text=each.text.upper()) for each in response.choices
        )
        return msgspec.structs.replace(response, choices=choices)


class Watching(InferencePlugin):
    name = "watching"
    version = "1"

    def __init__(self) -> None:
        self.seen: list[PluginResponse] = []

    async def post_inference(self, response: PluginResponse) -> PluginResponse | None:
        self.seen.append(response)
        return None


class Refusing(InferencePlugin):
    name = "refusing"
    version = "1"

    async def pre_inference(self, request: PluginRequest) -> PluginRequest | None:
        raise RefusedError("Not here.")


class Swapping(InferencePlugin):
    """Replaces "ab" by "x", wherever it is cut."""

    name = "swapping"
    version = "1"

    def text_filter(self, request: PluginRequest) -> Any:
        def swap(pending: str, is_last: bool) -> Filtered:
            settled = len(pending) - (pending.endswith("a") and not is_last)
            edits = []
            position = pending.find("ab")
            while position >= 0:
                edits.append(Edit(position, position + 2, "x"))
                position = pending.find("ab", position + 2)
            return Filtered(settled, edits)

        return swap


def test_a_plugin_changed_answer_keeps_its_stop_reason() -> None:
    held = Held(1)
    for event in (
        TextEvent(0, "ab", 1),
        FinishEvent(0, "stop", "X"),
        UsageEvent(prompt_tokens=1, completion_tokens=1, cached_tokens=0),
    ):
        held.add(event)
    asked = cast(PluginRequest, None)
    original = PluginResponse(request=asked, choices=(PluginChoice(text="ab"),))
    changed = PluginResponse(request=asked, choices=(PluginChoice(text="AB"),))
    text, finish, _ = held.events(original, changed)
    assert text == TextEvent(0, "AB", 1)
    assert finish == FinishEvent(0, "stop", "X")


async def test_a_plugin_changes_requests_and_whole_answers() -> None:
    backend = FakeBackend()
    async with running([Shouting()], backend) as made:
        events = await fed(made, a_chat("hi"))
    assert text_of(events) == "HELLO FROM A FAKE MODEL."
    asked = backend.requests[0]
    assert asked.messages[0]["content"] == "HI" and asked.context.params.temperature == 0.5
    assert sum(each.num_tokens for each in events if isinstance(each, TextEvent)) == 6
    assert [type(each) for each in events[-2:]] == [FinishEvent, UsageEvent]


async def test_an_observing_plugin_sees_the_end_and_delays_nothing() -> None:
    watching = Watching()
    async with running([Shouting(), watching]) as made:
        await fed(made, a_chat("hi"))
    backend = FakeBackend()
    backend.token_s = 0.02
    async with running([watching], backend) as made:
        reader = made.chat(a_chat("left"))
        await anext(reader)
        await reader.aclose()
    assert backend.num_cut_short == 1
    whole, cut = watching.seen
    assert whole.choices[0].text == "HELLO FROM A FAKE MODEL."
    assert whole.request.messages[0]["content"] == "HI"
    assert whole.usage is not None and whole.error is None
    assert cut.error == "ABORTED" and cut.usage is None


async def test_an_observing_plugin_sees_embeddings_and_their_failures() -> None:
    watcher, backend = Watching(), FakeBackend()
    asked = EmbedRequest(request_id="e", inputs=("a b c",))
    async with running([watcher], backend) as made:
        await made.embed(asked)
        backend.refusal = InvalidRequestError("No.")
        with pytest.raises(InvalidRequestError):
            await made.embed(asked)
    well, failed = watcher.seen
    assert well.usage is not None and well.usage.prompt_tokens == 3 and well.error is None
    assert failed.error is not None


async def test_a_plugins_refusal_skips_the_backend_and_is_not_a_failure() -> None:
    backend, watching = FakeBackend(), Watching()
    async with running([Refusing(), watching], backend) as made:
        for _ in range(5):
            with pytest.raises(ForbiddenError, match="Not here"):
                await fed(made, a_chat())
        assert describe(made.hosts[0])["failures"] == 0
    assert not backend.requests
    assert [each.error for each in watching.seen] == ["REFUSED_BY_PLUGIN"] * 5


@pytest.mark.parametrize("size", [1, 2, 3, 100])
async def test_chained_filters_see_the_previous_filters_text(size: int) -> None:
    text = "aab ba abab mail bob@example.com a"
    backend = FakeBackend([text[i : i + size] for i in range(0, len(text), size)])
    async with running([Swapping(), PiiRedactor()], backend) as made:
        events = await fed(made, a_chat())
        assert text_of(events) == "ax ba xx mail [EMAIL] a"
        read = [event async for event in made.chat(a_chat())]
        assert text_of(read) == text_of(events)


async def test_logprob_tokens_are_redacted_like_the_text() -> None:
    words = ["Hi", " bo", "b@", "exam", "ple.com", " and", " \N{GRINNING FACE}", " bye"]
    backend = FakeBackend(words)
    async with running([PiiRedactor()], backend) as made:
        events = await fed(made, a_chat(logprobs=2))
    tokens = [token for e in events if isinstance(e, TextEvent) for token in e.logprobs or ()]
    assert len(tokens) == len(words)
    assert "".join(token.token for token in tokens) == text_of(events)
    assert text_of(events) == "Hi [EMAIL] and \N{GRINNING FACE} bye"
    shown = json.dumps([msgspec.to_builtins(token) for token in tokens], default=str)
    assert "exam" not in shown and "bo" not in shown
    assert [bool(token.top) for token in tokens] == [True, *[False] * 4, *[True] * 3]


async def test_logprob_tokens_that_do_not_match_the_text_are_dropped() -> None:
    secret = TokenText("bob@example.com", b"bob@example.com", -1.0)
    backend = FakeBackend()
    backend.script = [TextEvent(0, "fine", 1, (secret,)), FinishEvent(0, "stop")]
    async with running([PiiRedactor()], backend) as made:
        events = await fed(made, a_chat(logprobs=0))
    assert "bob" not in repr(events) and text_of(events) == "fine"


async def test_redacted_tool_arguments_stay_json_and_reasoning_precedes_text() -> None:
    arguments = '{"to": "bob\\u0040example.com", "card": 4111111111111111, "n": 3}'
    backend = FakeBackend()
    backend.script = call_script(("send", arguments), said="ask bob@example.com")
    async with running([PiiRedactor()], backend) as made:
        events = await fed(made, a_chat())
        joined = "".join(each.arguments for each in events if isinstance(each, ToolCallEvent))
        assert json.loads(joined) == {"to": "[EMAIL]", "card": "[CREDIT_CARD]", "n": 3}
        begun = next(each for each in events if isinstance(each, ToolCallEvent))
        assert (begun.call_id, begun.name) == ("call_0", "send")
        kinds = [type(each) for each in events if not isinstance(each, TextEvent) or each.text]
        assert kinds == [*[TextEvent] * 2, *[ToolCallEvent] * 2, FinishEvent, UsageEvent]

        backend.script = reasoning_script(
            ["so bob@", "example.com"], ["It", " is", " +1555", "1234567"]
        )
        events = await fed(made, a_chat())
    shown = [each for each in events if getattr(each, "text", None)]
    assert "".join(e.text for e in shown if isinstance(e, ReasoningEvent)) == "so [EMAIL]"
    assert text_of(events) == "It is [PHONE]"
    first_text = next(i for i, each in enumerate(shown) if isinstance(each, TextEvent))
    assert not any(isinstance(each, ReasoningEvent) for each in shown[first_text:])


async def test_pii_in_argument_names_is_redacted() -> None:
    backend = FakeBackend()
    backend.script = call_script(("send", '{"bob@example.com": [{"bob@example.com": 1}]}'))
    async with running([PiiRedactor()], backend) as made:
        events = await fed(made, a_chat())
    joined = "".join(each.arguments for each in events if isinstance(each, ToolCallEvent))
    assert json.loads(joined) == {"[EMAIL]": [{"[EMAIL]": 1}]}


class Stumbling(Swapping):
    """Fails at its second piece of text."""

    def text_filter(self, request: PluginRequest) -> Any:
        swap = super().text_filter(request)
        pieces = iter((swap, None))

        def stumble(pending: str, is_last: bool) -> Filtered:
            once = next(pieces, swap)
            if once is None:
                raise ValueError("it stumbled")
            return cast(Filtered, once(pending, is_last))

        return stumble


async def test_a_filter_that_failed_once_changes_no_more_of_that_answer() -> None:
    backend = FakeBackend(["ab ", "ab ", "ab ", "ab"])
    async with running([Stumbling()], backend) as made:
        assert text_of(await fed(made, a_chat())) == "x ab ab ab"
        assert text_of(await fed(made, a_chat())) == "x ab ab ab"


async def test_prompts_are_redacted_in_every_text_field() -> None:
    backend = FakeBackend()
    message = {
        "role": "assistant",
        "content": "bob@example.com",
        "tool_calls": [
            {"id": "1", "type": "function", "function": {"name": "f", "arguments": {"a": ["::1"]}}}
        ],
    }
    request = msgspec.structs.replace(a_chat(), messages=(message,))
    async with running([PiiRedactor()], backend) as made:
        await fed(made, request)
        await fed(made, msgspec.structs.replace(a_completion("::1"), suffix="bob@example.com"))
        await made.embed(EmbedRequest(request_id="e", inputs=("ssn 123-45-6789",)))
        with pytest.raises(InvalidRequestError, match="token ids"):
            await fed(made, a_completion((1, 2, 3)))
    asked = backend.requests[0].messages[0]
    assert asked["content"] == "[EMAIL]"
    assert asked["tool_calls"][0]["function"]["arguments"] == {"a": ["[IPV6]"]}
    assert message["content"] == "bob@example.com"
    completion = backend.requests[1]
    assert (completion.prompt, completion.suffix) == ("[IPV6]", "[EMAIL]")
    assert backend.embed_requests[0].inputs == ("ssn [SSN]",)


def test_a_redacted_stream_joins_to_the_redacted_whole() -> None:
    backend = FakeBackend(["Write", " to bob@", "example", ".com", " or +1 555", " 1234567", "."])
    made = plugged([PiiRedactor()], backend)
    with live_server(made) as server:
        whole = httpx.post(f"{server.url}/v1/chat/completions", json=chat())
        text = whole.json()["choices"][0]["message"]["content"]
        assert text == "Write to [EMAIL] or [PHONE]."
        streamed = httpx.post(f"{server.url}/v1/chat/completions", json=chat(stream=True))
        chunks = [each for each in events_of(streamed.text) if each != "[DONE]"]
        deltas = [chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks]
        assert "".join(deltas) == text
        listed = httpx.get(f"{server.url}/v1/admin/plugins").json()["plugins"]
        assert [each["name"] for each in listed] == ["pii_redactor"]
        assert listed[0]["state"] == "on" and listed[0]["on_failure"] == "refuse"
        command = ["admin", "--url", server.url, "plugins"]
        assert "pii_redactor" in CliRunner().invoke(app, [*command, "list"]).stdout
        made.hosts[0]._is_off = True
        enabled = CliRunner().invoke(app, [*command, "enable", "pii_redactor"])
        assert enabled.stdout == "pii_redactor is on.\n" and made.hosts[0].is_active
        unknown = CliRunner().invoke(app, [*command, "enable", "nobody"])
        assert unknown.exit_code == 2 and "no such plugin" in unknown.output
        routes = httpx.get(f"{server.url}/v1/admin/routes").json()
        assert routes["models"][0]["backends"][0]["kind"] == "fake"


@pytest.mark.parametrize(
    ("plugin", "options", "words"),
    [
        (PiiRedactor, {"kinds": ["emil"]}, "there is no 'emil'"),
        (PiiRedactor, {"prompt": True}, "unknown field"),
        (RequestAudit, {}, "path"),
        (RequestAudit, {"path": "/dev/null"}, "not a plain file"),
    ],
)
async def test_invalid_plugin_options_end_the_start(plugin, options, words) -> None:
    made = plugged([plugin()], options=options)
    with pytest.raises(ConfigError, match=words) as raised:
        await made.start()
    assert f"plugins.{plugin.name}" in str(raised.value)
    assert made.inner.is_stopped  # type: ignore[attr-defined]


def test_plugins_are_found_by_name_and_sorted_by_order() -> None:
    backend = FakeBackend()
    assert (
        plug_in(backend, {"audit_log": PluginTable(enabled=False)}, CollectorRegistry()) is backend
    )
    tables = {"audit_log": PluginTable(order=200), "pii_redactor": PluginTable()}
    made = plug_in(backend, tables, CollectorRegistry())
    assert [host.name for host in made.hosts] == ["pii_redactor", "audit_log"]  # type: ignore[attr-defined]
    assert made.unwrapped is backend
    with pytest.raises(ConfigError, match="unknown plugin 'nothing'"):
        plug_in(backend, {"nothing": PluginTable()}, CollectorRegistry())


async def test_plugin_metrics_have_labels_from_the_configuration_only() -> None:
    registry = CollectorRegistry()
    made = plugged([Shouting()], registry=registry)
    await made.start()
    await fed(made, a_chat("words of a client"))
    await made.stop()
    text = generate_latest(registry).decode()
    assert (
        'engine_plugin_calls_total{hook="pre_inference",outcome="ok",plugin="shouting"} 1.0' in text
    )
    assert "words" not in text


async def test_the_documented_plugin_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    docs = (Path(__file__).parents[3] / "docs" / "plugins.md").read_text()
    (source,) = re.findall(r"```python\n(# engine_house_rules\.py\n.*?)```", docs, re.DOTALL)
    (tmp_path / "engine_house_rules.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    kind = importlib.import_module("engine_house_rules").HouseRules
    backend = FakeBackend(["A basi", "lisk", " and a bas", "il."])
    options = {"topics": ["the weather"], "hidden_word": "basilisk"}
    async with running([kind()], backend, options=options) as made:
        assert text_of(await fed(made, a_chat())) == "A *** and a basil."
        with pytest.raises(ForbiddenError, match="not discussed"):
            await fed(made, a_chat("Is the weather nice?"))
    assert backend.requests[0].messages[0]["content"] == "Be brief and kind."


def test_plugins_list_shows_configured_tables(tmp_path: Path) -> None:
    path = tmp_path / "engine.toml"
    path.write_text(
        '[plugins.audit_log]\norder = 7\npath = "x"\n[plugins.pii_redactor]\norder = 3\n'
    )
    listed = CliRunner().invoke(app, ["plugins", "list", "--json", "--config", str(path)])
    assert listed.exit_code == 0, listed.output
    rows = json.loads(listed.stdout)
    assert [(row["name"], row["used"]) for row in rows[:2]] == [
        ("pii_redactor", "yes"),
        ("audit_log", "yes"),
    ]
    tables = load_settings(path).settings.tables.plugins
    assert tables["audit_log"].options == {"path": "x"}
    path.write_text("[plugins.pii_redactor]\ntimeout_s = 0\n")
    with pytest.raises(ConfigError, match=r"plugins\.pii_redactor\.timeout_s"):
        load_settings(path)

"""`engine compare`: which answers agree, where they part, and what is told of it."""

import json
from collections.abc import Mapping, Sequence

import pytest
from typer.testing import CliRunner

from engine.cli.commands import app
from engine.core.errors import ConfigError, InvalidRequestError, UnavailableError
from engine.core.interfaces.backend import (
    CompletionRequest,
    FinishEvent,
    ReasoningEvent,
    TextEvent,
    TokenText,
    ToolCallEvent,
    TopLogprob,
)
from engine.routing.shadow.agreement import END, compare_answers
from engine.routing.shadow.compared_answer import ComparedAnswer
from engine_tools.compare.contenders import Contender, find_contenders
from engine_tools.compare.prompts import read_prompts
from engine_tools.compare.report import percentile
from engine_tools.compare.run import NUM_ALTERNATIVES, Plan, run_all
from tests.support.fakes.fake_backend import FakeBackend

STOP = "<|im_end|>"


def token(text: str, logprob: float = -0.5, **rivals: float) -> TokenText:
    others = (TopLogprob(rival, rival.encode(), value) for rival, value in rivals.items())
    return TokenText(
        text, text.encode(), logprob, (TopLogprob(text, text.encode(), logprob), *others)
    )


def answer(*tokens: TokenText, reason: str = "stop", logprobs: bool = True) -> ComparedAnswer:
    made = ComparedAnswer()
    for each in tokens:
        text = "" if each.token == STOP else each.token
        made.add(TextEvent(0, text, 1, (each,) if logprobs else None))
    made.add(FinishEvent(0, reason))
    return made


def test_equal_answers_are_identical_and_their_logprobs_are_compared():
    ours = answer(token("a", -0.5), token("b", -1.0), token(STOP))
    theirs = answer(token("a", -0.75), token("b", -1.0))  # shows no end token
    found = compare_answers(ours, theirs, 0.5)
    assert found.verdict == "identical" and found.divergence is None
    assert found.distances == compare_answers(theirs, ours, 0.5).distances == (0.25, 0.0)
    assert found.same_finish
    cut = compare_answers(ours, answer(token("a"), token("b"), reason="length"), 0.5)
    assert cut.verdict == "identical" and not cut.same_finish


@pytest.mark.parametrize(("lead", "verdict"), [(0.2, "tie"), (0.3, "different")])
def test_a_near_tie_is_a_divergence_whose_tokens_both_backends_rate_alike(lead, verdict):
    ours = answer(token("a"), token("x", -1.0, y=-1.0 - lead))
    theirs = answer(token("a"), token("y", -1.0, x=-1.2))
    found = compare_answers(ours, theirs, 0.45)
    assert found.verdict == verdict
    assert (found.divergence.position, found.divergence.reference, found.divergence.other) == (
        1,
        "x",
        "y",
    )
    assert found.divergence.gap.nats == pytest.approx(lead + 0.2)
    assert found.distances == (0.0,)  # what follows a divergence is not compared


def test_a_divergent_token_outside_the_alternatives_is_not_a_tie():
    ours = answer(token("x", -1.0, z=-1.1))
    theirs = answer(token("y", -1.0, z=-1.1))
    gap = compare_answers(ours, theirs, 0.5).divergence.gap
    assert gap.is_bound and gap.nats == pytest.approx(0.2)
    assert compare_answers(ours, theirs, 0.5).verdict == "different"


def test_a_gap_of_just_the_limit_is_a_tie():
    ours = answer(token("x", -1.0, y=-1.25))
    theirs = answer(token("y", -1.0, x=-1.25))
    assert compare_answers(ours, theirs, 0.5).verdict == "tie"
    assert compare_answers(ours, theirs, 0.499).verdict == "different"


def test_a_gap_is_not_closed_if_a_backend_prefers_the_others_token():
    ours = answer(token("x", -1.0, y=-0.5))  # a penalty decided, and not the logprob
    theirs = answer(token("y", -1.0, x=-1.75))
    assert compare_answers(ours, theirs, 0.5).divergence.gap.nats == 0.75


def test_a_gap_with_one_bounded_side_is_a_bound():
    ours = answer(token("x", -1.0, z=-1.125))
    theirs = answer(token("y", -1.0, x=-1.125))
    found = compare_answers(ours, theirs, 0.5)
    assert found.divergence.gap.is_bound and found.verdict == "different"


def test_a_partial_character_token_compares_equal_with_and_without_bytes():
    ours = answer(TokenText("\ufffd", b"\xc3", -0.5), token("a"))
    theirs = answer(TokenText("\ufffd", "\ufffd".encode(), -0.75), token("a"))
    assert compare_answers(ours, theirs, 0.5).distances == (0.25, 0.0)


def test_an_early_end_is_a_divergence_that_can_be_a_near_tie():
    ours = answer(token("a"), token(STOP, -1.0, b=-1.1))
    theirs = answer(token("a"), token("b", -1.0, **{STOP: -1.1}), reason="length")
    assert compare_answers(ours, theirs, 0.5).verdict == "tie"
    mute = answer(token("a"))  # ended, by a token that it does not show
    found = compare_answers(mute, theirs, 0.5)
    assert (found.verdict, found.divergence.reference) == ("different", END)


def test_without_logprobs_texts_are_compared_and_nothing_is_a_tie():
    ours = answer(token("one"), token(" two"), token(" three"), logprobs=False)
    theirs = answer(token("one two"), token(" four"), logprobs=False)
    found = compare_answers(ours, theirs, 10.0)
    assert found.verdict == "different" and found.divergence.gap is None
    assert found.divergence.position == 2
    assert found.divergence.reference == "three"


def test_reasoning_and_calls_are_part_of_an_answer():
    made = ComparedAnswer()
    for event in (
        ReasoningEvent(0, "hm"),
        TextEvent(0, "", 2),
        ToolCallEvent(0, 0, "", "id", "f"),
        ToolCallEvent(0, 0, "{}"),
        FinishEvent(0, "tool_calls"),
    ):
        made.add(event)
    assert made.said == "hm\nf {}"


def test_the_length_of_compared_answers_can_be_bounded():
    made = ComparedAnswer(max_chars=5)
    for _ in range(3):
        made.add(TextEvent(0, "abc", 1))
    assert (made.said, made.is_cut, made.num_tokens) == ("abcab", True, 3)


def test_arguments_name_backends_and_options_reach_them():
    configured = {"fast": Contender("fast", "native", "m", {"backend_args": {"threads": 1}})}
    words = ["fast", "exact=native", "torch", "cloud=https://host/v1", "http://host:1/v1"]
    options = [
        "fast.backend_args.numerics=fast",
        "exact.backend_args.threads=2",
        "torch.model=/a.b/c",
        "http://host:1/v1.model=other",
    ]
    fast, exact, torch, cloud, plain = find_contenders(words, options, "default", configured)
    assert fast.options == {"backend_args": {"threads": 1, "numerics": "fast"}}
    assert configured["fast"].options == {"backend_args": {"threads": 1}}
    assert (exact.kind, exact.model) == ("native", "default")
    assert exact.options == {"backend_args": {"threads": 2}}
    assert (torch.model, torch.options) == ("/a.b/c", {})
    assert (cloud.kind, cloud.model, cloud.options) == (
        "openai",
        "auto",
        {"base_url": "https://host/v1"},
    )
    assert plain.model == "other"


@pytest.mark.parametrize(
    ("words", "options", "complaint"),
    [
        (["native", "nativ"], [], "no 'nativ'"),
        (["native", "native"], [], "named twice"),
        (["native"], ["torch.x=1"], "NAME being one of native"),
        (["native"], ["native.x"], "NAME.OPTION=VALUE"),
        (["native"], ["native.port=1", "native.port.x=1"], "'port' is no table"),
    ],
)
def test_invalid_backend_arguments_are_named(words, options, complaint):
    with pytest.raises(ConfigError, match=complaint):
        find_contenders(words, options, "m", {})


def test_prompt_files_are_text_or_json_by_extension(tmp_path):
    text = tmp_path / "a.txt"
    text.write_text('"quoted"\n\n{"prompt": 1}\n')
    assert [each.content for each in read_prompts(text)] == ['"quoted"', '{"prompt": 1}']
    chats = read_prompts(text, as_chat=True)
    assert chats[0].content == ({"role": "user", "content": '"quoted"'},)
    lines = tmp_path / "a.jsonl"
    message = {"role": "user", "content": "x"}
    values = ["plain", [message], {"id": "k", "messages": [message]}, {"prompt": "p"}]
    lines.write_text("\n".join(map(json.dumps, values)))
    assert [(each.id, each.capability) for each in read_prompts(lines)] == [
        ("1", "completions"),
        ("2", "chat"),
        ("k", "chat"),
        ("4", "completions"),
    ]


@pytest.mark.parametrize(
    "line",
    ["{", "1", "{}", '{"prompt": ""}', '{"prompt": "a", "n": 2}', "[]", '[{"role": "tool"}]'],
)
def test_an_invalid_prompt_line_is_named(tmp_path, line):
    path = tmp_path / "a.jsonl"
    path.write_text('"fine"\n' + line)
    with pytest.raises(InvalidRequestError, match="line 2"):
        read_prompts(path)


def scripted(tokens: Sequence[TokenText]) -> FakeBackend:
    backend = FakeBackend()
    events = [TextEvent(0, each.token, 1, (each,)) for each in tokens]
    backend.script = [*events, FinishEvent(0, "stop")]
    return backend


@pytest.mark.parametrize(
    ("values", "percent", "expected"),
    [([], 50, None), ([3.0], 95, 3.0), ([2.0, 1.0], 50, 1.0), ([2.0, 1.0], 51, 2.0)]
    + [(range(1, 101), 99, 99), (range(1, 101), 100, 100), (range(1, 101), 0, 1)],
)
def test_percentiles_are_the_nearest_rank(values, percent, expected):
    assert percentile(values, percent) == expected


@pytest.fixture
def fakes(monkeypatch):
    """Backends by name, in place of real ones."""
    made: dict[str, FakeBackend] = {}
    monkeypatch.setattr(
        "engine_tools.compare.run.make_backend",
        lambda kind, model, options: made[options.get("base_url", kind)],
    )
    return made


def run_cli(tmp_path, backends: str, *arguments: str):
    path = tmp_path / "prompts.txt"
    path.write_text("one\ntwo\n")
    given = ["compare", "--backends", backends, "--prompts", str(path), *arguments]
    return CliRunner(env={"COLUMNS": "100"}).invoke(app, given)


def test_compare_reports_each_backend_and_whether_they_agree(
    tmp_path, fakes: Mapping[str, FakeBackend]
):
    fakes["native"] = scripted([token("a", -0.5), token("b", -1.0, c=-1.1)])
    fakes["torch"] = scripted([token("a", -0.6), token("c", -1.0, b=-1.1)])
    done = run_cli(tmp_path, "native,torch", "--json")
    assert done.exit_code == 0, done.output
    report = json.loads(done.stdout)
    ours, theirs = report["backends"]
    assert report["reference"] == ours["name"] == "native"
    assert (ours["identical"], theirs["near_ties"], theirs["agreement"]) == (2, 2, 1.0)
    assert theirs["logprob_distance_mean"] == pytest.approx(0.1)
    assert theirs["first_divergence_min"] == 1
    assert theirs["prompts"][0]["divergence"]["gap_nats"] == pytest.approx(0.2)
    assert theirs["ttft_p50_s"] > 0 and theirs["tokens_per_s"] > 0
    # Greedy, with alternatives; the warm-up came first and is none of the prompts.
    warm_up, first, _ = fakes["torch"].requests
    assert isinstance(warm_up, CompletionRequest) and warm_up.prompt != "one"
    assert (first.context.params.temperature, first.context.params.logprobs) == (
        0.0,
        NUM_ALTERNATIVES,
    )
    strict = run_cli(tmp_path, "native,torch", "--tie", "0.1")
    assert strict.exit_code == 1
    assert "'b'" in strict.stdout and "0.200" in strict.stdout and "different" in strict.stdout
    assert run_cli(tmp_path, "native,torch", "--tie", "0.1", "--fail-below", "0").exit_code == 0


def test_a_backend_that_fails_is_reported_and_the_others_go_on(tmp_path, fakes):
    fakes["native"] = scripted([token("a")])
    fakes["torch"] = FakeBackend()
    fakes["torch"].start_error = UnavailableError("no such file [red]")
    fakes["http://x"] = scripted([token("a")])
    fakes["http://x"].fail_after = 0
    done = run_cli(tmp_path, "native,torch,web=http://x")
    assert done.exit_code == 1
    assert "torch did not run: no such file [red]" in done.stdout
    assert "2 of 2" in done.stdout
    assert run_cli(tmp_path, "native,torch", "--fail-below", "0").exit_code == 1, "one did not run"
    assert all(fake.is_stopped for fake in fakes.values())
    fakes["native"].start_error = UnavailableError("it is gone")
    gone = run_cli(tmp_path, "native,torch")
    assert gone.exit_code == 1 and "error: it is gone" in gone.output


def test_argument_errors_are_reported_before_any_backend_starts(tmp_path, fakes):
    fakes["native"] = scripted([token("a")])
    assert run_cli(tmp_path, "native").exit_code == 2
    assert run_cli(tmp_path, "native,nobody").exit_code == 2
    assert not fakes["native"].requests


async def test_backends_run_one_after_the_other_and_failures_are_counted():
    running: list[str] = []

    class Watched(FakeBackend):
        async def start(self) -> str:
            assert not running
            running.append("it")
            return await super().start()

        async def stop(self) -> None:
            running.clear()

    flaky = Watched()
    plan = Plan(prompts=[], max_tokens=4, concurrency=2, timeout_s=5)
    backends = {"a": Watched(), "b": flaky}
    contenders = [Contender(name, "fake", "m", {}) for name in backends]
    trials = await run_all(contenders, plan, lambda _: None, lambda each: backends[each.name])
    assert [trial.failure for trial in trials] == [None, None]
    assert len(flaky.requests) == 2  # the warm-up, as many at once as are measured
    flaky.refusal = UnavailableError("not now")
    trials = await run_all(contenders, plan, lambda _: None, lambda each: backends[each.name])
    assert "not now" in str(trials[1].failure)


async def test_features_that_a_backend_lacks_are_not_compared_and_are_reported(tmp_path):
    path = tmp_path / "p.txt"
    path.write_text("one")
    fake = FakeBackend()
    fake.set_card(lacks=("logprobs",))
    plan = Plan(read_prompts(path), max_tokens=4, concurrency=1, timeout_s=0.05)
    contender = [Contender("a", "fake", "m", {})]
    (trial,) = await run_all(contender, plan, lambda _: None, lambda _: fake)
    assert all(each.context.params.logprobs is None for each in fake.requests)
    assert "no logprobs" in trial.notes[0]
    fake.set_card(capabilities=("chat",))
    with pytest.raises(ConfigError, match="--chat"):
        await run_all(contender, plan, lambda _: None, lambda _: fake)
    fake.set_card()
    fake.script = lambda request: [] if "Water" in request.prompt else [TextEvent(0, "a", 1)] * 99
    fake.token_s = 0.02
    (trial,) = await run_all(contender, plan, lambda _: None, lambda _: fake)
    assert trial.outcomes[0].error == "no end within 0.05 s"
    assert fake.num_open == 0

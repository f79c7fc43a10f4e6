"""Evaluation: what a file may ask, how answers are scored, and whether a difference is chance."""

import asyncio
import json
import re
from decimal import Decimal

import pytest

from engine.core.errors import ConfigError, InvalidRequestError
from engine.core.interfaces.backend import TokenText
from engine_tools.compare.contenders import Contender
from engine_tools.evaluation.asking import _sum_after, scores_of
from engine_tools.evaluation.items import ChoiceCheck, read_items
from engine_tools.evaluation.report import Difference, Share, difference_lines, overall, shares
from engine_tools.evaluation.results import ResultFile
from engine_tools.evaluation.run import EvaluationPlan, evaluate
from engine_tools.evaluation.texts import contains, is_exact, marked_number, predicted_number
from tests.support.fakes.fake_backend import FakeBackend

ASKED = {"question": "Which city?"}


def items_of(tmp_path, *lines, check=None):
    file = tmp_path / "questions.jsonl"
    file.write_text(
        "\n".join(each if isinstance(each, str) else json.dumps(each) for each in lines)
    )
    return read_items(file, check)


@pytest.mark.parametrize(
    "line, reason",
    [
        ("{", "not JSON"),
        ("[]", "an object"),
        ({"answer": "x"}, "one of question, prompt, messages"),
        (ASKED | {"prompt": "x", "answer": "x"}, "one of question, prompt, messages"),
        (ASKED, "give answer"),
        (ASKED | {"answer": "x", "colour": 1}, "unknown field 'colour'"),
        (ASKED | {"answer": "x", "check": "near"}, "exact, contains, number"),
        (ASKED | {"answer": "none", "check": "number"}, "no number"),
        (ASKED | {"choices": ["a"], "answer": 0}, "two or more"),
        (ASKED | {"choices": ["a", "b"], "answer": "C"}, "one of choices"),
        (ASKED | {"choices": ["a", "b"], "answer": 0, "criteria": "x"}, "exclude each other"),
        (ASKED | {"schema": {"type": "objekt"}}, "schema: "),
        (ASKED | {"criteria": ""}, "must be texts"),
        ({"messages": [{"role": "assistant", "content": "x"}], "answer": "x"}, "of the user"),
    ],
)
def test_an_invalid_evaluation_line_is_refused_with_its_number(tmp_path, line, reason):
    with pytest.raises(InvalidRequestError, match="line 3: ") as caught:
        items_of(tmp_path, ASKED | {"answer": "x"}, "", line)
    assert reason in str(caught.value)


def test_choices_are_named_by_text_letter_or_index(tmp_path):
    answers = ("b", "B", 1)
    items = items_of(
        tmp_path, *(ASKED | {"choices": ["a!", "b"], "answer": each} for each in answers)
    )
    assert [each.check for each in items] == [ChoiceCheck(("a!", "b"), 1)] * 3


def test_exact_and_contains_scores_compare_words():
    assert is_exact(" The Eiffel\n tower. ", "Eiffel Tower")
    assert not is_exact("Eiffel Towers", "Eiffel Tower")
    assert contains("It is in Paris, France.", "paris")
    assert not contains("comparison", "paris")
    assert is_exact("A.", "a") and contains("The answer is A.", "A")  # a letter, no article
    assert not is_exact("The", "A") and not contains("The answer is B.", "A")


def test_numbers_are_extracted_from_answers_in_any_form():
    for text in ("so 5 #### 1,300", "#### $1300.0 dollars", "It is 7, no, 1,300.", "####1300 7"):
        assert predicted_number(text) == Decimal(1300), text
    assert predicted_number("#### -4") == -4
    assert predicted_number("I don't know.") is None
    assert marked_number("It is 7.") is None


def test_schema_scores_read_code_fences_and_compare_values(tmp_path):
    schema = {"type": "object", "required": ["a"], "properties": {"a": {"type": "integer"}}}
    (item,) = items_of(tmp_path, ASKED | {"schema": schema, "answer": {"a": 1}})
    assert scores_of(item, 'Here:\n```json\n{"a": 1}\n```') == {"schema": True, "value": True}
    assert scores_of(item, '{"a": 2}') == {"schema": True, "value": False}
    assert scores_of(item, '{"a": "1"}') == {"schema": False, "value": False}
    assert scores_of(item, "no") == {"schema": False, "value": False}


def test_only_the_logprobs_of_the_continuation_are_summed():
    def token(text, logprob, in_text=True):
        return TokenText(text, text.encode(), logprob, in_text=in_text)

    nan = float("nan")
    tokens = (token("<s>", nan, False), token("ä", nan), token(" b", -1.0), token(" c", -2.0))
    generated = token(" d", -4.0)
    assert _sum_after(len("ä".encode()), "ä b c", (*tokens, generated)) == -3.0
    # A token across the border belongs to the continuation.
    assert _sum_after(len("ä ".encode()), "ä b c", (*tokens, generated)) == -3.0


def test_confidence_intervals_and_p_values_equal_the_textbook():
    low, high = Share(8, 10).interval
    assert (round(low, 3), round(high, 3)) == (0.490, 0.943)
    assert Difference("a", "b", 0, 5).chance == 2 / 2**5
    assert Difference("a", "b", 3, 3).chance == 1.0
    assert Difference("a", "b", 600, 700).chance < 0.01


def ask(tmp_path, monkeypatch, answers, lines, judge=None):
    """Evaluate stand-ins that give these answers, by name."""
    made = {name: FakeBackend(re.findall(r"\S+\s*", text)) for name, text in answers.items()}
    monkeypatch.setattr("engine_tools.evaluation.run.make_contender", lambda each: made[each.name])
    plan = EvaluationPlan(items_of(tmp_path, *lines), 16, 2, 30.0, "")
    contenders = [Contender(name, "", "", {}) for name in answers if name != judge]
    judges = None if judge is None else Contender(judge, "", "", {})
    file = ResultFile(None, plan.settings)
    return asyncio.run(evaluate(contenders, judges, plan, file, lambda text: None))


def test_two_models_are_compared_on_the_same_questions(tmp_path, monkeypatch):
    lines = [ASKED | {"answer": each} for each in ("Rome", "Oslo", "Rome")]
    first, second = ask(tmp_path, monkeypatch, {"a": "Oslo.", "b": "Rome"}, lines)
    assert (overall(first), overall(second)) == (Share(1, 3), Share(2, 3))
    (line,) = difference_lines([first, second])
    assert line.startswith("only b right: 2; only a right: 1;")


def test_judged_questions_need_a_judge_model(tmp_path, monkeypatch):
    lines = [ASKED | {"criteria": "It is a city."}]
    reason = " ".join(["It is."] * 16)  # longer than an answer may be
    verdict = json.dumps({"reason": reason, "verdict": "right"})
    (found,) = ask(tmp_path, monkeypatch, {"a": "Oslo", "j": verdict}, lines, judge="j")
    assert shares(found) == {"judge": Share(1, 1)}
    (found,) = ask(tmp_path, monkeypatch, {"a": "Oslo", "j": "dunno"}, lines, judge="j")
    assert "no verdict" in found.errors[0] and overall(found).total == 0
    with pytest.raises(ConfigError, match="--judge"):
        ask(tmp_path, monkeypatch, {"a": "Oslo"}, lines)

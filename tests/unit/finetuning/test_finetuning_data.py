"""Training files: a wrong line is named, and only what the model would say itself is trained."""

import json
from pathlib import Path

import pytest

from engine.core.errors import InvalidRequestError
from engine.core.store.model_store import resolve_model
from engine.finetuning.data import MAX_LINE_BYTES, count_examples, parse_example, read_examples
from engine.finetuning.plan import Hyperparameters, decide
from engine.finetuning.tokens import ExampleTokenizer
from engine.frontend.text_model import load_text
from tests.conftest import DEFAULT_MODEL

USER = {"role": "user", "content": "Hi"}
ANSWER = {"role": "assistant", "content": "Hello."}


@pytest.mark.parametrize(
    "method, value, reason",
    [
        ("supervised", '{"a" 1}', "not JSON (Expecting ':' delimiter at column 6)"),
        ("supervised", '{"prompt": "x"', "not JSON (Expecting ',' delimiter at column 15)"),
        ("supervised", '{"prompt": "\\ud800", "completion": "x"}', "not UTF-8 (surrogates"),
        ("supervised", {"preferred_output": []}, "which the method dpo trains"),
        ("supervised", [], "a JSON object"),
        ("supervised", {"text": "x"}, "give messages, or prompt and completion"),
        ("supervised", {"messages": []}, "at least one message"),
        ("supervised", {"messages": [USER]}, "no message of the assistant"),
        ("supervised", {"messages": [USER, ANSWER | {"weight": 0}]}, "with a weight of 1"),
        ("supervised", {"messages": [USER, ANSWER | {"weight": 2}]}, "weight must be 0 or 1"),
        ("supervised", {"messages": [{"role": "bot", "content": "x"}]}, "must have a role"),
        ("supervised", {"messages": [{"role": "user"}]}, "messages[0]: content must be a text"),
        ("supervised", {"messages": [USER, ANSWER], "x": 1}, "unknown field 'x'"),
        ("supervised", {"messages": [USER | {"x": 1}]}, "unknown field 'x'"),
        ("supervised", {"prompt": "x", "completion": ""}, "must be texts"),
        (
            "supervised",
            {
                "messages": [
                    USER,
                    {"role": "assistant", "tool_calls": [{"function": {"name": "f"}}]},
                ]
            },
            "a function with name and arguments",
        ),
        ("dpo", {"messages": [USER, ANSWER]}, "for the method supervised; dpo needs input"),
        ("dpo", {"input": {}, "x": 1}, "unknown field 'x'"),
        ("dpo", {"input": {}}, "input must be an object with messages"),
        (
            "dpo",
            {"input": {"messages": [USER]}, "preferred_output": [ANSWER]},
            "non_preferred_output must be a list with one message",
        ),
    ],
)
def test_an_invalid_training_line_is_refused_with_its_number(tmp_path, method, value, reason):
    good = {"messages": [USER, ANSWER]}
    if method == "dpo":
        good = {
            "input": {"messages": [USER]},
            "preferred_output": [ANSWER],
            "non_preferred_output": [ANSWER],
        }
    file = tmp_path / "train.jsonl"
    wrong = value if isinstance(value, str) else json.dumps(value)
    file.write_text(f"{json.dumps(good)}\n\n{wrong}\n")
    with pytest.raises(InvalidRequestError, match="line 3 of the training file: ") as caught:
        read_examples(file, method)
    assert reason in str(caught.value)


def test_lines_of_mixed_formats_are_refused(tmp_path):
    file = tmp_path / "train.jsonl"
    lines = [{"messages": [USER, ANSWER]}, {"prompt": "x", "completion": "y"}]
    file.write_text("\n".join(map(json.dumps, lines)))
    with pytest.raises(
        InvalidRequestError, match="line 2 of the training file: this line has another"
    ):
        read_examples(file, "supervised")


@pytest.fixture(scope="module")
def text():
    return load_text(resolve_model(DEFAULT_MODEL))


def trained_text(text, example):
    pairs = zip(example.token_ids, example.mask, strict=True)
    ids = [token for token, is_trained in pairs if is_trained]
    return text.tokenizer.decode(ids, skip_special=False)


def parsed(value, method="supervised"):
    return parse_example(json.dumps(value).encode(), method)


def test_only_answers_and_their_end_token_are_trained(text):
    second = {"role": "assistant", "content": "Bye."}
    example = parsed({"messages": [USER, ANSWER, USER, second]})
    (tokens,) = ExampleTokenizer(text, 512).supervised([example])
    assert trained_text(text, tokens) == "Hello.<|im_end|>Bye.<|im_end|>"
    whole = text.tokenizer.decode(tokens.token_ids, skip_special=False)
    assert whole.endswith("<|im_start|>assistant\nBye.<|im_end|>") and "Hi" in whole


def test_a_message_of_weight_0_is_context_only(text):
    second = {"role": "assistant", "content": "Bye."}
    example = parsed({"messages": [USER, ANSWER | {"weight": 0}, USER, second]})
    (tokens,) = ExampleTokenizer(text, 512).supervised([example])
    assert trained_text(text, tokens) == "Bye.<|im_end|>"


def test_completions_are_trained_and_long_examples_truncated(text):
    example = parsed({"prompt": "One two", "completion": " three four"})
    tokenizer = ExampleTokenizer(text, 512)
    (tokens,) = tokenizer.supervised([example])
    assert trained_text(text, tokens) == " three four" + text.tokenizer.eos
    assert not tokenizer.notice
    short = ExampleTokenizer(text, len(tokens.token_ids) - 1)
    late = parsed({"prompt": "One two three four five six", "completion": " seven"})
    (cut,) = short.supervised([example, late])
    assert trained_text(text, cut) == " three four"
    assert short.notice == (
        "Examples with more than 4 tokens, which were cut: 2."
        " Left out, because the answer begins after that: 1."
    )
    with pytest.raises(InvalidRequestError, match="no example has a token to train on"):
        ExampleTokenizer(text, 2).supervised([example])


def test_dpo_pairs_share_their_prompt(text):
    value = {
        "input": {"messages": [USER]},
        "preferred_output": [ANSWER],
        "non_preferred_output": [{"role": "assistant", "content": "No."}],
    }
    (pair,) = ExampleTokenizer(text, 512).pairs([parsed(value, "dpo")])
    assert trained_text(text, pair.preferred) == "Hello.<|im_end|>"
    assert trained_text(text, pair.rejected) == "No.<|im_end|>"
    start = pair.preferred.mask.index(True)
    assert pair.preferred.token_ids[:start] == pair.rejected.token_ids[:start]


def test_default_epochs_follow_the_file_size_and_given_values_stay():
    small, large = decide(Hyperparameters(), 60), decide(Hyperparameters(), 20_000)
    assert small.n_epochs > 10 * large.n_epochs and small.batch_size < large.batch_size
    assert decide(Hyperparameters(), 60, "dpo").n_epochs < small.n_epochs
    given = decide(Hyperparameters(n_epochs=2, batch_size=100), 60)
    assert (given.n_epochs, given.batch_size) == (2, 60)
    with pytest.raises(InvalidRequestError, match="n_epochs must be between 1 and 1000"):
        decide(Hyperparameters(n_epochs=0), 60)


def test_a_training_line_that_is_too_long_is_refused(tmp_path: Path) -> None:
    """Nothing else runs in the server while a line is parsed."""
    path = tmp_path / "train.jsonl"
    good = json.dumps({"prompt": "a", "completion": "b"})
    path.write_text(f"{good}\n[{'[],' * (MAX_LINE_BYTES // 3)}[]]\n")
    with pytest.raises(InvalidRequestError, match=r"line 2 .* has more than 1,048,576 bytes"):
        count_examples(path, "supervised")

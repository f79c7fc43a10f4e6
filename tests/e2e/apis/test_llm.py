"""The engine as a library: batched equals alone, and the documented shapes of answers."""

import os
import signal
import threading

import pytest

from engine import LLM, InferenceEngine, SamplingParams, StructuredOutputsParams
from engine.core.errors import InvalidRequestError, UnavailableError
from engine.core.interfaces.backend import ToolChoice

TOPICS = ["the sea", "a dog", "winter", "bread", "the moon", "a train", "music", "a garden"]
STYLES = [
    "Tell me about",
    "Why do people like",
    "Write a line on",
    "What is",
    "Describe",
    "A short story about",
    "Three facts about",
    "The history of",
]
PROMPTS = [f"{style} {topic}" for style in STYLES for topic in TOPICS]
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, logprobs=2)
TIE = 1e-3


@pytest.fixture(scope="module")
def llm(default_model):
    with LLM(str(default_model)) as llm:
        yield llm


def first_difference(alone, together) -> int | None:
    pairs = zip(alone.token_ids, together.token_ids, strict=True)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), None)


def test_64_batched_greedy_requests_equal_each_request_run_alone(llm):
    assert len(PROMPTS) == 64
    alone = [llm.generate(prompt, GREEDY)[0].outputs[0] for prompt in PROMPTS]
    together = [output.outputs[0] for output in llm.generate(PROMPTS, GREEDY)]
    for prompt, one, many in zip(PROMPTS, alone, together, strict=True):
        where = first_difference(one, many)
        if where is not None:  # allowed only where the two best tokens are as good as equal
            best, second = one.logprobs[where].values()
            assert best.logprob - second.logprob < TIE, prompt


def test_seeded_sampling_does_not_depend_on_the_batch(llm):
    params = SamplingParams(temperature=1.0, top_p=0.9, seed=11, max_tokens=10)
    alone = [llm.generate(prompt, params)[0].outputs[0].token_ids for prompt in PROMPTS[:6]]
    together = [o.outputs[0].token_ids for o in llm.generate(PROMPTS[:6], params)]
    assert alone == together


def test_chat_answers_and_reports_cached_tokens_in_usage(llm):
    question = [{"role": "user", "content": "Name the capital of France."}]
    params = SamplingParams(temperature=0.0, max_tokens=20)
    (answer,) = llm.chat(question, params)
    assert "Paris" in answer.text and answer.outputs[0].finish_reason == "stop"
    (again,) = llm.chat(question, params)
    assert again.usage.cached_tokens > 0 and again.text == answer.text


def test_embed_takes_one_text_token_ids_or_an_empty_list(llm):
    (one,) = llm.embed("hello")
    assert one.outputs.hidden_size == llm.card.num_dimensions
    assert len(llm.embed([1, 2, 3])) == 1 and llm.embed([]) == []
    assert llm.embed(["hello", "bye"])[0].outputs.vector @ one.outputs.vector > 1 - 1e-4


def test_structured_outputs_choice_limits_the_answer(llm):
    choice = StructuredOutputsParams(choice=["Positive", "Negative"])
    (output,) = llm.generate("I like it. Sentiment: ", SamplingParams(structured_outputs=choice))
    assert output.text in ("Positive", "Negative")


def test_chat_options_are_validated_before_use(llm):
    question = [{"role": "user", "content": "What time is it?"}]
    tool = {"type": "function", "function": {"name": "now", "parameters": {"properties": {}}}}
    (forced,) = llm.chat(question, tools=[tool], tool_choice=ToolChoice("named", "now"))
    assert forced.outputs[0].tool_calls[0]["function"] == {"name": "now", "arguments": "{}"}
    for options in (
        {"tools": [tool], "tool_choice": "required"},
        {"tools": [tool], "tool_choice": ToolChoice("named", "later")},
        {"tools": tool},
        {"tool": [tool]},
    ):
        with pytest.raises(InvalidRequestError, match="tool"):
            llm.chat(question, **options)


def test_preset_replaces_the_chat_template(default_model, tmp_path, monkeypatch):
    preset = f"[presets.shout]\nmodel = '{default_model}'\n"
    template = "template = '{{ messages[-1].content }}!'\nsystem = 'unused'\n"
    (tmp_path / "engine.toml").write_text(preset + template)
    monkeypatch.chdir(tmp_path)
    with LLM("shout") as llm:
        (output,) = llm.chat("Hello", SamplingParams(max_tokens=1))
        (plain,) = llm.generate("Hello!", SamplingParams(max_tokens=1))
        assert output.prompt_token_ids == plain.prompt_token_ids and llm.card.id == "shout"


def test_inference_engine_returns_openai_shaped_answers_and_chunks(default_model):
    with InferenceEngine(str(default_model)) as engine:
        assert len(engine.generate(["Hello", "Bye"], max_tokens=3, temperature=0.0)) == 2
        messages = [{"role": "user", "content": "Say hi."}]
        whole = engine.chat_completion(messages, max_tokens=8, temperature=0.0)
        assert whole["object"] == "chat.completion"
        chunks = list(engine.chat_completion_stream(messages, max_tokens=8, temperature=0.0))
        text = "".join(c["choices"][0]["delta"].get("content", "") for c in chunks[:-1])
        assert text == whole["choices"][0]["message"]["content"]
        assert chunks[-1]["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"]
        with pytest.raises(InvalidRequestError, match="temprature"):
            engine.generate(["x"], temprature=1.0)


def test_more_prompts_than_the_queue_holds_are_all_answered_and_a_closed_llm_refuses(default_model):
    settings = {"performance.max_queued_requests": 3}
    llm = LLM(str(default_model), settings=settings)
    outputs = llm.generate(PROMPTS[:12], SamplingParams(max_tokens=2, n=2, ignore_eos=True))
    assert [output.usage.completion_tokens for output in outputs] == [4] * 12
    llm.close()
    with pytest.raises(UnavailableError):
        llm.generate("Hello")
    llm.close()


def test_keyboard_interrupt_aborts_the_open_requests(llm):
    # A shell that runs the tests in the background has interrupts ignored.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
    try:
        with pytest.raises(KeyboardInterrupt):
            llm.generate("Once upon a time", SamplingParams(max_tokens=4000, ignore_eos=True))
    finally:
        signal.signal(signal.SIGINT, before)
    assert not llm.engine.backend._link._requests


def test_an_invalid_prompt_in_a_list_aborts_the_other_prompts(llm):
    params = SamplingParams(max_tokens=4000, ignore_eos=True)
    with pytest.raises(InvalidRequestError):
        llm.generate(["Hello", [10**6]], params)
    (after,) = llm.generate("The sky is", SamplingParams(max_tokens=2))
    assert after.usage.completion_tokens == 2 and not llm.engine.backend._link._requests


def test_closing_a_stream_early_leaves_the_engine_usable(llm):
    events = llm.stream("Once upon a time", SamplingParams(max_tokens=200, ignore_eos=True))
    next(events)
    events.close()
    (after,) = llm.generate("The sky is", SamplingParams(max_tokens=3, temperature=0.0))
    assert after.usage.completion_tokens == 3

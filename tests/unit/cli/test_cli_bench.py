"""`engine bench`: what is sent, and what is reported of the answers."""

import random

from engine.cli.ops.bench import BenchLoad, Sample, summarize


def load(**changes) -> BenchLoad:
    fields = {"url": "u", "model": "m", "num_requests": 4, "concurrency": 2, "prompt_tokens": 10}
    fields |= {"max_tokens": 7, "rate": None, "extra": {}, "draws": random.Random(0)}
    return BenchLoad(**fields | changes)


def test_bench_prompts_differ_at_their_start_and_have_the_requested_size():
    made = load(extra={"ignore_eos": True})
    bodies = [made.body(number) for number in range(3)]
    texts = [body["messages"][0]["content"].split() for body in bodies]
    assert {len(words) for words in texts} == {10} and len({words[0] for words in texts}) == 3
    assert bodies[0]["max_tokens"] == 7 and bodies[0]["ignore_eos"]


def test_failed_requests_are_counted_only_as_failures():
    samples = [
        Sample(first_s=0.1, total_s=1.1, prompt_tokens=10, output_tokens=11),
        Sample(first_s=0.3, total_s=0.3, prompt_tokens=10, output_tokens=1),
        Sample(error="500: broken", total_s=9.0, output_tokens=5),
    ]
    report = summarize(samples, 2.0, load())
    assert (report["requests"], report["failed"], report["errors"]) == (2, 1, ["500: broken"])
    assert (report["output_tokens"], report["output_tokens_per_s"]) == (12, 6.0)
    assert report["total_tokens_per_s"] == 16.0
    first = report["time_to_first_token_ms"]
    assert (first["mean"], first["p50"], first["p99"]) == (200.0, 300.0, 300.0)
    assert report["time_per_output_token_ms"]["mean"] == 100.0, "only of answers with two tokens"
    assert summarize([], 1.0, load())["request_ms"] is None

"""Sampling parameters given to the Python API: what means nothing is refused, NaN included."""

import argparse
import math

import pytest

from engine import SamplingParams
from engine.core.errors import ConfigError, InvalidRequestError
from engine.core.interfaces import request
from engine.frontend.prompts import check_params as check_against_model
from engine.library.arguments import EngineArgs
from engine.sampling_params import wire_params


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("n", 0),
        ("max_tokens", 0),
        ("min_tokens", -1),
        ("temperature", math.nan),
        ("temperature", -1.0),
        ("temperature", math.inf),
        ("top_k", -2),
        ("top_p", 0.0),
        ("top_p", math.nan),
        ("min_p", 1.5),
        ("repetition_penalty", 0.0),
        ("presence_penalty", math.inf),
        ("frequency_penalty", math.nan),
        ("logit_bias", {1: math.nan}),
        ("seed", 2**63),
        ("logprobs", -1),
    ],
)
def test_invalid_sampling_values_are_refused_by_name(name, value):
    with pytest.raises(InvalidRequestError, match=name):
        wire_params(SamplingParams(**{name: value}))


def test_more_logprobs_than_the_maximum_are_refused():
    check_against_model(request.SamplingParams(logprobs=97), 97)
    with pytest.raises(InvalidRequestError, match="logprobs must be at most 97"):
        check_against_model(request.SamplingParams(logprobs=98), 97)


def test_default_parameters_and_banned_tokens_are_accepted():
    wire_params(SamplingParams(max_tokens=None, logit_bias={1: -math.inf}, seed=2**63 - 1))


def test_vllm_spellings_of_parameters_are_converted():
    given = SamplingParams(stop=["a", "b"], stop_token_ids=[3], logit_bias={1: 2}, top_k=-1)
    wire = wire_params(given)
    assert (wire.stop, wire.stop_token_ids, wire.top_k) == (("a", "b"), (3,), 0)
    assert type(wire) is request.SamplingParams and wire.logit_bias == {1: 2.0}
    assert wire_params(SamplingParams(stop="text")).stop == ("text",)
    assert wire_params(request.SamplingParams(stop="text")).stop == ("text",)
    scored = wire_params(SamplingParams(prompt_logprobs=3, logprobs=1))
    assert (scored.score_prompt, scored.num_prompt_logprobs, scored.logprobs) == (True, 3, 1)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("stop", [""]),
        ("max_tokens", "ten"),
        ("score_prompt", True),
        ("detokenize", False),
        ("bad_words", "word"),
        ("bad_words", [""]),
        ("samplers", ["top_k", "dry"]),
        ("samplers", ["top_z"]),
        ("mirostat", 3),
        ("dry_base", 0.5),
    ],
)
def test_unsupported_sampling_parameters_are_refused_by_name(name, value):
    with pytest.raises(InvalidRequestError, match=name):
        wire_params(SamplingParams(**{name: value}))


def test_engine_args_map_to_settings_or_are_refused():
    flags = EngineArgs.of(
        model="m", max_model_len=512, dtype="half", max_num_seqs=8, kv_cache_memory_bytes=2**24
    ).flags()
    assert flags == {
        "model.model_path": "m",
        "model.max_sequence_length": 512,
        "model.dtype": "float16",
        "performance.batch_size": 8,
        "performance.memory_pool_size_mb": 16,
    }
    assert EngineArgs.of(model="a/b", revision="v1").flags()["model.model_path"] == "hf:a/b@v1"
    two = EngineArgs.of(tensor_parallel_size=2, lora_modules=None).flags()
    assert two["performance.tensor_parallel_size"] == 2
    for name, value in (
        ("tokenizer", "other"),
        ("max_modle_len", 5),
        ("speculative_config", {}),
        ("load_format", "mistral"),
    ):
        with pytest.raises(ConfigError, match=name):
            EngineArgs.of(**{name: value}).flags()
    with pytest.warns(UserWarning, match="enforce_eager"):
        EngineArgs.of(enforce_eager=True).flags()


def test_engine_args_can_be_parsed_from_a_command_line():
    parser = EngineArgs.add_cli_args(argparse.ArgumentParser())
    parser.add_argument("--top-k", type=int)
    args = parser.parse_args(
        ["--model", "m", "--max-model-len", "64", "--no-enable-prefix-caching"]
    )
    made = EngineArgs.from_cli_args(args)
    assert made == EngineArgs(model="m", max_model_len=64, enable_prefix_caching=False)

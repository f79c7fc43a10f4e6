"""Converted models against their originals: Transformers' logits, greedy tokens, perplexity."""

from contextlib import closing
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.accuracy.ours import FLOAT, perplexity, running
from benchmarks.accuracy.text import read_text, windows
from engine.architectures.base import ModelConfig, RopeConfig
from engine.architectures.family import FLOATS
from engine.conversion.convert import convert
from engine.core.errors import ModelFormatError
from engine.core.text.tokenizer import Tokenizer
from engine.native.execution.build import build_runner
from engine.runtime.model_runner import RunnerConfig
from engine.weights.model import ModelSource, open_model
from tests.parity import tiny_models
from tests.parity.runner_driver import RunnerDriver
from tests.support.files import tokenizer_files

NAMES = (
    *("gpt2", "llama-biases", "llama-yarn", "mistral-window", "qwen2", "qwen3"),
    *("granite", "olmo2", "deepseek_v2", "deepseek_v3", "youtu"),
)
TOLERANCE = 1e-5
NUM_NEW = 24


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """Two threads crawl where other processes share the cores."""
    torch.set_num_threads(1)


@pytest.fixture
def vocabulary(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiny models with a row for each piece of the tests' tokenizer."""
    monkeypatch.setitem(tiny_models.COMMON, "vocab_size", 700)
    monkeypatch.setattr(tiny_models, "VOCAB", 700)


def said(config: ModelConfig) -> ModelConfig:
    """The config without what a GGUF file has as a tensor, and with numbers as float32."""

    def rounded(rope: RopeConfig | None) -> RopeConfig | None:
        if rope is None or rope.kind in ("llama3", "factors"):
            return rope and replace(RopeConfig(rope.theta, rope.dim))
        numbers = {
            field.name: float(np.float32(value))
            for field in fields(rope)
            if isinstance(value := getattr(rope, field.name), float)
        }
        factors = {
            name: tuple(float(np.float32(each)) for each in getattr(rope, name))
            for name in ("short_factors", "long_factors")
        }
        return replace(rope, **numbers, **factors)

    numbers = {
        name: None if (value := getattr(config, name)) is None else float(np.float32(value))
        for name in FLOATS
    }
    layers = tuple(replace(layer, rope=rounded(layer.rope)) for layer in config.layers)
    ids = {"bos_id": None, "eos_ids": ()}
    return replace(config, rope=rounded(config.rope), layers=layers, **numbers, **ids)


def greedy(source: ModelSource, tokens: list[int]) -> list[int]:
    runner = build_runner(
        source,
        RunnerConfig(
            device="cpu",
            dtype="float32",
            block_size=16,
            num_blocks=16,
            max_slots=2,
            max_seq_len=tiny_models.MAX_POSITION,
            num_threads=1,
        ),
    )
    driver = RunnerDriver(runner)
    return driver.generate([driver.add(tokens)], NUM_NEW)[0]


# What a GGUF file cannot say of some of the tiny models.
UNSAID = {
    "llama-dynamic": "'dynamic' rotary scaling",
    "ministral": "sliding_window",
    "qwen2-window": "sliding_window",
    "qwen3_moe-dense": "layers",
    "qwen3_next-dense": "layers",
    "glm4_moe-groups": "experts",
}


@pytest.mark.parametrize("name", [n for n in tiny_models.ALL if n not in UNSAID])
def test_a_gguf_converted_from_safetensors_has_identical_settings_and_weights(
    name: str, tmp_path: Path, vocabulary: None
) -> None:
    """The same settings and the same weights, bit for bit, whatever the file's layout."""
    _, path = tiny_models.save(name, tmp_path)
    tokenizer_files.write_directory(path)
    convert(path, tmp_path / "model.gguf", dtype="F32")
    with closing(open_model(path)) as ours, closing(open_model(tmp_path / "model.gguf")) as there:
        assert said(there.config) == said(ours.config)
        names = ours.weights.keys() | {name for name in there.weights if name == "rope.factors"}
        assert there.weights.keys() == names
        for name, weight in ours.weights.items():
            assert np.array_equal(weight.numpy(), there.weights[name].numpy()), name


@pytest.mark.parametrize("name", UNSAID)
def test_models_that_gguf_cannot_express_are_refused(
    name: str, tmp_path: Path, vocabulary: None
) -> None:
    _, path = tiny_models.save(name, tmp_path)
    tokenizer_files.write_directory(path)
    with pytest.raises(ModelFormatError, match=UNSAID[name]):
        convert(path, tmp_path / "model.gguf", dtype="F32")


@pytest.mark.parametrize("name", NAMES)
def test_a_model_converted_to_gguf_and_back_gives_the_same_logits_in_transformers(
    name: str, tmp_path: Path, vocabulary: None
) -> None:
    theirs, path = tiny_models.save(name, tmp_path)
    kind = "PreTrainedTokenizerFast"  # else the model's type decides how words are cut
    tokenizer_files.write_directory(path, eos_token="<|im_end|>", tokenizer_class=kind)
    convert(path, tmp_path / "model.gguf", dtype="F32")
    convert(tmp_path / "model.gguf", tmp_path / "back")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "back")
    assert type(again) is type(theirs)
    tokens = torch.tensor([tiny_models.text()])
    with torch.no_grad():
        expected, found = theirs(tokens).logits, again(tokens).logits
    torch.testing.assert_close(found, expected, atol=TOLERANCE, rtol=TOLERANCE)
    chat = [{"role": "user", "content": "The lazy dog's 1234"}]
    ours, back = (AutoTokenizer.from_pretrained(each) for each in (path, tmp_path / "back"))
    texts = [each.apply_chat_template(chat, tokenize=False) for each in (ours, back)]
    assert texts[0] == texts[1]
    assert ours(texts[0]).input_ids == back(texts[1]).input_ids
    ids = []
    for place in (path, tmp_path / "model.gguf", tmp_path / "back"):
        with closing(open_model(place)) as source:
            ids.append(greedy(source, tiny_models.text()))
    assert ids[0] == ids[1] == ids[2]


# What rounding costs, in parts of the perplexity of the file that was rounded. Its weights were
# rounded to four bits before, and those of a small model do not take that lightly.
@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "most"), [("Q8_0", 0.02), ("Q4_K", 0.08), ("Q4_0", 0.3)])
def test_quantizing_the_default_model_raises_perplexity_little(
    dtype: str, most: float, default_model: Path, tmp_path: Path
) -> None:
    convert(default_model, tmp_path / "model.gguf", dtype=dtype)
    found = {}
    for path in (default_model, tmp_path / "model.gguf"):
        with closing(open_model(path)) as source:
            ids = Tokenizer.from_gguf(source.metadata).encode(read_text())
            with running(source, FLOAT, threads=None) as runner:
                found[path] = perplexity(runner, FLOAT, windows(ids)[:4])
    cost = found[tmp_path / "model.gguf"] / found[default_model] - 1
    assert -0.01 < cost < most, cost

"""BERT against Transformers: tiny random weights layer by layer, then a real sentence encoder."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from transformers import AutoModel, AutoTokenizer, BertConfig, BertModel

from engine.backends.custom.frameworks.torch.execution import encoder as encoder_module
from engine.backends.custom.frameworks.torch.execution.build import build_encoder
from engine.backends.custom.frameworks.torch.execution.encoder import (
    TorchEncoder,
    groups,
)
from engine.backends.custom.frameworks.torch.models.loading import build_encoder_model
from engine.backends.custom.weights.model import open_model
from engine.core.store.pull import pull
from engine.core.text.tokenizer import Tokenizer
from tests.parity.test_tokenizers import TEXTS

CPU = torch.device("cpu")
VOCAB = 97
MAX_POSITION = 64
NUM_LAYERS = 3
LENGTHS = [1, 40, 3, 3, 17, 64, 2]


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """Two threads crawl where other processes share the cores."""
    torch.set_num_threads(1)


def texts(lengths: list[int] = LENGTHS, vocab: int = VOCAB) -> list[tuple[int, ...]]:
    generator = torch.Generator().manual_seed(len(lengths))
    draw = [torch.randint(0, vocab, (length,), generator=generator) for length in lengths]
    return [tuple(ids.tolist()) for ids in draw]


@pytest.fixture(scope="module", params=["gelu", "gelu_new"])
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Their model, and the folder where it lies; norms and biases are random as well."""
    torch.manual_seed(3)
    config = BertConfig(
        vocab_size=VOCAB,
        hidden_size=48,
        num_hidden_layers=NUM_LAYERS,
        num_attention_heads=4,
        intermediate_size=80,
        max_position_embeddings=MAX_POSITION,
        hidden_act=request.param,
        initializer_range=0.2,
    )
    model = BertModel(config).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.3)
    path = tmp_path_factory.mktemp("bert") / "model"
    model.save_pretrained(path)
    return model, path


def their_states(model: Any, ids: tuple[int, ...]) -> tuple[torch.Tensor, ...]:
    """After the tables and after each layer, (T, D) each; of the text alone, without padding."""
    with torch.no_grad():
        output = model(torch.tensor([ids]), output_hidden_states=True)
    return tuple(state[0] for state in output.hidden_states)


def test_every_layer_equals_hugging_face(tiny: Any) -> None:
    theirs, path = tiny
    source = open_model(path)
    model = build_encoder_model(source.config, source.weights, CPU, torch.float32)
    states: list[torch.Tensor] = []
    for module in (model.embed_norm, *model.layers):
        module.register_forward_hook(lambda module, args, output: states.append(output))
    prompts = texts()
    encoder = TorchEncoder(model, CPU)
    encoder.encode(prompts)
    assert len(states) == NUM_LAYERS + 1
    order = sorted(range(len(prompts)), key=lambda row: len(prompts[row]))
    expected = [their_states(theirs, prompts[row]) for row in order]
    for layer, ours in enumerate(states):
        wanted = torch.cat([each[layer] for each in expected])
        torch.testing.assert_close(ours, wanted, atol=1e-4, rtol=0)


@pytest.mark.parametrize("normalizes", [True, False])
@pytest.mark.parametrize("pooling", ["mean", "cls", "last"])
def test_pooling(tiny: Any, pooling: str, normalizes: bool) -> None:
    theirs, path = tiny
    source = open_model(path)
    assert source.config.encoder is not None
    told = replace(source.config.encoder, pooling=pooling, normalizes=normalizes)
    source = replace(source, config=replace(source.config, encoder=told))
    ours = build_encoder(source, "cpu", "float32").encode(texts())
    for ids, vector in zip(texts(), ours, strict=True):
        last = their_states(theirs, ids)[-1]
        expected = {"mean": last.mean(0), "cls": last[0], "last": last[-1]}[pooling]
        if normalizes:
            expected = expected / expected.norm()
        np.testing.assert_allclose(vector, expected.numpy(), atol=1e-4)


def test_a_row_does_not_depend_on_its_neighbours(
    tiny: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, path = tiny
    encoder = build_encoder(open_model(path), "cpu", "float32")
    prompts = texts([5, 60, 1, 33, 33, 2, 64, 7] * 3)
    together = encoder.encode(prompts)
    alone = np.concatenate([encoder.encode([prompt]) for prompt in prompts])
    np.testing.assert_allclose(together, alone, atol=1e-5, rtol=0)
    shuffled = np.random.default_rng(0).permutation(len(prompts))
    monkeypatch.setattr(encoder_module, "GROUP_TOKENS", 100)
    mixed = encoder.encode([prompts[row] for row in shuffled])
    np.testing.assert_allclose(mixed, together[shuffled], atol=1e-5, rtol=0)


def test_groups_bound_padding_and_lose_nobody() -> None:
    lengths = [9, 1, 400, 30, 30, 2, 31, 1]
    made = list(groups(lengths, max_tokens=100))
    assert sorted(row for group in made for row in group) == list(range(len(lengths)))
    for group in made:
        assert len(group) == 1 or len(group) * max(lengths[row] for row in group) <= 100
    assert len(made) == 3


@pytest.fixture(scope="module")
def minilm() -> Path:
    """The catalogue's sentence encoder; fetched on first use, as `engine pull` does."""
    return pull("all-minilm-l6-v2")


@pytest.fixture(scope="module")
def tokenizers(minilm: Path) -> tuple[Tokenizer, Any]:
    return Tokenizer.from_directory(minilm), AutoTokenizer.from_pretrained(minilm)


def test_real_vectors_equal_those_of_hugging_face(minilm: Path, tokenizers: Any) -> None:
    """What sentence-transformers does: the mean of the tokens, at unit length."""
    ours, theirs = tokenizers
    model = AutoModel.from_pretrained(minilm).eval()
    source = open_model(minilm)
    encoder = build_encoder(source, "cpu", "float32")
    assert encoder.spec.max_seq_len == 256
    sentences = [text for text in TEXTS[::12] if text] + ["A longer text, twice. " * 40]
    vectors = encoder.encode([tuple(ours.encode_prompt(text)) for text in sentences])
    assert vectors.shape == (len(sentences), 384)
    for text, vector in zip(sentences, vectors, strict=True):
        ids = torch.tensor([theirs(text)["input_ids"]])
        with torch.no_grad():
            mean = model(ids).last_hidden_state[0].mean(0)
        np.testing.assert_allclose(vector, (mean / mean.norm()).numpy(), atol=1e-4)


def test_word_pieces_equal_those_of_hugging_face(tokenizers: Any) -> None:
    ours, theirs = tokenizers
    for text in TEXTS:
        assert ours.encode_prompt(text) == theirs(text)["input_ids"], text


def test_word_pieces_of_any_unicode(tokenizers: Any) -> None:
    ours, theirs = tokenizers

    @settings(max_examples=300, deadline=None)
    @given(st.text(max_size=60))
    @example("[CLS] a [SEP] [MASK] [PAD] [UNK]")
    @example("a" * 101)
    def check(text: str) -> None:
        # Ours never makes a control token of a client's text, so neither may the reference.
        expected = theirs(text, split_special_tokens=True)["input_ids"]
        assert ours.encode_prompt(text) == expected

    check()


def test_control_tokens_in_a_text_are_text(tokenizers: Any) -> None:
    ours, _ = tokenizers
    ids = ours.encode_prompt("[CLS] hello [SEP]")
    assert (ids[0], ids[-1]) == (101, 102) and not {101, 102} & set(ids[1:-1])
    assert ours.decode(ids) == "[ cls ] hello [ sep ]"

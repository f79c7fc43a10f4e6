"""Models that embed and rank texts, with their tokenizers and files, against Transformers: a real
sentence encoder, cross-encoders, and decoders that were trained for embeddings or to rank.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import processors

from engine.backends.custom.frameworks import NativeBackend
from engine.core.errors import InvalidRequestError, ModelFormatError
from engine.core.interfaces.backend import EmbedRequest, TextPair
from engine.core.store.pull import pull
from engine.core.text.tokenizer import Tokenizer
from engine.frontend.text_model import load_text
from engine.ipc.options import EngineOptions
from engine.weights.model import open_model
from tests.parity.models.test_encoders import FRAMEWORKS, ONE, one_thread, opened, saved
from tests.parity.text.test_tokenizers import TEXTS
from tests.support.files.tokenizer_files import byte_level_engine

__all__ = ["one_thread"]  # a fixture that every test here uses


@pytest.fixture(scope="module")
def minilm() -> Path:
    """The catalogue's sentence encoder; fetched on first use, as `engine pull` does."""
    return pull("all-minilm-l6-v2")


@pytest.fixture(scope="module")
def tokenizers(minilm: Path) -> tuple[Tokenizer, Any]:
    return Tokenizer.from_directory(minilm), hf.AutoTokenizer.from_pretrained(minilm)


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_minilm_embeddings_equal_hugging_face(
    minilm: Path, tokenizers: Any, framework: str
) -> None:
    """What sentence-transformers does: the mean of the tokens, at unit length."""
    ours, theirs = tokenizers
    model = hf.AutoModel.from_pretrained(minilm).eval()
    source = open_model(minilm)
    encoder = opened(framework, source)
    assert encoder.spec.max_seq_len == 256
    sentences = [text for text in TEXTS[::12] if text] + ["A longer text, twice. " * 40]
    vectors = encoder.encode([tuple(ours.encode_prompt(text)) for text in sentences])
    assert vectors.shape == (len(sentences), 384)
    for text, vector in zip(sentences, vectors, strict=True):
        ids = torch.tensor([theirs(text)["input_ids"]])
        with torch.no_grad():
            mean = model(ids).last_hidden_state[0].mean(0)
        np.testing.assert_allclose(vector, (mean / mean.norm()).numpy(), atol=1e-4)


def test_word_piece_tokenization_equals_hugging_face(tokenizers: Any) -> None:
    ours, theirs = tokenizers
    for text in TEXTS:
        assert ours.encode_prompt(text) == theirs(text)["input_ids"], text


def test_word_piece_tokenization_of_random_unicode_equals_hugging_face(tokenizers: Any) -> None:
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


def test_control_tokens_in_encoder_inputs_are_text(tokenizers: Any) -> None:
    ours, _ = tokenizers
    ids = ours.encode_prompt("[CLS] hello [SEP]")
    assert (ids[0], ids[-1]) == (101, 102) and not {101, 102} & set(ids[1:-1])
    assert ours.decode(ids) == "[ cls ] hello [ sep ]"


def test_text_pairs_are_encoded_like_hugging_face(tokenizers: Any) -> None:
    ours, theirs = tokenizers
    for first, second in zip(TEXTS[::9], TEXTS[5::9], strict=False):
        expected = theirs(first, second, split_special_tokens=True)
        ids, start = ours.encode_pair(first, second)
        assert ids == expected["input_ids"]
        types = [int(index >= start) for index in range(len(ids))]
        assert types == expected["token_type_ids"]
    ids, start = ours.encode_pair("a cat", "a dog and a bird", max_tokens=8)
    assert len(ids) == 8 and ours.decode(ids[start:]) == "a dog and"


@pytest.fixture(scope="module")
def cross_encoder(minilm: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """A tiny cross-encoder with the tokenizer of the sentence encoder."""
    path = tmp_path_factory.mktemp("cross") / "model"
    sizes = {**ONE, "vocab_size": 30522, "max_position_embeddings": 64}
    model = saved(lambda: hf.BertForSequenceClassification(hf.BertConfig(**sizes)), path)
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "vocab.txt"):
        if (minilm / name).exists():
            shutil.copy(minilm / name, path)
    return model, path


async def test_a_cross_encoder_scores_pairs_of_texts(cross_encoder: Any, tokenizers: Any) -> None:
    model, path = cross_encoder
    backend = NativeBackend(str(path))
    await backend.start()
    try:
        (card,) = backend.models()
        assert card.capabilities == ("rerank", "score") and card.num_dimensions is None
        pairs = (TextPair("a cat", "the kitten"), TextPair("a cat", "stocks fell on Monday"))
        made = await backend.embed(EmbedRequest(request_id="r", inputs=pairs))
        expected = []
        for pair in pairs:
            inputs = tokenizers[1](pair.first, pair.second, return_tensors="pt")
            with torch.no_grad():
                expected.append(model(**inputs).logits.sigmoid().item())
        np.testing.assert_allclose(made.vectors[:, 0], expected, atol=1e-4)
        long = TextPair("a cat", "word " * 100)
        with pytest.raises(InvalidRequestError, match=r"input\[1\] has 105 tokens"):
            await backend.embed(EmbedRequest(request_id="s", inputs=(pairs[0], long)))
        cut = EmbedRequest(request_id="t", inputs=(long,), truncate_prompt_tokens=-1)
        assert (await backend.embed(cut)).prompt_tokens == 64
    finally:
        await backend.stop()


def qwen3(path: Path, tied: bool) -> tuple[Any, Any]:
    """A tiny Qwen3, and a tokenizer that ends each text with another token than an answer, as that
    of Qwen3-Embedding.
    """
    engine = byte_level_engine()
    engine.add_tokens(["yes", "no", "<think>", "</think>"])
    engine.post_processor = processors.TemplateProcessing(
        single="$A <|endoftext|>", special_tokens=[("<|endoftext|>", 0)]
    )
    theirs = hf.PreTrainedTokenizerFast(
        tokenizer_object=engine,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=["<|im_start|>"],
    )
    theirs.save_pretrained(path)
    config = hf.Qwen3Config(
        vocab_size=len(theirs),
        hidden_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        intermediate_size=80,
        max_position_embeddings=512,
        initializer_range=0.2,
        tie_word_embeddings=tied,
    )
    return saved(lambda: hf.Qwen3ForCausalLM(config), path), theirs


async def started(path: Path) -> NativeBackend:
    backend = NativeBackend(
        str(path), options=EngineOptions(model_path=str(path), framework="native", dtype="float32")
    )
    await backend.start()
    return backend


SENTENCE = {
    "modules.json": [
        {"idx": 0, "path": "", "type": "sentence_transformers.models.Transformer"},
        {"idx": 1, "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
        {"idx": 2, "path": "2_Normalize", "type": "sentence_transformers.models.Normalize"},
    ],
    "1_Pooling/config.json": {"word_embedding_dimension": 48, "pooling_mode_lasttoken": True},
    "config_sentence_transformers.json": {
        "prompts": {"query": "Instruct: find it\nQuery:", "document": ""},
        "default_prompt_name": None,
    },
}


def write_all(path: Path, files: dict[str, Any]) -> None:
    for name, content in files.items():
        (path / name).parent.mkdir(exist_ok=True)
        (path / name).write_text(json.dumps(content))


async def test_a_decoder_embedding_model_is_served(tmp_path: Path) -> None:
    model, tokenizer = qwen3(tmp_path, tied=True)
    write_all(tmp_path, SENTENCE)
    backend = await started(tmp_path)
    try:
        (card,) = backend.models()
        assert card.capabilities == ("embeddings", "score") and not card.emulated
        assert card.prompt_names == ("document", "query")
        text = "the lazy dog"
        request = EmbedRequest(request_id="e", inputs=(text,) * 3, prompt_names=(None, "query", ""))
        made = await backend.embed(request)
        for vector, prompt in zip(made.vectors, ("", "Instruct: find it\nQuery:", ""), strict=True):
            ids = tokenizer(prompt + text, return_tensors="pt")["input_ids"]
            assert ids[0, -1] == 0  # <|endoftext|>
            with torch.no_grad():
                state = model.model(ids).last_hidden_state[0, -1]
            np.testing.assert_allclose(vector, (state / state.norm()).numpy(), atol=1e-4)
        cut = EmbedRequest(request_id="f", inputs=(text,), truncate_prompt_tokens=3)
        assert (await backend.embed(cut)).prompt_tokens == 3
    finally:
        await backend.stop()


@pytest.mark.parametrize("tied", [True, False])
async def test_a_decoder_reranker_scores_with_the_probability_of_yes(
    tmp_path: Path, tied: bool
) -> None:
    """As the model card of Qwen3-Reranker computes the probability of "yes"."""
    path = tmp_path / "Tiny-Qwen3-Reranker"
    model, tokenizer = qwen3(path, tied)
    yes, no = (tokenizer.convert_tokens_to_ids(each) for each in ("yes", "no"))
    if not tied:  # a file may state the tokens
        steps = [SENTENCE["modules.json"][0], {"path": "1_LogitScore", "type": "x.LogitScore"}]
        ids = {"true_token_id": yes, "false_token_id": no}
        write_all(path, {"modules.json": steps, "1_LogitScore/config.json": ids})
    before = (
        "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query "
        'and the Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n'
        "<|im_start|>user\n"
    )
    asked = (
        "<Instruct>: Given a web search query, retrieve relevant passages that answer the query\n"
        "<Query>: {}\n<Document>: {}"
    )
    after = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    backend = await started(path)
    try:
        (card,) = backend.models()
        assert card.capabilities == ("rerank", "score")
        pairs = (TextPair("a fox", "the quick brown fox"), TextPair("a fox", "50% of $19.99"))
        made = await backend.embed(EmbedRequest(request_id="r", inputs=pairs))
        for pair, (score,) in zip(pairs, made.vectors, strict=True):
            parts = (before, asked.format(pair.first, pair.second), after)
            ids = [tokenizer.encode(part, add_special_tokens=False) for part in parts]
            with torch.no_grad():
                logits = model(torch.tensor([sum(ids, [])])).logits[0, -1]
            assert score == pytest.approx(logits[[yes, no]].softmax(0)[0].item(), abs=1e-4)
        assert len({float(score) for (score,) in made.vectors}) == 2
    finally:
        await backend.stop()


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"1_Pooling/config.json": {"pooling_mode_mean_tokens": True}}, "'mean' is not supported"),
        ({"config_sentence_transformers.json": {"prompts": {"query": 3}}}, "'prompts'"),
        (
            {"config_sentence_transformers.json": {"default_prompt_name": "query"}},
            "no prompt 'query'",
        ),
        (
            {"modules.json": [*SENTENCE["modules.json"], {"path": "3", "type": "st.Dense"}]},
            "Dense are not supported",
        ),
    ],
)
def test_unsupported_pooling_files_of_decoders_are_refused(
    tmp_path: Path, files: dict[str, Any], message: str
) -> None:
    qwen3(tmp_path, tied=True)
    write_all(tmp_path, SENTENCE | files)
    with pytest.raises(ModelFormatError, match=message):
        load_text(tmp_path)

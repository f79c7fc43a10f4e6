"""Text encoders against Transformers: tiny random weights of each family on each framework."""

import json
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf

from engine.core.errors import ModelFormatError, ResourceError
from engine.core.memory import MemoryLimit, MemoryRoom
from engine.core.registry.model_registry import architecture
from engine.ipc.options import EngineOptions
from engine.ir.execute import ReferenceBatch, State, run_graph, run_plan
from engine.ir.models.encoder import build_encoder_graph
from engine.ir.plan import Capacity, Machine
from engine.ir.planner import plan
from engine.ir.rotary import rotary_tables
from engine.torch.execution import encoder as encoder_module
from engine.torch.execution.encoder import (
    TorchEncoder,
    groups,
)
from engine.torch.models.loading import build_encoder_model
from engine.weights.model import ModelSource, open_model
from engine.worker import memory
from engine.worker.encoder_loop import Encoder
from engine.worker.loading import load_encoder
from tests.support.files.gguf_files import write_gguf

CPU = torch.device("cpu")
VOCAB = 97
MAX_POSITION = 320
NUM_LAYERS = 3
# Attention kernels work in chunks of 256 positions, so one text is longer.
LENGTHS = [1, 40, 3, 3, 17, 290, 2]
FRAMEWORKS = ("native", "torch")
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 4,
    "intermediate_size": 80,
    "max_position_embeddings": MAX_POSITION,
    "initializer_range": 0.2,
}
# ModernBERT's tokens; its layer 0 is global, the others have a window.
MARKS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1}
MODERN = {**MARKS, "sep_token_id": 2, "local_attention": 14, "initializer_cutoff_factor": 3.0}
ENCODERS = {
    "bert": lambda: hf.BertModel(hf.BertConfig(**SIZES)),
    "bert_tanh": lambda: hf.BertModel(hf.BertConfig(**SIZES, hidden_act="gelu_new")),
    "roberta": lambda: hf.RobertaModel(hf.RobertaConfig(**SIZES, type_vocab_size=1)),
    "xlm_roberta": lambda: hf.XLMRobertaModel(hf.XLMRobertaConfig(**SIZES, type_vocab_size=1)),
    "nomic_bert": lambda: hf.NomicBertModel(hf.NomicBertConfig(**SIZES)),
    "modernbert": lambda: hf.ModernBertModel(hf.ModernBertConfig(**SIZES, **MODERN)),
}
ONE: dict[str, Any] = {**SIZES, "num_labels": 1}
CROSS_ENCODERS = {
    "bert": lambda: hf.BertForSequenceClassification(hf.BertConfig(**ONE)),
    "xlm_roberta": lambda: hf.XLMRobertaForSequenceClassification(hf.XLMRobertaConfig(**ONE)),
    "modernbert": lambda: hf.ModernBertForSequenceClassification(
        hf.ModernBertConfig(**ONE, **MODERN, classifier_bias=True)
    ),
    "modernbert_mean": lambda: hf.ModernBertForSequenceClassification(
        hf.ModernBertConfig(**ONE, **MODERN, classifier_pooling="mean")
    ),
}


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """Two threads crawl where other processes share the cores."""
    torch.set_num_threads(1)


def texts(lengths: list[int] = LENGTHS, vocab: int = VOCAB) -> list[tuple[int, ...]]:
    generator = torch.Generator().manual_seed(len(lengths))
    # RoBERTa counts no position for its padding token 1.
    draw = [torch.randint(3, vocab, (length,), generator=generator) for length in lengths]
    return [tuple(ids.tolist()) for ids in draw]


def saved(make: Any, path: Path) -> Any:
    """A model with random norms and biases, stored in `path`."""
    torch.manual_seed(3)
    model = make().float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.3)
    model.save_pretrained(path)
    return model


@pytest.fixture(scope="module", params=ENCODERS)
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Their model, and the folder where it lies."""
    path = tmp_path_factory.mktemp(request.param) / "model"
    return saved(ENCODERS[request.param], path), path


def opened(framework: str, source: ModelSource) -> Encoder:
    build = import_module(f"engine.{framework}.execution.build")
    options = EngineOptions(model_path=str(source.path), framework=framework, threads=1)
    encoder: Encoder = build.build_encoder(source, options, build.find_device("cpu", "float32"))
    return encoder


def pooled(source: ModelSource, **settings: Any) -> ModelSource:
    assert source.config.encoder is not None
    told = replace(source.config.encoder, **settings)
    return replace(source, config=replace(source.config, encoder=told))


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
    after = (model.embed_norm, *model.layers[:-1], model.norm or model.layers[-1])
    for module in after:
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


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_vectors_equal_hugging_face(tiny: Any, framework: str) -> None:
    theirs, path = tiny
    source = open_model(path)
    last = [their_states(theirs, ids)[-1] for ids in texts()]
    for pooling, pool in (("mean", lambda x: x.mean(0)), ("cls", lambda x: x[0])):
        ours = opened(framework, pooled(source, pooling=pooling)).encode(texts())
        expected = torch.stack([pool(each) / pool(each).norm() for each in last])
        np.testing.assert_allclose(ours, expected.numpy(), atol=1e-4)


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_last_token_pooling_without_normalization_equals_hugging_face(
    tmp_path: Path, framework: str
) -> None:
    theirs = saved(ENCODERS["bert"], tmp_path)
    source = pooled(open_model(tmp_path), pooling="last", normalizes=False)
    for ids, vector in zip(texts(), opened(framework, source).encode(texts()), strict=True):
        np.testing.assert_allclose(vector, their_states(theirs, ids)[-1][-1].numpy(), atol=1e-4)


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("name", CROSS_ENCODERS)
def test_scores_equal_hugging_face(tmp_path: Path, name: str, framework: str) -> None:
    """The tokens of a pair's second text have type 1, if the model has token types."""
    theirs = saved(CROSS_ENCODERS[name], tmp_path)
    prompts, starts = texts(), [0, 20, 1, 2, 8, 100, 1]
    source = open_model(tmp_path)
    ours = opened(framework, source).encode(prompts, starts)
    has_types = theirs.config.model_type in ("bert", "xlm-roberta")
    expected = []
    for ids, start in zip(prompts, starts, strict=True):
        types = torch.tensor([[int(0 < start <= place) for place in range(len(ids))]])
        with torch.no_grad():
            more = {"token_type_ids": types} if has_types else {}
            expected.append(theirs(torch.tensor([ids]), **more).logits[0])
    assert np.std(expected) > 0.1
    np.testing.assert_allclose(ours, torch.stack(expected).sigmoid().numpy(), atol=1e-4)
    # A file may ask for plain logits, as sentence-transformers reads it.
    stated = json.loads((tmp_path / "config.json").read_text())
    stated["sentence_transformers"] = {"activation_fn": "torch.nn.modules.linear.Identity"}
    (tmp_path / "config.json").write_text(json.dumps(stated))
    if framework == "native":
        plain = opened(framework, open_model(tmp_path)).encode(prompts, starts)
        np.testing.assert_allclose(plain, torch.stack(expected).numpy(), atol=1e-4)


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_text_embedding_does_not_depend_on_the_other_texts_of_its_batch(
    tiny: Any, framework: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the native kernels, it does not change by a bit."""
    _, path = tiny
    encoder = opened(framework, open_model(path))
    prompts = texts([5, 60, 1, 33, 33, 2, 270, 7] * 3)
    exact = {"atol": 0 if framework == "native" else 1e-5, "rtol": 0}
    together = encoder.encode(prompts)
    alone = np.concatenate([encoder.encode([prompt]) for prompt in prompts])
    np.testing.assert_allclose(together, alone, **exact)
    shuffled = np.random.default_rng(0).permutation(len(prompts))
    monkeypatch.setattr(encoder_module, "GROUP_TOKENS", 100)
    mixed = encoder.encode([prompts[row] for row in shuffled])
    np.testing.assert_allclose(mixed, together[shuffled], **exact)


def test_nan_in_one_text_does_not_affect_later_texts(tmp_path: Path) -> None:
    """Its keys and values must not stay in the blocks that the next texts use."""
    model = saved(ENCODERS["bert"], tmp_path)
    with torch.no_grad():
        model.embeddings.word_embeddings.weight[5] = torch.nan
    model.save_pretrained(tmp_path)
    encoder = opened("native", open_model(tmp_path, reads_weights=False))
    clean = [tuple(6 if token == 5 else token for token in each) for each in texts([40, 3, 17])]
    expected = encoder.encode(clean)
    assert np.isfinite(expected).all()
    poisoned = encoder.encode([clean[0][:20] + (5,) * 20, clean[1]])
    assert not np.isfinite(poisoned[0]).any()
    np.testing.assert_array_equal(poisoned[1], expected[1])
    np.testing.assert_array_equal(encoder.encode(clean[1:]), expected[1:])


def test_the_encoders_plan_equals_its_graph(tiny: Any) -> None:
    _, path = tiny
    source = open_model(path)
    config = source.config
    graph = build_encoder_graph(config)
    lengths = [5, 21, 16]
    total, rows = sum(lengths), np.repeat(np.arange(3), lengths)
    positions = np.concatenate([np.arange(length) for length in lengths]).astype(np.int32)
    batch = ReferenceBatch(
        token_ids=np.concatenate(texts(lengths)).astype(np.int32),
        positions=positions,
        write_slots=rows * 32 + positions,
        row_of=rows.astype(np.int32),
        tables=np.arange(6, dtype=np.int32).reshape(3, 2),
        logit_tokens=np.cumsum(lengths).astype(np.int32) - 1,
        visible_end=np.array(lengths, np.int32)[rows],
        token_types=(positions > 3).astype(np.int32) % max(1, config.encoder.num_token_types),
    )
    rotations = tuple(rotary_tables(rope, MAX_POSITION) for rope in config.ropes)
    weights = {name: weight.numpy() for name, weight in source.weights.items()}

    def state() -> State:
        cache = np.full((6, 16, 2, config.num_kv_heads, config.head_dim), np.nan, np.float32)
        return State((cache,), rotations)

    whole = run_graph(graph, weights, batch, state())
    planned = run_plan(plan(graph, Capacity(total, 3), Machine(1)), weights, batch, state())
    np.testing.assert_allclose(planned, whole, atol=2e-5)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("bert", {"position_embedding_type": "relative_key"}, "position_embedding_type"),
        ("bert", {"is_decoder": True}, "is_decoder"),
        ("bert", {"hidden_act": "mish"}, "hidden_act"),
        ("xlm_roberta", {"pad_token_id": 400}, "pad_token_id"),
        ("nomic_bert", {"prenorm": True}, "prenorm"),
        ("nomic_bert", {"rotary_emb_interleaved": True}, "rotary_emb_interleaved"),
        ("nomic_bert", {"moe_every_n_layers": 2}, "moe_every_n_layers"),
        ("modernbert", {"norm_bias": True}, "norm_bias"),
        ("modernbert", {"local_attention": "wide"}, "local_attention"),
        ("modernbert", {"local_attention": -4}, "sliding_window"),
        ("modernbert", {"layer_types": ["full_attention"]}, "layer_types"),
        ("cross", {"id2label": {"0": "no", "1": "yes"}}, "id2label"),
        ("cross", {"classifier_pooling": "max"}, "classifier_pooling"),
        ("cross", {"sentence_transformers": {"activation_fn": "os.system"}}, "activation_fn"),
    ],
)
def test_unsupported_encoder_settings_are_refused(
    tmp_path: Path, name: str, change: dict[str, Any], message: str
) -> None:
    saved(CROSS_ENCODERS["modernbert"] if name == "cross" else ENCODERS[name], tmp_path)
    stated = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(stated | change))
    with pytest.raises(ModelFormatError, match=message):
        open_model(tmp_path)


def test_hub_spellings_of_nomic_bert_and_modernbert_are_read(tmp_path: Path) -> None:
    """Files on the hub are older than the models in Transformers and have other keys."""
    saved(ENCODERS["nomic_bert"], tmp_path / "nomic")
    hub = {
        "architectures": ["NomicBertModel"],
        "activation_function": "swiglu",
        "layer_norm_epsilon": 1e-12,
        "n_embd": 48,
        "n_head": 4,
        "n_inner": 80,
        "n_layer": NUM_LAYERS,
        "n_positions": MAX_POSITION,
        "rotary_emb_base": 1000,
        "rotary_emb_fraction": 1.0,
        "rotary_emb_interleaved": False,
        "rotary_emb_scale_base": None,
        "qkv_proj_bias": False,
        "mlp_fc1_bias": False,
        "prenorm": False,
        "type_vocab_size": 2,
        "vocab_size": VOCAB,
    }
    expected = open_model(tmp_path / "nomic").config
    (tmp_path / "nomic" / "config.json").write_text(json.dumps(hub))
    assert open_model(tmp_path / "nomic").config == expected
    longer = {"rotary_scaling_factor": 2, "max_trained_positions": 64}
    (tmp_path / "nomic" / "config.json").write_text(json.dumps(hub | longer))
    short = open_model(tmp_path / "nomic").config.encoder
    assert short is not None and short.max_tokens == 64

    saved(ENCODERS["modernbert"], tmp_path / "modern")
    expected = open_model(tmp_path / "modern").config
    stated = json.loads((tmp_path / "modern" / "config.json").read_text())
    for key in ("layer_types", "rope_parameters"):
        del stated[key]
    stated |= {"global_attn_every_n_layers": 3, "global_rope_theta": 160000.0}
    (tmp_path / "modern" / "config.json").write_text(json.dumps(stated))
    assert open_model(tmp_path / "modern").config == expected


@pytest.mark.parametrize("name", ["bert", "nomic_bert"])
def test_a_gguf_encoder_equals_its_safetensors_original(tmp_path: Path, name: str) -> None:
    saved(ENCODERS[name], tmp_path / "hf")
    source = open_model(tmp_path / "hf")
    family, parts = architecture(source.config.family), {}
    for spec in family.tensors(source.config):
        parts.setdefault(spec.gguf, []).append(source.weights[spec.name].numpy())
    stored = {name: np.concatenate(each) for name, each in parts.items()}
    prefix = family.gguf_names[0]
    extra = {f"{prefix}.pooling_type": 2, "tokenizer.ggml.token_type_count": 2}
    write_gguf(tmp_path / "m.gguf", source.config, stored, extra)
    found = open_model(tmp_path / "m.gguf")
    rounded = replace(found.config, norm_eps=source.config.norm_eps)  # GGUF has float32
    assert rounded == pooled(source, pooling="cls").config
    ours = opened("native", found).encode(texts())
    np.testing.assert_array_equal(
        ours, opened("native", pooled(source, pooling="cls")).encode(texts())
    )
    for change in ({f"{prefix}.pooling_type": 4}, {f"{prefix}.expert_count": 8}):
        write_gguf(tmp_path / "other.gguf", source.config, stored, extra | change)
        with pytest.raises(ModelFormatError, match=next(iter(change))):
            open_model(tmp_path / "other.gguf")


def test_padding_groups_contain_every_text_and_stay_within_max_tokens() -> None:
    lengths = [9, 1, 400, 30, 30, 2, 31, 1]
    made = list(groups(lengths, max_tokens=100))
    assert sorted(row for group in made for row in group) == list(range(len(lengths)))
    for group in made:
        assert len(group) == 1 or len(group) * max(lengths[row] for row in group) <= 100
    assert len(made) == 3


@pytest.mark.parametrize("framework", ["native", "torch"])
def test_an_encoder_is_refused_before_loading_if_it_does_not_fit(
    tiny: Any, framework: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = open_model(tiny[1])
    options = EngineOptions(
        model_path=str(source.path), framework=framework, device="cpu", threads=1
    ).planned("cpu", 2**30, 1)
    assert load_encoder(source, options)[0].spec.max_seq_len > 0
    limit = MemoryLimit(2**27, 2**26, "the cgroup")
    room = MemoryRoom(2**27, 2**26, is_limited=True, tightest=limit)
    monkeypatch.setattr(memory, "memory_room", lambda: room)
    with pytest.raises(ResourceError, match="the cgroup allows 128 MiB"):
        load_encoder(source, options)

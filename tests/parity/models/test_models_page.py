"""Writes docs/models.md from the parity tests: which family is proven on which framework.

    python -m tests.parity.models.test_models_page

A mark in the table means that the tests run a tiny random model of the family. The tests decide
what is in the table, so a family cannot stay there when its test is gone.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from engine.architectures.family import Family
from engine.core.registry.model_registry import architecture, architecture_names
from tests.parity.jax import test_jax_models, test_jax_paged
from tests.parity.models import test_architecture_names, test_convert, test_encoders
from tests.parity.native import test_native_loop, test_native_models
from tests.parity.tiny_models import ALL
from tests.parity.tinygrad import test_tinygrad_models, test_tinygrad_paged
from tests.parity.torch import test_torch_loop, test_torch_models

PAGE = Path(__file__).parents[3] / "docs" / "models.md"

ENCODERS = {"bert", "roberta", "modernbert", "nomic_bert"}
# What people call the models of a family.
MODELS = {
    "llama": "Llama 1 to 3, Mistral, Mistral Nemo and Small, Ministral 8B, Mixtral, Falcon 3, "
    "SmolLM 1 and 2, SmolVLM, Idefics3, InternLM 3, Yi and others with Llama's architecture",
    "gpt2": "GPT-2, DistilGPT-2",
    "qwen2": "Qwen1.5, Qwen2, Qwen2.5, Qwen2.5-VL, QwQ",
    "qwen3": "Qwen3, dense models",
    "granite": "Granite 3, dense models",
    "minicpm": "MiniCPM 1, 2 and 4 without sparse attention",
    "smollm3": "SmolLM3",
    "olmo2": "OLMo 2 and 3",
    "exaone": "EXAONE 3 and 3.5",
    "exaone4": "EXAONE 4",
    "internlm2": "InternLM 2 and 2.5",
    "seed_oss": "Seed-OSS",
    "ernie4_5": "ERNIE 4.5, dense models",
    "gemma": "Gemma 1, CodeGemma",
    "gemma2": "Gemma 2",
    "gemma3": "Gemma 3",
    "phi3": "Phi-3, Phi-3.5, Phi-4, Phi-4-mini",
    "glm": "GLM-4 9B",
    "glm4": "GLM-4-0414, GLM-Z1",
    "cohere": "Command-R, Aya",
    "cohere2": "Command-R7B, Command-A",
    "starcoder2": "StarCoder2",
    "stablelm": "StableLM 3B and 2, except 12B",
    "nemotron": "Nemotron 4, Minitron",
    "gpt_neox": "GPT-NeoX, Pythia, Dolly",
    "mpt": "MPT",
    "qwen2_moe": "Qwen1.5-MoE, Qwen2-57B-A14B",
    "qwen3_moe": "Qwen3-30B-A3B, Qwen3-235B-A22B, Qwen3-Coder",
    "olmoe": "OLMoE",
    "granitemoe": "Granite 3 MoE",
    "glm4_moe": "GLM-4.5, GLM-4.5-Air, GLM-4.6",
    "gpt_oss": "gpt-oss-20b and 120b",
    "deepseek": "DeepSeek-V2, V2-Lite, V2.5, V3, V3.1, R1 and Coder-V2, Kimi K2, GLM-4.7-Flash, "
    "Youtu-LLM",
    "lfm2": "LFM2, dense models",
    "granitemoehybrid": "Granite 4",
    "nemotron_h": "Nemotron-H, Nemotron Nano 2; without experts",
    "qwen3_next": "Qwen3-Next",
}

TEXT = """# Models

<!-- Written by `python -m tests.parity.models.test_models_page`; do not edit it here. -->

These families run on the engine's own frameworks, from a Hugging Face folder (`config.json` and
safetensors) or from a GGUF file. Every other architecture is refused by its name, with the backend
that would run it (`--backend transformers`, `--backend vllm`). `engine inspect FILE` shows such a
file, too. [adding_a_model.md](adding_a_model.md) tells how to add a family.

Text encoders are in a table of their own, below. [images.md](images.md) tells which models read
images. Image input is unverified on real weights.

Tests with tiny models and random weights prove the marks below. Of the published weights, only the
default model's were tested here.

- **layers**: in float32, the hidden states after every layer and the logits are within 1e-4 of
  those of Transformers. On native, this holds for the logits after every token.
- **loop**: the engine generates the same tokens as `generate` of Transformers. The prompts share
  prefixes and run in mixed batches. Native and torch run five schedules, which batch, chunk, share,
  preempt, and run one request at a time.
- **GGUF**: `engine convert` writes a GGUF file of the safetensors. It gives the same settings and,
  bit for bit, the same weights.
- **renamed**: Transformers does not have the family. It computes what Llama computes, under other
  names. A Llama whose weights have these names gives the same weights and settings as before.

"""


def names_of(test: Callable[..., Any]) -> set[str]:
    """The tiny models that a test is parametrized with."""
    found: set[str] = set()
    for mark in test.pytestmark:  # type: ignore[attr-defined]
        if mark.name == "parametrize" and mark.args[0] == "name":
            found |= {each if isinstance(each, str) else each.values[0] for each in mark.args[1]}
    return found & ALL.keys()


def page() -> str:
    layers = {
        "native": test_native_models.test_logits_equal_hugging_face,
        "torch": test_torch_models.test_every_layer_and_the_logits_equal_hugging_face,
        "jax": test_jax_models.test_every_layer_and_the_logits_equal_hugging_face,
        "tinygrad": test_tinygrad_models.test_every_layer_and_the_logits_equal_hugging_face,
    }
    loops = {
        "native": test_native_loop.test_every_schedule_generates_the_same_ids_as_transformers,
        "torch": test_torch_loop.test_every_schedule_generates_the_same_ids_as_transformers,
        "jax": test_jax_paged.test_mixed_batches_generate_the_same_ids_as_transformers,
        "tinygrad": test_tinygrad_paged.test_mixed_batches_generate_the_same_ids_as_transformers,
    }
    gguf = test_convert.test_a_gguf_converted_from_safetensors_has_identical_settings_and_weights
    with torch.device("meta"):
        kinds = {name: type(model()).__name__ for name, model in ALL.items()}

    def has(test: Callable[..., Any], family: Family) -> bool:
        return any(kinds[name] in family.hf_names for name in names_of(test))

    def cell(framework: str, family: Family) -> str:
        if family.name in test_architecture_names.REMOTE:
            return "renamed"
        marks = {"layers": layers[framework], "loop": loops[framework]}
        return ", ".join(mark for mark, test in marks.items() if has(test, family))

    rows = [
        "| family | models | `config.json` | in GGUF | files | native | torch | JAX | tinygrad |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name in architecture_names():
        family = architecture(name)
        if name in ENCODERS:
            continue
        stated = ", ".join(f"`{each}`" for each in family.hf_names)
        files = ", ".join(f"`{each}`" for each in family.gguf_names)
        converts = name in test_architecture_names.REMOTE or has(gguf, family)
        cells = " | ".join(cell(framework, family) for framework in layers)
        same = "GGUF" if converts else ""
        rows.append(f"| {name} | {MODELS[name]} | {stated} | {files} | {same} | {cells} |")
    return TEXT + "\n".join(rows) + "\n" + encoders()


ENCODER_TEXT = """
## Text encoders

They run on native and torch. Tests with tiny models and random weights prove the marks.

- **vectors**: embeddings are within 1e-4 of those of Transformers, with each way of pooling. On
  native, they are bit-identical in any batch. For all-MiniLM-L6-v2, this was tested with the
  published weights.
- **scores**: the scores of cross-encoders are within 1e-4 of those of Transformers.

Two kinds of decoders serve the same endpoints, on every framework: Qwen3-Embedding, whose folder
has a `modules.json`, and Qwen3-Reranker, whose folder has "reranker" in its name, or a
`modules.json` that names its answer tokens.

"""
ENCODER_MODELS = {
    "bert": "BERT, MiniLM, BGE, E5, GTE, mxbai and others with BERT's architecture",
    "roberta": "RoBERTa, XLM-R, multilingual E5, BGE-M3, bge-reranker-v2-m3",
    "nomic_bert": "nomic-embed-text v1 and v1.5",
    "modernbert": "ModernBERT, gte-modernbert, modernbert-embed, gte-reranker-modernbert",
}


def encoders() -> str:
    rows = [
        "| family | models | `config.json` | in GGUF | native and torch |",
        "|---|---|---|---|---|",
    ]
    with torch.device("meta"):
        made = [test_encoders.ENCODERS, test_encoders.CROSS_ENCODERS]
        vectors, scores = ({type(make()).__name__ for make in each.values()} for each in made)
    for name, models in ENCODER_MODELS.items():
        family = architecture(name)
        stated = ", ".join(f"`{each}`" for each in family.hf_names)
        files = ", ".join(f"`{each}`" for each in family.gguf_names)
        marks = {"vectors": vectors, "scores": scores}
        tested = ", ".join(mark for mark, kinds in marks.items() if kinds & set(family.hf_names))
        rows.append(f"| {name} | {models} | {stated} | {files} | {tested} |")
    return ENCODER_TEXT + "\n".join(rows) + "\n"


def test_docs_models_page_matches_the_parity_tests() -> None:
    assert page() == PAGE.read_text(), "run `python -m tests.parity.models.test_models_page`"


if __name__ == "__main__":
    PAGE.write_text(page())
    print(PAGE)

"""Quantized safetensors checkpoints: matrices that the formats' own libraries wrote, and whole
models against Transformers with the dequantized weights.
"""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import GptOssConfig, GptOssForCausalLM
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from engine.conversion.convert import convert
from engine.core.errors import ModelFormatError
from engine.native.execution.build import build_runner
from engine.runtime.model_runner import RunnerConfig
from engine.torch.models.loading import build_model
from engine.weights.lazy_tensor import LazyTensor
from engine.weights.model import open_model
from engine.weights.quants import dequantize, for_kernels, kernel_type
from engine.weights.safetensors import open_safetensors
from tests.parity import tiny_models
from tests.parity.runner_driver import RunnerDriver

MADE_BY_LIBRARIES = Path(__file__).parents[2] / "data" / "quantized.safetensors"
with safe_open(MADE_BY_LIBRARIES, "pt") as file:
    CASES = {name: json.loads(text) for name, text in sorted(file.metadata().items())}

# Types that kernels read as values rounded to 8 bits. Others only have their scales rounded.
ROUNDED = ("FP8_E4M3", "FP8_E5M2", "NF4", "BNB_FP4", "INT4_ORDERED")


def made_by_library(case: str, folder: Path) -> LazyTensor:
    stored = {
        name.removeprefix(f"{case}/"): tensor
        for name, tensor in load_file(MADE_BY_LIBRARIES).items()
        if name.startswith(f"{case}/")
    }
    save_file(stored, folder / "model.safetensors")
    config = CASES[case]["quantization_config"]
    tensors = open_safetensors(folder, quantization=config).tensors
    assert list(tensors) == ["m.weight"]
    return tensors["m.weight"]


@pytest.mark.parametrize("case", CASES)
def test_quantized_matrices_dequantize_like_their_library(case: str, tmp_path: Path) -> None:
    """`sha256` is of the library's values in float32, with positive zeros."""
    tensor = made_by_library(case, tmp_path)
    values = tensor.numpy() + np.float32(0)
    assert hashlib.sha256(values.tobytes()).hexdigest() == CASES[case]["sha256"]
    found = dequantize(
        kernel_type(tensor.dtype), for_kernels(tensor.dtype, tensor.raw()), tensor.shape
    )
    error = np.abs(found - values).max() / np.abs(values).max()
    assert error <= (2.0**-8 if tensor.dtype in ROUNDED else 2.0**-10)


@pytest.mark.parametrize("case", ["awq", "gptq-act-order", "fp8-block", "bnb-nf4-nested"])
def test_single_rows_of_a_quantized_matrix_can_be_read(case: str, tmp_path: Path) -> None:
    """`sample` reads single rows, whose scales may be packed with those of other rows."""
    tensor = made_by_library(case, tmp_path)
    whole = tensor.raw().reshape(tensor.shape[0], -1)
    rows = np.linspace(0, tensor.shape[0] - 1, 5, dtype=int)
    assert np.array_equal(tensor.sample(5).reshape(5, -1), whole[rows])


def test_a_single_expert_of_an_mxfp4_tensor_can_be_read(tmp_path: Path) -> None:
    tensor = made_by_library("mxfp4", tmp_path)
    assert (tensor.dtype, tensor.shape) == ("MXFP4", (2, 8, 64))
    second = tensor.part(1)
    assert np.array_equal(second.numpy(), tensor.numpy()[1])
    rows = second.raw().reshape(8, -1)
    assert np.array_equal(second.sample(2).reshape(2, -1), rows[[0, 7]])


State = dict[str, torch.Tensor]
GROUP = 32


def packed(values: torch.Tensor, dim: int) -> torch.Tensor:
    """4-bit values as words of eight along `dim`, the first in the lowest bits."""
    eights = values.to(torch.int64).unflatten(dim, (-1, 8)).movedim(dim + 1 if dim >= 0 else -1, -1)
    words = (eights << torch.arange(0, 32, 4)).sum(-1)
    return ((words + 2**31) % 2**32 - 2**31).to(torch.int32)


def asymmetric(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Values 0 to 15, scales and zero points for groups of 32 columns."""
    groups = weight.unflatten(1, (-1, GROUP))
    low, high = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
    scales = ((high - low) / 15).half().float()
    zeros = torch.round(-low / scales).clamp(0, 15)
    values = torch.round(groups / scales[..., None] + zeros[..., None]).clamp(0, 15)
    return values.flatten(1), scales, zeros


def gptq_act_order(weight: torch.Tensor) -> tuple[State, torch.Tensor]:
    order = torch.randperm(weight.shape[1])
    values, scales, zeros = asymmetric(weight[:, order])
    dense = ((values.unflatten(1, (-1, GROUP)) - zeros[..., None]) * scales[..., None]).flatten(1)
    place = torch.argsort(order)
    state = {
        "qweight": packed(values[:, place], 1).T,
        "scales": scales.T.half(),
        "qzeros": packed((zeros.T - 1) % 16, 1),
        "g_idx": (place // GROUP).to(torch.int32),
    }
    return state, dense[:, place]


def compressed_int4(weight: torch.Tensor) -> tuple[State, torch.Tensor]:
    values, scales, zeros = asymmetric(weight)
    dense = ((values.unflatten(1, (-1, GROUP)) - zeros[..., None]) * scales[..., None]).flatten(1)
    state = {
        "weight_packed": packed(values, 1),
        "weight_scale": scales,
        "weight_zero_point": packed(zeros.T, 1).T,
        "weight_shape": torch.tensor(weight.shape),
    }
    return state, dense


def fp8_blocks(weight: torch.Tensor) -> tuple[State, torch.Tensor]:
    """Blocks of 64 x 32; the last ones have fewer rows."""
    rows = torch.arange(weight.shape[0]) // 64
    scales = torch.stack(
        [
            weight[rows == block].unflatten(1, (-1, GROUP)).abs().amax((0, 2)) / 448
            for block in range(int(rows.max()) + 1)
        ]
    )
    each = scales[rows].repeat_interleave(GROUP, 1)
    stored = (weight / each).to(torch.float8_e4m3fn)
    return {"weight": stored, "weight_scale_inv": scales}, stored.float() * each


SCHEMES: dict[str, tuple[Callable, dict]] = {
    "gptq": (gptq_act_order, {"quant_method": "gptq", "bits": 4, "desc_act": True}),
    "compressed-tensors": (
        compressed_int4,
        {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {}},
    ),
    "fp8": (fp8_blocks, {"quant_method": "fp8", "weight_block_size": [64, GROUP]}),
}
# What the layouts of the native kernels cost, in parts of the largest logit. Eight bits for each
# value cost that much only in a model with random weights, whose logits change quickly.
COST = {"gptq": 0.06, "compressed-tensors": 0.004, "fp8": 0.06}


@pytest.fixture
def quantized(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, np.ndarray]:
    """A folder with a quantized model, and the logits of Transformers with its dequantized
    weights.
    """
    quantize, config = SCHEMES[request.param]
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4}
    torch.manual_seed(3)
    theirs = tiny_models.make("llama", **sizes)
    state: State = {}
    for name, parameter in theirs.named_parameters():
        if "_proj" not in name:
            state[name] = parameter.detach()
            continue
        stored, dense = quantize(parameter.detach())
        parameter.data = dense
        base = name.removesuffix(".weight")
        state |= {f"{base}.{part}": tensor.contiguous() for part, tensor in stored.items()}
    theirs.config.save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    stated = {"architectures": ["LlamaForCausalLM"], "quantization_config": config}
    path.write_text(json.dumps(json.loads(path.read_text()) | stated))
    save_file(state, tmp_path / "model.safetensors")
    with torch.no_grad():
        return tmp_path, theirs(torch.tensor([tiny_models.text()])).logits[0].numpy()


@pytest.mark.parametrize("quantized", SCHEMES, indirect=True, ids=SCHEMES)
def test_logits_equal_those_of_the_dequantized_weights(
    quantized: tuple[Path, np.ndarray], request: pytest.FixtureRequest
) -> None:
    path, expected = quantized
    source = open_model(path)
    model = build_model(source.config, source.weights, 128, torch.device("cpu"), torch.float32)
    tokens = tiny_models.text()
    with torch.no_grad():
        ours = model.forward_sequence(torch.tensor(tokens)).numpy()
    np.testing.assert_allclose(ours, expected, atol=1e-4, rtol=0)
    settings = {"device": "cpu", "dtype": "float32", "block_size": 16, "num_blocks": 16}
    driver = RunnerDriver(
        build_runner(source, RunnerConfig(**settings, max_slots=2, max_seq_len=128, num_threads=1))
    )
    track = driver.add(tokens)
    native = driver.runner.logits(driver.runner.forward(driver.inputs([(track, len(tokens))])))
    cost = np.abs(native[0] - expected[-1]).max() / np.abs(expected[-1]).max()
    assert cost < COST[request.node.callspec.id]


@pytest.mark.parametrize("quantized", ["compressed-tensors"], indirect=True)
def test_a_converted_quantized_model_has_the_dequantized_weights(
    quantized: tuple[Path, np.ndarray],
) -> None:
    path, _ = quantized
    convert(path, path.parent / "plain", dtype="F32")
    stated = json.loads((path.parent / "plain" / "config.json").read_text())
    assert "quantization_config" not in stated
    before, after = open_model(path), open_model(path.parent / "plain")
    for name, weight in before.weights.items():
        assert np.array_equal(weight.numpy(), after.weights[name].numpy()), name


def test_unsupported_quantization_schemes_are_named(tmp_path: Path) -> None:
    save_file({"m.weight": torch.ones(32, 32)}, tmp_path / "model.safetensors")
    for config, message in (
        ({"quant_method": "modelopt"}, "quant_method 'modelopt' is not supported.*compressed"),
        ({"bits": 4}, "lacks the required key 'quant_method'"),
        ({"quant_method": "gptq", "bits": 3}, "bits 3 is not supported"),
        ({"quant_method": "gptq", "checkpoint_format": "marlin"}, "checkpoint_format marlin"),
        ({"quant_method": "awq", "version": "gemv"}, "version gemv is not supported"),
        ({"quant_method": "bitsandbytes"}, "no tensor is stored as quant_method"),
        ({"quant_method": "compressed-tensors", "format": "marlin-24"}, "format marlin-24"),
        (
            {"quant_method": "compressed-tensors", "transform_config": {"a": 1}},
            "'transform_config' is not supported",
        ),
        ([], "must be an object"),
    ):
        with pytest.raises(ModelFormatError, match=f"quantization_config.*{message}"):
            open_safetensors(tmp_path, quantization=config)


def test_published_mxfp4_experts_have_the_dequantized_weights(tmp_path: Path) -> None:
    """gpt-oss: floats are stored transposed, MXFP4 blocks are not. Gate and up alternate."""
    sizes = {"hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 1, "head_dim": 16}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 4}
    config = GptOssConfig(**sizes, **heads, vocab_size=97, num_experts_per_tok=2)
    theirs = GptOssForCausalLM(config).float()
    theirs.save_pretrained(tmp_path / "plain")
    state = load_file(tmp_path / "plain" / "model.safetensors")
    packed_state = dict(state)
    for name, columns in (("gate_up_proj", 64), ("down_proj", 32)):
        place = f"model.layers.0.mlp.experts.{name}"
        rows = state[place].shape[2]
        blocks = torch.randint(0, 256, (4, rows, columns // 32, 16), dtype=torch.uint8)
        scales = torch.randint(115, 125, (4, rows, columns // 32), dtype=torch.uint8)
        state[place] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32).contiguous()
        del packed_state[place]
        packed_state |= {f"{place}_blocks": blocks, f"{place}_scales": scales}
    save_file(state, tmp_path / "plain" / "model.safetensors")
    (tmp_path / "packed").mkdir()
    save_file(packed_state, tmp_path / "packed" / "model.safetensors")
    stated = json.loads((tmp_path / "plain" / "config.json").read_text())
    stated["quantization_config"] = {"quant_method": "mxfp4"}
    (tmp_path / "packed" / "config.json").write_text(json.dumps(stated))
    plain, found = open_model(tmp_path / "plain"), open_model(tmp_path / "packed")
    assert found.weights["layers.0.experts.gate.weight"].tensor.dtype == "MXFP4"
    for name, weight in plain.weights.items():
        assert np.array_equal(found.weights[name].numpy(), weight.numpy()), name

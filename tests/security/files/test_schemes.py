"""Quantized safetensors checkpoints that lie (SEC-43; T4). Each is a sound one with one change."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.core.errors import ModelFormatError
from engine.weights.safetensors import open_safetensors
from tests.support.files.safetensors_files import assemble

SOUND = Path(__file__).parents[2] / "data" / "quantized.safetensors"
_LENGTH = int.from_bytes(SOUND.read_bytes()[:8], "little")
_HEADER = json.loads(SOUND.read_bytes()[8 : 8 + _LENGTH])
_DATA = SOUND.read_bytes()[8 + _LENGTH :]
CASES = {name: json.loads(text) for name, text in _HEADER.pop("__metadata__").items()}

Stored = dict[str, tuple[str, list[int], bytes]]  # dtype, shape and bytes of each tensor


def sound(case: str) -> Stored:
    return {
        name.partition("/")[2]: (each["dtype"], each["shape"], _DATA[slice(*each["data_offsets"])])
        for name, each in _HEADER.items()
        if name.startswith(f"{case}/")
    }


def opened(folder: Path, case: str, stored: Stored) -> None:
    """Open the checkpoint and read every tensor."""
    header: dict[str, Any] = {}
    data = b""
    for name, (dtype, shape, raw) in stored.items():
        offsets = [len(data), len(data) + len(raw)]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": offsets}
        data += raw
    path = folder / "model.safetensors"
    path.write_bytes(assemble(header, data))
    tensors = open_safetensors(path, quantization=CASES[case]["quantization_config"]).tensors
    for tensor in tensors.values():
        tensor.numpy()


def state_of(**changes: Any) -> bytes:
    state = {"quant_type": "nf4", "blocksize": 64, "shape": [32, 64], "dtype": "float32"}
    return json.dumps(state | changes).encode()


def integers(*values: int, dtype: str = "<i4") -> bytes:
    return np.array(values, dtype).tobytes()


STATE = "m.weight.quant_state.bitsandbytes__nf4"
LIES: dict[str, tuple[str, str, tuple[str, list[int], bytes], str]] = {
    "group beyond the scales": (
        *("gptq-act-order", "m.g_idx"),
        ("I32", [64], integers(*[1] * 63, 2)),
        r"m\.g_idx' names a group beyond the 2",
    ),
    "negative group": (
        *("gptq-act-order", "m.g_idx"),
        ("I32", [64], integers(*[1] * 63, -5)),
        r"m\.g_idx' names a group beyond the 2",
    ),
    "scales of other channels": (
        *("gptq", "m.scales"),
        ("F16", [2, 16], bytes(64)),
        r"m\.scales' has 16 columns for 32 output channels",
    ),
    "integer scales": (
        *("awq", "m.scales"),
        ("I32", [2, 32], bytes(256)),
        r"m\.scales' has dtype I32, not F32",
    ),
    "groups that are no multiples of a block": (
        *("ct-int4-sym", "m.weight_scale"),
        ("F32", [32, 64], bytes(8192)),
        "64 scales for 64 columns",
    ),
    "a shape beyond the packed values": (
        *("ct-int4-sym", "m.weight_shape"),
        ("I64", [2], integers(32, 2**40, dtype="<i8")),
        "no 4-bit or 8-bit matrix of shape",
    ),
    "a shape of zero": (
        *("ct-int4-sym", "m.weight_shape"),
        ("I64", [2], integers(0, 0, dtype="<i8")),
        r"no 4-bit or 8-bit matrix of shape \[0, 0\]",
    ),
    "a negative shape": (
        *("ct-int4-sym", "m.weight_shape"),
        ("I64", [2], integers(-32, -64, dtype="<i8")),
        "no 4-bit or 8-bit matrix",
    ),
    "an 8-bit zero point": (
        *("gptq-8bit", "m.qzeros"),
        ("I32", [2, 8], bytes(64)),
        "8-bit values with a zero point",
    ),
    "too few scales of blocks": (
        *("fp8-block", "m.weight_scale_inv"),
        ("F32", [2, 3], bytes(24)),
        r"has shape \[2, 3\], but there are 2 x 2 blocks",
    ),
    "too few scales of channels": (
        *("ct-fp8-channel", "m.weight_scale"),
        ("F32", [31, 1], bytes(124)),
        r"has shape \[31, 1\] for 32 output channels",
    ),
    "blocks of another width": (
        *("mxfp4", "m.weight_blocks"),
        ("U8", [2, 8, 2, 8], bytes(256)),
        r"m\.weight_blocks' has shape \[2, 8, 2, 8\], not shape \[2, 8, 2, 16\]",
    ),
    "state that is not JSON": (
        *("bnb-nf4", STATE),
        ("U8", [4], b"\xff{[("),
        "nf4' is not JSON",
    ),
    "state nested without end": (
        *("bnb-nf4", STATE),
        ("U8", [4000], b"[" * 4000),
        "nf4' is not JSON|states no shape",
    ),
    "state of many bytes": (
        *("bnb-nf4", STATE),
        ("U8", [5000], state_of().ljust(5000)),
        "has 5000 bytes",
    ),
    "state with a huge shape": (
        *("bnb-nf4", STATE),
        ("U8", [len(state_of(shape=[2**30, 2**30]))], state_of(shape=[2**30, 2**30])),
        r"m\.weight' has shape",
    ),
    "state without a shape": (
        *("bnb-nf4", STATE),
        ("U8", [len(state_of(shape=None))], state_of(shape=None)),
        "states no shape",
    ),
    "state with blocks of no size": (
        *("bnb-nf4", STATE),
        ("U8", [len(state_of(blocksize=0))], state_of(blocksize=0)),
        "states no blocksize",
    ),
    "another table of levels": (
        *("bnb-nf4", "m.weight.quant_map"),
        ("F32", [16], bytes(64)),
        "is not the nf4 table",
    ),
}


@pytest.mark.parametrize("lie", LIES)
def test_inconsistent_quantized_checkpoints_are_refused_for_their_reason(
    tmp_path: Path, lie: str
) -> None:
    case, name, tensor, reason = LIES[lie]
    stored = sound(case)
    assert name in stored
    with pytest.raises(ModelFormatError, match=reason) as raised:
        opened(tmp_path, case, stored | {name: tensor})
    assert len(str(raised.value)) < 300 and "\n" not in str(raised.value)


def _without(tensor: tuple[str, list[int], bytes]) -> None:
    return None


def _flat(tensor: tuple[str, list[int], bytes]) -> tuple[str, list[int], bytes]:
    return tensor[0], [int(np.prod(tensor[1]))], tensor[2]


def _empty(tensor: tuple[str, list[int], bytes]) -> tuple[str, list[int], bytes]:
    return tensor[0], [0] * len(tensor[1]), b""


def _bytes(tensor: tuple[str, list[int], bytes]) -> tuple[str, list[int], bytes]:
    return "U8", [len(tensor[2])], tensor[2]


@pytest.mark.parametrize("change", [_without, _flat, _empty, _bytes])
def test_changed_quantization_tensors_raise_only_model_format_errors(
    tmp_path: Path, change: Callable
) -> None:
    """Each tensor of each format is left out, or has another shape or type."""
    for case in CASES:
        whole = sound(case)
        opened(tmp_path, case, whole)
        for name, tensor in whole.items():
            changed = change(tensor)
            stored = {key: value for key, value in whole.items() if key != name}
            try:
                opened(tmp_path, case, stored if changed is None else stored | {name: changed})
            except ModelFormatError as error:
                assert "\n" not in str(error)

"""Converts a GGUF for `transformers serve`: the same weights as a bf16 checkpoint.

    python hf_checkpoint.py MODEL.gguf OUTPUT_FOLDER

It is run as a script by the peer's own Python, which has transformers. The checkpoint names no end
token, because that server has no `ignore_eos` and the benchmarks need outputs of a fixed length.
"""

import json
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig


def convert(gguf: Path, output: Path, *, names_end: bool = False) -> None:
    source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    tokenizer = AutoTokenizer.from_pretrained(**source)
    model = AutoModelForCausalLM.from_pretrained(
        **source, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
    )
    partial = output.with_name(f"{output.name}.partial")
    model.save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    for name in () if names_end else ("config.json", "generation_config.json"):
        path = partial / name
        path.write_text(json.dumps(json.loads(path.read_text()) | {"eos_token_id": None}, indent=2))
    partial.rename(output)


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))

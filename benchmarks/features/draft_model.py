"""Measures what a draft model saves: CPU seconds per output token with it and without it.

    python -m benchmarks.features.draft_model --rounds 5
    python -m benchmarks.features.draft_model --only useless --streams 8

There is no series of models on a machine without a network, so the pairs are made from one model.
"deep" is a model with six times the layers, of which the added ones change nothing, with the
original as its draft model, which takes about a fifth of its time: an upper bound, since all
guesses are right. "useless" is the model
itself, with a draft model made of its first two layers, whose guesses are wrong: what a bad draft
model costs. Both engines are in this process and run the same requests in alternating rounds. Their
tokens must be equal. All steps after the first token count, so the time in which the draft model
computes a prompt counts too.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import gguf
import numpy as np

from benchmarks.features.speculation import Bench, Scenario, compare, scenarios
from engine.core.store.pull import pull

ADDED_BY_WRITER = ("GGUF.version", "GGUF.tensor_count", "GGUF.kv_count", "general.architecture")
DEPTH = 6  # layers of the deep model for each layer of the original
# The last matrices of attention and MLP. If they are zero, a layer changes nothing.
LAST = ("attn_output.weight", "ffn_down.weight")


def with_layers(path: Path, target: Path, layers: Sequence[int | None]) -> Path:
    """Write a model whose layers are these layers of the GGUF model at `path`. None stands for a
    layer that changes nothing.
    """
    reader = gguf.GGUFReader(path)
    name = reader.fields["general.architecture"].contents()
    part = target.with_suffix(".part")
    writer = gguf.GGUFWriter(part, name)
    for key, field in reader.fields.items():
        if key not in ADDED_BY_WRITER:
            value = len(layers) if key == f"{name}.block_count" else field.contents()
            inner = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(key, value, field.types[0], sub_type=inner)
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    for key, tensor in tensors.items():
        if not key.startswith("blk."):
            writer.add_tensor(key, tensor.data, raw_dtype=tensor.tensor_type)
    suffixes = [key.removeprefix("blk.0.") for key in tensors if key.startswith("blk.0.")]
    for index, layer in enumerate(layers):
        for suffix in suffixes:
            tensor = tensors[f"blk.{layer or 0}.{suffix}"]
            is_empty = layer is None and suffix in LAST
            data = np.zeros_like(tensor.data) if is_empty else tensor.data
            writer.add_tensor(f"blk.{index}.{suffix}", data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    part.rename(target)
    return target


def pairs(folder: Path) -> dict[str, tuple[Path, Path]]:
    """The models of each pair and their draft models, which are written if they are not there."""
    path = pull("smollm2-135m-instruct")
    count = int(gguf.GGUFReader(path).fields["llama.block_count"].contents())
    deep, short = folder / f"deep-{DEPTH}.gguf", folder / "short.gguf"
    folder.mkdir(parents=True, exist_ok=True)
    if not deep.exists():
        added = [None] * (DEPTH - 1)
        with_layers(path, deep, [layer for each in range(count) for layer in (each, *added)])
    if not short.exists():
        with_layers(path, short, range(2))
    return {"deep": (deep, path), "useless": (path, short)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", choices=("deep", "useless"))
    parser.add_argument("--streams", type=int)
    parser.add_argument("--folder", type=Path, default=Path.home() / ".cache/engine/peers/drafts")
    given = parser.parse_args()
    for name, (model, draft) in pairs(given.folder).items():
        if given.only not in (None, name):
            continue
        bench = Bench(str(model), draft=str(draft))
        for scenario in _scenarios(given.streams):
            print(name, end=" ", flush=True)
            compare(bench, scenario, given.rounds, lambda line: print(line, flush=True))


def _scenarios(streams: int | None) -> list[Scenario]:
    return [each for each in scenarios() if streams in (None, each.streams)]


if __name__ == "__main__":
    main()

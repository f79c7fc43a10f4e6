"""A complete GPT-2 in one file, for reading and experiments: tokenizer, model, cache, sampling.

It needs only numpy (and `safetensors` to read a checkpoint). Numpy hides nothing: each line is the
arithmetic itself, the script starts at once, and GPT-2 is small enough for it. Without a checkpoint
the weights are random, and so is the output.

    python engine_tools/dev/single_file_gpt2.py
    python engine_tools/dev/single_file_gpt2.py --model gpt2/ --prompt "The meaning of life is"
    engine dev single_file_gpt2 --ids 464 2068 7586 --tokens 20

A model is a Hugging Face folder with config.json and model.safetensors. The vocabulary (vocab.json
and merges.txt, or encoder.json and vocab.bpe) is in that folder or in --vocab.
"""

import argparse
import json
import math
import re
import sys
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float32]

# ---------------------------------------------------------------- tokenizer: byte-level BPE

_CONTRACTION = re.compile("'(?:s|t|re|ve|m|ll|d)")
# This pattern is matched with a copy of the text in which letters are replaced by L, numbers by N
# and other characters by P. White space is unchanged.
_WORD = re.compile(r" ?L+| ?N+| ?P+|\s+(?!\S)|\s+")


def byte_alphabet() -> dict[int, str]:
    """Maps each byte to a printable character, as the vocabulary file does. Printable bytes map to
    themselves.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {b: chr(b) for b in printable} | {b: chr(256 + n) for n, b in enumerate(others)}


def words(text: str) -> Iterator[str]:
    """Split the text into pieces that merges never cross: contractions, words, numbers,
    punctuation, white space.
    """
    classes = (char if char.isspace() else unicodedata.category(char)[0] for char in text)
    kinds = "".join(kind if kind in "LN" or kind.isspace() else "P" for kind in classes)
    at = 0
    while at < len(text):
        found = _CONTRACTION.match(text, at) or _WORD.match(kinds, at)
        assert found is not None, "every character has a kind"
        yield text[at : found.end()]
        at = found.end()


class Tokenizer:
    def __init__(self, vocab: dict[str, int], merges: Sequence[tuple[str, str]]) -> None:
        self.ids = vocab
        self.pieces = {index: piece for piece, index in vocab.items()}
        self.ranks = {pair: rank for rank, pair in enumerate(merges)}
        self.alphabet = byte_alphabet()
        self.bytes = {char: byte for byte, char in self.alphabet.items()}

    @classmethod
    def load(cls, folder: Path) -> "Tokenizer | None":
        for vocab, merges in (("vocab.json", "merges.txt"), ("encoder.json", "vocab.bpe")):
            if (folder / vocab).is_file() and (folder / merges).is_file():
                lines = (folder / merges).read_text(encoding="utf-8").splitlines()
                pairs = [line.partition(" ")[::2] for line in lines if line[:2] not in ("", "#v")]
                return cls(json.loads((folder / vocab).read_text(encoding="utf-8")), pairs)
        return None

    def encode(self, text: str) -> list[int]:
        ids: list[int] = []
        for word in words(text):
            parts = [self.alphabet[byte] for byte in word.encode()]
            while len(parts) > 1:  # merge the pair that was learned first, wherever it occurs
                pairs = list(zip(parts, parts[1:], strict=False))
                best = min(pairs, key=lambda pair: self.ranks.get(pair, math.inf))
                if best not in self.ranks:
                    break
                at = pairs.index(best)
                parts[at : at + 2] = ["".join(best)]
            ids += [self.ids[part] for part in parts]
        return ids

    def decode(self, ids: Sequence[int]) -> bytes:
        text = "".join(self.pieces.get(index, "") for index in ids)
        return bytes(self.bytes[char] for char in text if char in self.bytes)


# ---------------------------------------------------------------- model


@dataclass(frozen=True)
class Config:
    vocab_size: int = 256
    n_positions: int = 128
    n_embd: int = 64
    n_layer: int = 2
    n_head: int = 4
    layer_norm_epsilon: float = 1e-5


def layer_norm(x: Array, weight: Array, bias: Array, eps: float) -> Array:
    centred = x - x.mean(axis=-1, keepdims=True)
    variance = (centred * centred).mean(axis=-1, keepdims=True)
    return centred / np.sqrt(variance + np.float32(eps)) * weight + bias


def gelu(x: Array) -> Array:
    inner = np.float32(math.sqrt(2 / math.pi)) * (x + np.float32(0.044715) * x * x * x)
    return np.float32(0.5) * x * (1 + np.tanh(inner))


def softmax(x: Array) -> Array:
    powers = np.exp(x - x.max(axis=-1, keepdims=True))
    return powers / powers.sum(axis=-1, keepdims=True)


class GPT2:
    """GPT-2 with its KV cache. Weights have Hugging Face's names, and matrices are (in, out)."""

    def __init__(self, config: Config, weights: dict[str, Array]) -> None:
        self.config = config
        self.w = {name.removeprefix("transformer."): value for name, value in weights.items()}
        self.reset()

    def reset(self) -> None:
        shape = (self.config.n_head, 0, self.config.n_embd // self.config.n_head)
        empty = np.zeros(shape, np.float32)
        self.cache = [(empty, empty)] * self.config.n_layer  # keys and values, (N, T, H)

    def forward(self, ids: Sequence[int]) -> Array:
        """Append the tokens `ids` to the cached tokens. Returns the logits after the last token."""
        past = self.cache[0][0].shape[1]
        x = self.w["wte.weight"][list(ids)] + self.w["wpe.weight"][past : past + len(ids)]  # (T, D)
        for layer in range(self.config.n_layer):
            x = x + self.attend(self.norm(x, f"h.{layer}.ln_1"), layer)
            inner = gelu(self.linear(self.norm(x, f"h.{layer}.ln_2"), f"h.{layer}.mlp.c_fc"))
            x = x + self.linear(inner, f"h.{layer}.mlp.c_proj")
        last = self.norm(x[-1], "ln_f")
        return last @ self.w.get("lm_head.weight", self.w["wte.weight"]).T  # (V,)

    def attend(self, x: Array, layer: int) -> Array:
        q, k, v = (
            part.reshape(len(x), self.config.n_head, -1).swapaxes(0, 1)  # (N, T, H)
            for part in np.split(self.linear(x, f"h.{layer}.attn.c_attn"), 3, axis=1)
        )
        keys, values = (
            np.concatenate((old, new), axis=1)
            for old, new in zip(self.cache[layer], (k, v), strict=True)
        )
        self.cache[layer] = keys, values
        scores = q @ keys.swapaxes(1, 2) / np.float32(math.sqrt(q.shape[2]))  # (N, T, past + T)
        past = keys.shape[1] - len(x)
        unseen = np.arange(keys.shape[1]) > past + np.arange(len(x))[:, None]
        mixed = softmax(np.where(unseen, np.float32(-np.inf), scores)) @ values
        return self.linear(mixed.swapaxes(0, 1).reshape(len(x), -1), f"h.{layer}.attn.c_proj")

    def linear(self, x: Array, name: str) -> Array:
        return x @ self.w[f"{name}.weight"] + self.w[f"{name}.bias"]

    def norm(self, x: Array, name: str) -> Array:
        weight, bias = self.w[f"{name}.weight"], self.w[f"{name}.bias"]
        return layer_norm(x, weight, bias, self.config.layer_norm_epsilon)


def load(folder: Path) -> GPT2:
    from safetensors.numpy import load_file

    stated: dict[str, Any] = json.loads((folder / "config.json").read_text())
    config = Config(**{name: stated[name] for name in Config.__dataclass_fields__})
    return GPT2(config, load_file(folder / "model.safetensors"))


def random_model(config: Config, seed: int = 0) -> GPT2:
    rng, size = np.random.default_rng(seed), config.n_embd
    shapes = {"wte": (config.vocab_size, size), "wpe": (config.n_positions, size), "ln_f": (size,)}
    inside = {"ln_1": (size,), "attn.c_attn": (size, 3 * size), "attn.c_proj": (size, size)}
    inside |= {"ln_2": (size,), "mlp.c_fc": (size, 4 * size), "mlp.c_proj": (4 * size, size)}
    for layer in range(config.n_layer):
        shapes |= {f"h.{layer}.{name}": shape for name, shape in inside.items()}
    weights: dict[str, Array] = {}
    for name, shape in shapes.items():
        weights[f"{name}.bias"] = np.zeros(shape[-1], np.float32)
        values = rng.normal(0, 0.2, shape) if len(shape) == 2 else np.ones(shape)
        weights[f"{name}.weight"] = values.astype(np.float32)
    return GPT2(config, weights)


# ---------------------------------------------------------------- sampling


def sample(logits: Array, temperature: float, top_k: int, rng: np.random.Generator) -> int:
    if temperature == 0:
        return int(logits.argmax())
    if 0 < top_k < len(logits):
        least = np.partition(logits, -top_k)[-top_k]
        logits = np.where(logits < least, np.float32(-np.inf), logits)
    chances = softmax(logits.astype(np.float64) / temperature)  # type: ignore[arg-type]
    return int(rng.choice(len(chances), p=chances))


def generate(
    model: GPT2, ids: Sequence[int], count: int, temperature: float, top_k: int, seed: int
) -> Iterator[int]:
    """Generate tokens one at a time, using the KV cache."""
    rng = np.random.default_rng(seed)
    fed, room = list(ids), model.config.n_positions - len(ids)
    for _ in range(min(count, room)):
        fed = [sample(model.forward(fed), temperature, top_k, rng)]
        yield fed[0]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", type=Path, help="a Hugging Face folder; default: random weights")
    parser.add_argument("--vocab", type=Path, help="a folder with vocab.json and merges.txt")
    parser.add_argument("--prompt", default="Once upon a time", help="needs a vocabulary")
    parser.add_argument("--ids", type=int, nargs="+", help="token ids instead of a prompt")
    parser.add_argument("--tokens", type=int, default=40, help="how many to add")
    parser.add_argument("--temperature", type=float, default=0.8, help="0 is greedy")
    parser.add_argument("--top-k", type=int, default=40, help="0: of all tokens")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args(arguments)

    folder = given.vocab or given.model
    tokenizer = Tokenizer.load(folder) if folder else None
    vocab_size = len(tokenizer.ids) if tokenizer else Config.vocab_size
    model = load(given.model) if given.model else random_model(Config(vocab_size=vocab_size))
    prompt = tokenizer.encode(given.prompt) if tokenizer else list(given.prompt.encode())
    ids = given.ids or prompt
    new = generate(model, ids, given.tokens, given.temperature, given.top_k, given.seed)
    if tokenizer is None:
        print(*ids, "->", *new)
        return
    for token in chain(ids, new):
        sys.stdout.buffer.write(tokenizer.decode([token]))
        sys.stdout.flush()
    print()


if __name__ == "__main__":
    main()

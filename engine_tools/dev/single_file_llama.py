"""A complete Llama in one file, like `single_file_gpt2.py`, for llama2.c's story models.

It reads llama2.c files, such as stories15M.bin and its tokenizer.bin, and needs only numpy.
Differences from GPT-2: RoPE instead of learned positions, RMSNorm, a gated MLP, grouped-query
attention, and a SentencePiece vocabulary.

    python engine_tools/dev/single_file_llama.py stories15M.bin --prompt "One day, a dog"

Without a model, the weights are random.
"""

import argparse
import struct
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float32]
BOS, EOS, FIRST_BYTE = 1, 2, 3

# ---------------------------------------------------------------- tokenizer: pieces with scores


class Tokenizer:
    def __init__(self, pieces: Sequence[bytes], scores: Sequence[float]) -> None:
        self.pieces, self.scores = list(pieces), list(scores)
        for byte in range(256):  # some files spell byte tokens as "<0x0A>"
            self.pieces[FIRST_BYTE + byte] = bytes([byte])
        text = enumerate(self.pieces[FIRST_BYTE + 256 :], FIRST_BYTE + 256)
        self.ids = {piece: index for index, piece in text}

    @classmethod
    def load(cls, path: Path) -> "Tokenizer":
        """Read tokenizer.bin: the max token length, then score, length and bytes of each token."""
        content, at = path.read_bytes(), 4
        pieces, scores = [], []
        while at < len(content):
            score, length = struct.unpack_from("<fi", content, at)
            pieces.append(content[at + 8 : at + 8 + length])
            scores.append(score)
            at += 8 + length
        return cls(pieces, scores)

    def encode(self, text: str) -> list[int]:
        """Split the text into characters. Then merge neighbours that form a token, always the pair
        whose token has the best score, until no pair is left.
        """
        ids: list[int] = []
        for char in f" {text}" if text else "":
            raw = char.encode()
            known = self.ids.get(raw)
            ids += [known] if known is not None else [FIRST_BYTE + byte for byte in raw]
        while True:
            joined = [
                (self.scores[index], -at, index)
                for at, (left, right) in enumerate(zip(ids, ids[1:], strict=False))
                if (index := self.ids.get(self.pieces[left] + self.pieces[right])) is not None
            ]
            if not joined:
                return [BOS, *ids]
            _, at, index = max(joined)
            ids[-at : 2 - at] = [index]

    def decode(self, token: int, first: bool = False) -> bytes:
        piece = b"" if token in (0, BOS, EOS) else self.pieces[token]
        return piece.removeprefix(b" ") if first else piece


# ---------------------------------------------------------------- model


@dataclass(frozen=True)
class Config:
    """The seven integers at the start of a file. A negative vocabulary size means that the output
    head has weights of its own, instead of those of the embedding.
    """

    dim: int = 64
    hidden_dim: int = 160
    n_layers: int = 2
    n_heads: int = 8
    n_kv_heads: int = 4
    vocab: int = 512
    seq_len: int = 128

    @property
    def head_dim(self) -> int:
        return self.dim // self.n_heads

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the weights, in the file's order."""
        layers, dim, hidden = self.n_layers, self.dim, self.hidden_dim
        kv = self.n_kv_heads * self.head_dim
        shapes: dict[str, tuple[int, ...]] = {
            "embed": (abs(self.vocab), dim),
            "attn_norm": (layers, dim),
            "q": (layers, dim, dim),
            "k": (layers, kv, dim),
            "v": (layers, kv, dim),
            "o": (layers, dim, dim),
            "mlp_norm": (layers, dim),
            "gate": (layers, hidden, dim),
            "down": (layers, dim, hidden),
            "up": (layers, hidden, dim),
            "norm": (dim,),
            "cos_sin": (2, self.seq_len, self.head_dim // 2),  # RoPE tables; not used
        }
        return shapes if self.vocab > 0 else shapes | {"head": (-self.vocab, dim)}


def rms_norm(x: Array, weight: Array) -> Array:
    return x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + np.float32(1e-5)) * weight


def softmax(x: Array) -> Array:
    powers = np.exp(x - x.max(axis=-1, keepdims=True))
    return powers / powers.sum(axis=-1, keepdims=True)


class Llama:
    def __init__(self, config: Config, weights: dict[str, Array]) -> None:
        self.config, self.w = config, weights
        self.reset()

    @classmethod
    def load(cls, path: Path) -> "Llama":
        config = Config(*np.fromfile(path, "<i4", 7).tolist())
        flat, weights, at = np.memmap(path, "<f4", "r", offset=28), {}, 0
        for name, shape in config.shapes().items():
            size = int(np.prod(shape))
            weights[name] = np.asarray(flat[at : at + size]).reshape(shape)
            at += size
        return cls(config, weights)

    @classmethod
    def random(cls, config: Config, seed: int = 0) -> "Llama":
        rng = np.random.default_rng(seed)
        return cls(
            config,
            {
                name: np.ones(shape, np.float32)
                if name.endswith("norm")
                else rng.normal(0, 0.2, shape).astype(np.float32)
                for name, shape in config.shapes().items()
            },
        )

    def reset(self) -> None:
        empty = np.zeros((self.config.n_kv_heads, 0, self.config.head_dim), np.float32)
        self.cache = [(empty, empty)] * self.config.n_layers  # keys and values, (K, T, H)

    def forward(self, ids: Sequence[int]) -> Array:
        """Append the tokens `ids` to the cached tokens. Returns the logits after the last token."""
        w = self.w
        x = w["embed"][list(ids)]  # (T, D)
        for layer in range(self.config.n_layers):
            x = x + self.attend(rms_norm(x, w["attn_norm"][layer]), layer)
            normed = rms_norm(x, w["mlp_norm"][layer])
            gate = normed @ w["gate"][layer].T
            gated = gate / (1 + np.exp(-gate)) * (normed @ w["up"][layer].T)
            x = x + gated @ w["down"][layer].T
        return rms_norm(x[-1], w["norm"]) @ w.get("head", w["embed"]).T  # (V,)

    def attend(self, x: Array, layer: int) -> Array:
        config, past = self.config, self.cache[layer][0].shape[1]
        q, k, v = (
            (x @ self.w[name][layer].T).reshape(len(x), -1, config.head_dim).swapaxes(0, 1)
            for name in "qkv"
        )  # q is (N, T, H); k and v are (K, T, H)
        q, k = self.rotate(q, past), self.rotate(k, past)
        keys, values = (
            np.concatenate((old, new), axis=1)
            for old, new in zip(self.cache[layer], (k, v), strict=True)
        )
        self.cache[layer] = keys, values
        shared = config.n_heads // config.n_kv_heads
        keys, values = keys.repeat(shared, axis=0), values.repeat(shared, axis=0)
        scores = q @ keys.swapaxes(1, 2) / np.float32(np.sqrt(config.head_dim))
        unseen = np.arange(keys.shape[1]) > past + np.arange(len(x))[:, None]
        mixed = softmax(np.where(unseen, np.float32(-np.inf), scores)) @ values
        return mixed.swapaxes(0, 1).reshape(len(x), -1) @ self.w["o"][layer].T

    def rotate(self, x: Array, past: int) -> Array:
        """Apply RoPE: rotate adjacent pairs of values by an angle proportional to the position."""
        half = self.config.head_dim // 2
        speeds = 10_000.0 ** -(np.arange(half) / half)
        angles = (past + np.arange(x.shape[1]))[:, None] * speeds  # (T, H / 2)
        cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
        even, odd = x[..., 0::2], x[..., 1::2]
        rotated = np.stack((even * cos - odd * sin, even * sin + odd * cos), axis=-1)
        return rotated.reshape(x.shape)


# ---------------------------------------------------------------- sampling


def sample(logits: Array, temperature: float, top_p: float, rng: np.random.Generator) -> int:
    """Sample from the smallest set of most likely tokens with a total probability of `top_p`."""
    if temperature == 0:
        return int(logits.argmax())
    chances = softmax(logits.astype(np.float64) / temperature)  # type: ignore[arg-type]
    order = np.argsort(-chances)
    kept = order[: 1 + int(np.searchsorted(np.cumsum(chances[order]), top_p))]
    return int(rng.choice(kept, p=chances[kept] / chances[kept].sum()))


def generate(
    model: Llama, ids: Sequence[int], count: int, temperature: float, top_p: float, seed: int
) -> Iterator[int]:
    rng = np.random.default_rng(seed)
    fed, room = list(ids), model.config.seq_len - len(ids)
    for _ in range(min(count, room)):
        fed = [sample(model.forward(fed), temperature, top_p, rng)]
        if fed[0] in (BOS, EOS):
            return
        yield fed[0]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("model", type=Path, nargs="?", help="a llama2.c .bin; default: random")
    parser.add_argument("--tokenizer", type=Path, help="default: tokenizer.bin beside the model")
    parser.add_argument("--prompt", default="Once upon a time")
    parser.add_argument("--tokens", type=int, default=200, help="how many to add at most")
    parser.add_argument("--temperature", type=float, default=0.8, help="0 is greedy")
    parser.add_argument("--top-p", type=float, default=0.9)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args(arguments)

    if given.model is None:
        model, ids = Llama.random(Config()), [BOS, *(FIRST_BYTE + b for b in given.prompt.encode())]
        print(*ids, "->", *generate(model, ids, given.tokens, given.temperature, 1.0, given.seed))
        return
    tokenizer = Tokenizer.load(given.tokenizer or given.model.with_name("tokenizer.bin"))
    model, ids = Llama.load(given.model), tokenizer.encode(given.prompt)
    new = generate(model, ids, given.tokens, given.temperature, given.top_p, given.seed)
    sys.stdout.write(given.prompt)
    sys.stdout.flush()
    for token in new:
        sys.stdout.buffer.write(tokenizer.decode(token))
        sys.stdout.flush()
    print()


if __name__ == "__main__":
    main()

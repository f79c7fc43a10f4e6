"""Small models for the graph and plan tests, and a driver that runs sequences chunk by chunk."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from engine.architectures.base import ModelConfig, RopeConfig
from engine.ir.execute import ReferenceBatch, State
from engine.ir.graph import Graph
from engine.ir.recurrent import empty_states
from engine.ir.reference import F32
from engine.ir.rotary import rotary_tables

VOCAB, MAX_POSITION = 61, 96
BLOCK, NUM_BLOCKS = 4, 64
Forward = Callable[[ReferenceBatch, State], F32]

_COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": 40,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 12,
    "intermediate_size": 56,
    "max_position": MAX_POSITION,
    "norm_eps": 1e-5,
    "tie_embeddings": False,
    "rope": RopeConfig(10000.0, 12),
}


def _config(**changes: object) -> ModelConfig:
    return ModelConfig(**(_COMMON | changes))  # type: ignore[arg-type]


CONFIGS: Mapping[str, ModelConfig] = {
    "llama": _config(family="llama", tie_embeddings=True, rope=RopeConfig(10000.0, 8)),
    "mistral": _config(family="llama", sliding_window=5, out_bias=True, mlp_bias=True),
    "qwen2": _config(family="qwen2", qkv_bias=True),
    "qwen3": _config(family="qwen3", qk_norm="head"),
    "granite": _config(
        family="granite",
        embedding_multiplier=6.0,
        residual_multiplier=0.3,
        attention_multiplier=0.2,
        logits_scaling=4.0,
    ),
    "olmo2": _config(family="olmo2", norm_placement="output", qk_norm="whole"),
    "gpt2": _config(
        family="gpt2",
        norm="layer",
        norm_bias=True,
        gated_mlp=False,
        activation="gelu_tanh",
        rope=None,
        num_kv_heads=4,
        head_dim=10,
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
        tie_embeddings=True,
    ),
}


def random_weights(graph: Graph, seed: int = 0) -> dict[str, F32]:
    """Random weights that vary enough to reveal a lost bias or a wrong norm."""
    rng = np.random.default_rng(seed)
    return {
        name: rng.normal(0, 0.3, value.shape).astype(np.float32) + (len(value.shape) == 1)
        for name, value in graph.weights.items()
    }


def new_state(config: ModelConfig, factors: F32 | None = None) -> State:
    """Empty caches filled with NaN, so that reading an unwritten position shows."""
    shape = (NUM_BLOCKS, BLOCK, config.kv_parts, config.num_kv_heads, config.head_dim)
    rotations = tuple(rotary_tables(rope, config.max_position, factors) for rope in config.ropes)
    caches = tuple(np.full(shape, np.nan, np.float32) for _ in range(config.num_layers))
    states = empty_states(config, NUM_BLOCKS)
    for each in states:
        each[:] = np.nan
    return State(caches, rotations, states)


@dataclass(eq=False)
class Track:
    tokens: list[int]
    blocks: list[int]
    num_computed: int = 0


@dataclass
class Driver:
    """Runs sequences over one paged cache, with blocks in shuffled order."""

    forward: Forward
    state: State
    free: list[int] = field(
        default_factory=lambda: np.random.default_rng(5).permutation(NUM_BLOCKS).tolist()
    )

    def add(self, tokens: Sequence[int]) -> Track:
        blocks = [self.free.pop() for _ in range(-(-len(tokens) // BLOCK))]
        return Track(list(tokens), blocks)

    def step(self, work: Sequence[tuple[Track, int]], every_token: bool = False) -> F32:
        """Compute the next tokens of each track. Returns the logits of the last tokens, or of
        all.
        """
        ids, positions, slots, row_of, wanted = [], [], [], [], []
        for row, (track, count) in enumerate(work):
            for position in range(track.num_computed, track.num_computed + count):
                ids.append(track.tokens[position])
                positions.append(position)
                slots.append(track.blocks[position // BLOCK] * BLOCK + position % BLOCK)
                row_of.append(row)
            track.num_computed += count
            wanted.append(len(ids) - 1)
        tables = np.zeros((len(work), max(len(track.blocks) for track, _ in work)), np.int32)
        for row, (track, _) in enumerate(work):
            tables[row, : len(track.blocks)] = track.blocks
        batch = ReferenceBatch(
            np.array(ids, np.int32),
            np.array(positions, np.int32),
            np.array(slots, np.int64),
            np.array(row_of, np.int32),
            tables,
            np.arange(len(ids), dtype=np.int32) if every_token else np.array(wanted, np.int32),
            # The first block of a sequence is its alone, so its number serves as its slot.
            np.array([track.blocks[0] for track, _ in work], np.int32),
        )
        return self.forward(batch, self.state)


def text(length: int, seed: int = 0, vocab: int = VOCAB) -> list[int]:
    tokens: list[int] = np.random.default_rng(seed).integers(0, vocab, length).tolist()
    return tokens

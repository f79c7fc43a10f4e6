"""The inputs of a model's graph: their names and shapes.

In shapes, T counts the tokens of a step, S its sequences, B the blocks of a block table, and R the
tokens whose logits are needed.
"""

from engine.architectures.base import ModelConfig
from engine.ir.graph import GraphBuilder

TOKEN_IDS = "token_ids"
POSITIONS = "positions"
WRITE_SLOTS = "write_slots"  # each token's place in the KV cache: block * block_size + offset
ROW_OF = "row_of"  # index of the sequence that each token belongs to
TABLES = "tables"  # block table of each sequence
LOGIT_TOKENS = "logit_tokens"
SLOTS = "slots"  # each sequence's index into the arrays of states
# Only in encoders: each token attends to positions below its visible end, and has a token type.
VISIBLE_END = "visible_end"
TOKEN_TYPES = "token_types"


def rotation_names(table: int) -> tuple[str, str]:
    """The graph inputs with the cosines and the sines of a RoPE table of `ModelConfig.ropes`."""
    return f"cosines.{table}", f"sines.{table}"


def cache_name(layer: int) -> str:
    return f"cache.{layer}"


def state_name(layer: int | str) -> str:
    return f"state.{layer}"


def declare_inputs(graph: GraphBuilder, config: ModelConfig) -> None:
    """Adds the inputs that do not belong to one layer."""
    graph.input(TOKEN_IDS, ("T",), "i32")
    graph.input(POSITIONS, ("T",), "i32")
    graph.input(WRITE_SLOTS, ("T",), "i64")
    graph.input(ROW_OF, ("T",), "i32")
    graph.input(TABLES, ("S", "B"), "i32")
    graph.input(LOGIT_TOKENS, ("R",), "i32")
    for table, rope in enumerate(config.ropes):
        for name in rotation_names(table):
            graph.input(name, ("T", rope.dim // 2))
    if config.state is not None:
        graph.input(SLOTS, ("S",), "i32")
    if config.encoder is not None:
        graph.input(VISIBLE_END, ("T",), "i32")
        if config.encoder.num_token_types:
            graph.input(TOKEN_TYPES, ("T",), "i32")


def declare_cache(graph: GraphBuilder, config: ModelConfig, layer: int) -> str:
    """Adds the KV cache of a layer. Its dimensions are blocks, tokens of a block, key and value, KV
    heads, and values of a head. Returns its name.
    """
    shape = ("C", "P", config.kv_parts, config.num_kv_heads, config.head_dim)
    return graph.input(cache_name(layer), shape)

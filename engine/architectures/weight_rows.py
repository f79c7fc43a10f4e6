"""Defines `WeightRow`: the description of a weight of a model family, with sizes as letters. With
the config of a model, a row becomes `TensorSpec`s, which have numbers.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from operator import attrgetter

from engine.architectures.base import ModelConfig
from engine.architectures.tensors import TensorSpec, Transform

# Whether a weight exists in a layer of a model. For weights outside of layers, the layer is 0.
Condition = Callable[[ModelConfig, int], bool]


@dataclass(frozen=True, slots=True)
class Stored:
    """How a format stores a weight, in letters (see `WeightRow`). `Transform` has the numbers.

    `parts` lists the sizes of the weights that share a stored matrix, such as "qkk" for a matrix
    with the rows of q, then k, then v. This weight is number `index` of them. If `groups` is not
    "1", the file repeats this sequence so many times, each time with the next rows of each weight.
    `paired`: the two rows of each rotary pair are next to each other. `unpaired` has the letter of
    the rows of a head that precede the rotated rows. `shape` is the stored shape, if it differs
    from the weight's own. For the other fields, see `Transform`.
    """

    parts: str = ""
    index: int = 0
    groups: str = "1"
    transposed: bool = False
    paired: bool = False
    added: float = 0.0
    is_log: bool = False
    shape: str = ""
    unpaired: str = ""
    turned: bool = False
    joined: bool = False

    def transform(self, config: ModelConfig, sizes: Mapping[str, int]) -> Transform:
        each = [sizes[letter] for letter in self.parts]
        rotated = config.rope.dim if self.paired and config.rope is not None else 0
        head_dim = config.head_dim if rotated else 1
        unpaired = sizes[self.unpaired] if self.unpaired else 0
        return Transform(
            transposed=self.transposed,
            groups=sizes[self.groups],
            before=sum(each[: self.index]),
            after=sum(each[self.index + 1 :]),
            head_dim=unpaired + rotated if self.unpaired else head_dim,
            paired=rotated,
            unpaired=unpaired,
            added=self.added,
            is_log=self.is_log,
            reshaped=tuple(sizes[letter] for letter in self.shape),
            turned=self.turned,
            joined=self.joined,
        )


PLAIN = Stored()
PAIRED = Stored(paired=True)


@dataclass(frozen=True, slots=True)
class WeightRow:
    """A weight's name in the engine and in files. "{i}" in a name stands for the layer number, and
    "{e}" for the number of an expert.

    `shape` has one letter per dimension: D hidden, F feed-forward, V vocabulary, P positions,
    O rows before the first position, Y token types, H head dim, N heads, K KV heads, q all query
    heads, k all key heads, g all query heads of a KV head, o all outputs of heads, c half of the
    rotated dimensions of a head, E experts, X an expert's feed-forward, S the shared expert's. For
    latent attention: L the latent, R the rotated key, a both together, Q the vector that queries
    are computed from, M the part of a head that is not rotated, U a head's value. For layers with a
    state, `StateConfig.letters` has other meanings. `bias` is the config field that says whether
    the weight has a bias. `when` says whether the weight exists; None: always. `older_gguf` is
    explained in `TensorSpec`.
    """

    name: str
    shape: str
    hf: str | None
    gguf: str | None
    bias: str | None = None
    when: Condition | None = None
    hf_stored: Stored = PLAIN
    gguf_stored: Stored = PLAIN
    optional: bool = False
    older_gguf: str | None = None

    def specs(self, config: ModelConfig, layer: int) -> Iterator[TensorSpec]:
        if self.when is not None and not self.when(config, layer):
            return
        sizes = _sizes(config)
        if config.state is not None:
            sizes |= config.state.letters(config.layer(layer).mixer, config.hidden_size)
        shape = tuple(sizes[letter] for letter in self.shape)
        name, hf, gguf, older = (
            None if each is None else each.replace("{i}", str(layer))
            for each in (self.name, self.hf, self.gguf, self.older_gguf)
        )
        assert name is not None, self
        stacks = self.shape[0] == "E" and len(shape) > 1 and ".router." not in name
        of_experts = stacks or len(shape) == 3
        in_hf, in_gguf = (
            each.transform(config, sizes) for each in (self.hf_stored, self.gguf_stored)
        )
        yield TensorSpec(name, shape, hf, gguf, in_hf, in_gguf, self.optional, of_experts, older)
        if self.bias is not None and attrgetter(self.bias)(config):
            name, hf, gguf = (each and _bias_name(each) for each in (name, hf, gguf))
            assert name is not None, self
            shape = shape if len(shape) == 1 else shape[:-1]
            in_hf, in_gguf = (
                replace(each, transposed=False, added=0.0, reshaped=()) for each in (in_hf, in_gguf)
            )
            yield TensorSpec(name, shape, hf, gguf, in_hf, in_gguf, self.optional, of_experts)


def _bias_name(weight: str) -> str:
    if weight.endswith("weight"):
        return weight.removesuffix("weight") + "bias"
    return f"{weight}_bias"


def _sizes(config: ModelConfig) -> dict[str, int]:
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    experts, latent = config.experts, config.latent
    if latent is not None:
        queries = config.num_heads * (latent.nope_dim + latent.rope_dim)
    return {
        "1": 1,
        "D": config.hidden_size,
        "F": config.intermediate_size,
        "V": config.vocab_size,
        "P": config.max_position,
        "O": 0 if config.encoder is None else config.encoder.first_position,
        "Y": 0 if config.encoder is None else config.encoder.num_token_types,
        "H": config.head_dim,
        "N": config.num_heads,
        "K": config.num_kv_heads,
        "q": queries,
        "k": keys,
        "g": queries // config.num_kv_heads,
        "o": config.attention_width,
        "L": 0 if latent is None else latent.kv_rank,
        "R": 0 if latent is None else latent.rope_dim,
        "a": config.head_dim,
        "Q": 0 if latent is None or latent.q_rank is None else latent.q_rank,
        "M": 0 if latent is None else latent.nope_dim,
        "U": 0 if latent is None else latent.value_dim,
        "c": 0 if config.rope is None else config.rope.dim // 2,
        "E": 0 if experts is None else experts.count,
        "X": 0 if experts is None else experts.size,
        "S": 0 if experts is None else experts.shared_size,
    }


def has_head(config: ModelConfig, layer: int) -> bool:
    return config.has_head

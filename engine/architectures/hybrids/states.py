"""The settings and sizes of layers that keep a state of fixed size for each sequence, where other
layers keep keys and values: short convolutions, Mamba-2 and Gated DeltaNet.
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple

# What combines the tokens of a layer: attention, a short convolution, Mamba-2, Gated DeltaNet, or
# nothing.
Mixer = Literal["attention", "conv", "mamba2", "delta", "none"]
STATE_MIXERS: tuple[Mixer, ...] = ("conv", "mamba2", "delta")
_MAX_CONV, _MAX_SIZE = 64, 65536


class MixerSizes(NamedTuple):
    projected: int  # width of the input projection's result
    channels: int  # channels of the convolution
    out: int  # width of the output projection's input
    state: int  # number of float32 values that the state of a sequence has


@dataclass(frozen=True, slots=True)
class StateConfig:
    """Settings of the layers that keep a state. Each of these layers has a convolution over the
    last tokens. A layer with heads also has a matrix of `state_size` x `head_dim` per head.

    In Mamba-2, the heads of a group share B and C. In Gated DeltaNet, the value heads of a group
    share a query head and a key head.
    """

    conv_size: int  # the convolution reads this many tokens, the current one included
    conv_bias: bool = False
    proj_bias: bool = False  # the projections into and out of the layer have biases
    heads: int = 0
    head_dim: int = 0
    groups: int = 1
    state_size: int = 0
    norm_groups: int = 1  # Mamba-2 normalizes its output in this many parts

    def sizes(self, mixer: Mixer, hidden_size: int) -> MixerSizes:
        window = self.conv_size - 1
        if mixer == "conv":
            return MixerSizes(3 * hidden_size, hidden_size, hidden_size, window * hidden_size)
        inner = self.heads * self.head_dim
        channels = inner + 2 * self.groups * self.state_size
        gates = self.heads if mixer == "mamba2" else 2 * self.heads
        floats = window * channels + inner * self.state_size
        return MixerSizes(inner + channels + gates, channels, inner, floats)

    def parts(self, mixer: Mixer, hidden_size: int) -> dict[str, int]:
        """The matrices of the input projection, with their numbers of rows. In the projection's
        result, they follow each other in this order.
        """
        if mixer != "delta":
            return {"in": self.sizes(mixer, hidden_size).projected}
        keys, values = self.groups * self.state_size, self.heads * self.head_dim
        sizes = {"q": keys, "k": keys, "v": values, "gate": values}
        return {**sizes, "beta": self.heads, "alpha": self.heads}

    def letters(self, mixer: Mixer, hidden_size: int) -> dict[str, int]:
        """Sizes by the letters of `WeightRow`: J rows of the input projection, C channels of the
        convolution, L tokens that it reads, I width of the output projection's input, G groups,
        T heads, U head dim, Q all keys, R heads of a group, W all values of a group, O parts of
        the norm, Z the size of such a part.
        """
        if mixer not in STATE_MIXERS:
            return {}
        rows, channels, inner, _ = self.sizes(mixer, hidden_size)
        each = self.heads // self.groups
        return {
            **{"J": rows, "C": channels, "L": self.conv_size, "I": inner, "G": self.groups},
            **{"T": self.heads, "U": self.head_dim, "Q": self.groups * self.state_size},
            **{"B": self.state_size, "R": each, "W": each * self.head_dim},
            **{"O": self.norm_groups, "Z": inner // self.norm_groups},
        }

    def num_params(self, mixer: Mixer, hidden_size: int) -> int:
        """The number of weights in the matrices of a layer; 0 for layers without a state."""
        if mixer not in STATE_MIXERS:
            return 0
        sizes = self.sizes(mixer, hidden_size)
        return hidden_size * (sizes.projected + sizes.out) + sizes.channels * self.conv_size

    @property
    def is_sound(self) -> bool:
        """Whether the sizes are in range, and groups divide what they must divide."""
        sizes = (self.heads, self.head_dim, self.state_size)
        return (
            2 <= self.conv_size <= _MAX_CONV
            and all(0 <= size <= _MAX_SIZE for size in sizes)
            and 1 <= self.groups <= _MAX_SIZE
            and self.heads % self.groups == 0
            and self.norm_groups >= 1
            and self.heads * self.head_dim % self.norm_groups == 0
        )

"""What an interpretability request reads and changes inside the model, as a message to the engine.

Everything is data: names of sites, positions, and vectors as float32 bytes.
"""

from typing import Literal

import msgspec

Phase = Literal["both", "prompt", "decode"]
EditKind = Literal["add", "scale", "set", "project_out", "clamp"]


class Span(msgspec.Struct, frozen=True, array_like=True):
    """Positions of a sequence: all, or some, of the prompt's and of the generated tokens."""

    positions: tuple[int, ...] | None = None  # None: all. Negative: counted from the prompt's end
    phase: Phase = "both"

    def resolved(self, num_prompt: int) -> frozenset[int] | None:
        """The positions, counted from the start. None: all."""
        if self.positions is None:
            return None
        return frozenset(each + num_prompt if each < 0 else each for each in self.positions)

    @property
    def depends_on_prompt(self) -> bool:
        """Whether the positions depend on where the prompt ends."""
        return self.phase != "both" or any(each < 0 for each in self.positions or ())

    def count(self, num_prompt: int, num_tokens: int) -> int:
        """How many of the first `num_tokens` positions are meant."""
        start = num_prompt if self.phase == "decode" else 0
        end = min(num_prompt, num_tokens) if self.phase == "prompt" else num_tokens
        places = self.resolved(num_prompt)
        if places is None:
            return max(0, end - start)
        return sum(start <= each < end for each in places)


class Capture(msgspec.Struct, frozen=True, array_like=True):
    site: str
    span: Span = Span()


class Edit(msgspec.Struct, frozen=True, array_like=True):
    """A change of the values at a site. `vectors` has one vector for all positions, or one for each
    of `span.positions`. With kind "clamp", it has the encoder's and the decoder's vector of a
    feature, and `scale` is the wanted value.
    """

    site: str
    kind: EditKind
    scale: float = 1.0
    vectors: tuple[bytes, ...] = ()
    span: Span = Span()
    bias: float = 0.0  # of the feature, with kind "clamp"
    threshold: float = 0.0


class Lens(msgspec.Struct, frozen=True, array_like=True):
    """Logits that the final norm and the LM head give for the residual streams after layers."""

    layers: tuple[int, ...]
    top: int
    span: Span = Span()
    # For each layer, the matrix and the bias of a tuned lens, as float32 bytes: x + A x + b. Empty:
    # the plain logit lens
    tuned: tuple[tuple[bytes, bytes], ...] = ()


class AttentionPattern(msgspec.Struct, frozen=True, array_like=True):
    """Attention patterns of layers: the weights over all earlier positions."""

    layers: tuple[int, ...]
    heads: tuple[int, ...] | None = None  # None: all
    span: Span = Span()


class Attribution(msgspec.Struct, frozen=True, array_like=True):
    """What each part of the model adds to a token's logit at a position."""

    target: int | None = None  # a token id; None: the likeliest token
    position: int = -1
    method: Literal["direct", "input_x_gradient"] = "direct"


class InterpRequest(msgspec.Struct, frozen=True):
    """All that one request reads and changes."""

    captures: tuple[Capture, ...] = ()
    edits: tuple[Edit, ...] = ()
    lens: Lens | None = None
    attention: AttentionPattern | None = None
    attribution: Attribution | None = None
    max_bytes: int = 128 * 2**20  # of all that the request reads, changes and sends back
    # How many features of an autoencoder the frontend tells of each position of the last capture
    features_top: int = 0

    @property
    def reads(self) -> bool:
        return bool(self.captures or self.lens or self.attention or self.attribution)

    def only_edits(self) -> "InterpRequest | None":
        """What changes the answer. None if nothing does."""
        return InterpRequest(edits=self.edits, max_bytes=self.max_bytes) if self.edits else None

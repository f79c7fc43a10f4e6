"""A weight as data: its name and shape in the engine, and its name and form in each file format."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Transform:
    """How a file stores a weight, if not in our form. In our form, a matrix is (out, in), and in
    each head RoPE rotates row i together with row i + dim / 2 ("neox" order).
    """

    transposed: bool = False  # the file stores the matrix as (in, out)
    # The stored matrix may have rows of other weights too. It consists of `groups` groups of equal
    # size. In each group, the rows of this weight follow `before` other rows, and `after` other
    # rows follow them.
    groups: int = 1
    before: int = 0
    after: int = 0
    # In each head of `head_dim` rows, the file stores the two rows of each rotary pair next to each
    # other. This holds for `paired` rows of the head, which follow `unpaired` other rows.
    head_dim: int = 1
    paired: int = 0
    unpaired: int = 0
    added: float = 0.0  # our values are the stored values plus this number
    is_log: bool = False  # our values are -exp(stored value)
    # The stored shape, if it differs although the values are in the same order. A convolution, for
    # example, is stored as (channels, 1, window).
    reshaped: tuple[int, ...] = ()
    # The rows of this weight in the stored matrix are the columns of our matrix.
    turned: bool = False
    # Only for weights with a matrix per expert or per head: the file stores them as one matrix, one
    # below the other.
    joined: bool = False

    @property
    def is_part(self) -> bool:
        """Whether the stored matrix also has rows of other weights."""
        return self.before + self.after > 0

    def stored_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of the stored matrix or vector, for a weight of this shape."""
        if self.reshaped:
            return self.reshaped
        shape = shape[::-1] if self.turned else shape
        rows = shape[0] + self.groups * (self.before + self.after)
        stored = (rows, *shape[1:])
        return stored[::-1] if self.transposed else stored


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One weight: the engine's name and shape for it, and how each file format names and stores it.

    `hf` and `gguf` are its names in the two formats, or None if the format never has this weight.
    Several weights may be parts of the same stored tensor. Files may lack a weight that is
    `optional`. If `of_experts`, the first dimension of `shape` counts experts or heads, and the
    transforms describe the matrix of one of them. If the name has "{e}", the file has one tensor
    per expert. `older_gguf` is a name in older GGUF files, which store the tensor as Hugging Face
    does.
    """

    name: str
    shape: tuple[int, ...]
    hf: str | None
    gguf: str | None
    hf_transform: Transform = Transform()
    gguf_transform: Transform = Transform()
    optional: bool = False
    of_experts: bool = False
    older_gguf: str | None = None

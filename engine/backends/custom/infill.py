"""Fill in the middle: the prompt's form for a text with a gap, where a model was trained on one.

Families mark the parts with tokens of their own, in an order of their own; which one a model has is
told by its vocabulary.
"""

from dataclasses import dataclass

from engine.core.utils.tokenizer import Tokenizer

PREFIX, SUFFIX = "prefix", "suffix"
# Each form: marker, then the part that follows it (None: what the model is to write).
FORMS: tuple[tuple[tuple[str, str | None], ...], ...] = (
    (("<|fim_prefix|>", PREFIX), ("<|fim_suffix|>", SUFFIX), ("<|fim_middle|>", None)),
    (("<fim_prefix>", PREFIX), ("<fim_suffix>", SUFFIX), ("<fim_middle>", None)),
    (("<fim-prefix>", PREFIX), ("<fim-suffix>", SUFFIX), ("<fim-middle>", None)),
    (("<｜fim▁begin｜>", PREFIX), ("<｜fim▁hole｜>", SUFFIX), ("<｜fim▁end｜>", None)),
    (("▁<PRE>", PREFIX), ("▁<SUF>", SUFFIX), ("▁<MID>", None)),
    (("[SUFFIX]", SUFFIX), ("[PREFIX]", PREFIX)),
)


@dataclass(frozen=True)
class Infill:
    """A model's form: token ids, each before a part of the text."""

    parts: tuple[tuple[int, str | None], ...]

    def encode(self, tokenizer: Tokenizer, prefix: str, suffix: str) -> tuple[int, ...]:
        texts = {PREFIX: prefix, SUFFIX: suffix, None: ""}
        ids = tokenizer.encode_prompt("")
        for marker, part in self.parts:
            ids.append(marker)
            ids.extend(tokenizer.encode(texts[part]))
        return tuple(ids)


def find_infill(tokenizer: Tokenizer) -> Infill | None:
    for form in FORMS:
        ids = [(tokenizer.token_id(marker), part) for marker, part in form]
        parts = tuple((marker, part) for marker, part in ids if marker is not None)
        if len(parts) == len(form):
            return Infill(parts)
    return None

"""Prompt formats for tasks other than chats: filling in the middle, and ranking pairs of texts."""

from dataclasses import dataclass

from engine.core.text.tokenizer import RenderedPrompt, Tokenizer

PREFIX, SUFFIX = "prefix", "suffix"
# Fill-in-the-middle formats. A format is a list of marker tokens, each with the part of the text
# that follows the marker. None stands for the part that the model writes.
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
    """A model's fill-in-the-middle format. `parts` has pairs of a marker's token id and the part of
    the text that follows the marker.
    """

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


RANK_SYSTEM = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".'
)
RANK_INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"


@dataclass(frozen=True)
class Ranker:
    """A decoder that answers whether a document fits a query, in the format of Qwen3-Reranker. The
    score is sigmoid(hidden state * direction): the probability of "yes" instead of "no".
    """

    start_id: int  # id of <|im_start|>
    end_id: int  # id of <|im_end|>
    direction: tuple[float, ...]  # the LM head's row of "yes" minus that of "no"

    def encode(
        self, tokenizer: Tokenizer, query: str, document: str, max_tokens: int | None
    ) -> tuple[int, ...]:
        """The prompt of a pair. To stay within `max_tokens`, the end of the document is cut."""
        before = (self.start_id, f"system\n{RANK_SYSTEM}", self.end_id, "\n", self.start_id)
        opening = tokenizer.encode_rendered(RenderedPrompt((*before, "user\n")))
        asked = f"<Instruct>: {RANK_INSTRUCTION}\n<Query>: {query}\n<Document>: {document}"
        after = (self.end_id, "\n", self.start_id, "assistant\n<think>\n\n</think>\n\n")
        closing = tokenizer.encode_rendered(RenderedPrompt(after))
        ids = tokenizer.encode(asked)
        if max_tokens is not None:
            ids = ids[: max(0, max_tokens - len(opening) - len(closing))]
        return (*opening, *ids, *closing)

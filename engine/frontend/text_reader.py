"""Joins the deltas of one choice, and turns its tokens into text and its parts."""

from collections.abc import Sequence

from msgspec.structs import replace

from engine.core.interfaces.request import SamplingParams, TokenDelta
from engine.core.parsing.pieces import Piece
from engine.core.text.tokenizer import Detokenizer
from engine.frontend.prompts import Prepared
from engine.frontend.text_model import TextModel


class TextReader:
    """Turns the tokens of one choice into text, which is cut at stop strings. If there is a parser,
    it separates reasoning and tool calls from the answer.
    """

    def __init__(self, text: TextModel, params: SamplingParams, prepared: Prepared) -> None:
        self._detokenizer = Detokenizer(
            text.tokenizer,
            params.stop,
            skip_special=params.skip_special_tokens,
            continuation=prepared.continuation,
            shown=prepared.shown,
            patterns=prepared.stop_patterns,
        )
        self._decode = self._detokenizer.push
        self._min_tokens = params.min_tokens
        self._num_tokens = 0
        self._parser = None if prepared.new_parser is None else prepared.new_parser()
        self._parse = None if self._parser is None else self._parser.push
        # True if there is no parser, because the whole output is plain text.
        self.is_plain = self._parser is None
        # The detokenizer alone. None if something besides the engine may end the output, or parses
        # it.
        is_unbounded = self.is_plain and not (params.stop or prepared.stop_patterns)
        self.push = self._decode if is_unbounded else None

    def text(self, token_ids: tuple[int, ...], ends: bool) -> str:
        self._num_tokens += len(token_ids)
        text = self._decode(token_ids, self._num_tokens > self._min_tokens)
        if ends or self.stopped is not None:
            text += self._detokenizer.flush()
        return text

    def pieces(self, token_ids: tuple[int, ...], ends: bool) -> list[Piece]:
        assert self._parser is not None and self._parse is not None
        pieces = self._parse(self.text(token_ids, ends))
        return pieces + self._parser.flush() if ends or self.stopped is not None else pieces

    @property
    def stopped(self) -> str | None:
        return self._detokenizer.stopped

    @property
    def in_reasoning(self) -> bool:
        return self._parser is not None and self._parser.in_reasoning

    @property
    def num_calls(self) -> int:
        return 0 if self._parser is None else self._parser.num_calls


def is_plain(delta: TokenDelta) -> bool:
    """Whether a delta has tokens in the middle of a choice, and nothing else."""
    return bool(
        delta.token_ids
        and delta.finish_reason is None
        and delta.logprobs is None
        and not delta.num_drafted
    )


def merged(run: Sequence[TokenDelta]) -> TokenDelta:
    """Consecutive deltas of one choice as one delta."""
    first, last = run[0], run[-1]
    scores = [delta.logprobs for delta in run if delta.logprobs is not None]
    return replace(
        first,
        token_ids=tuple(token for delta in run for token in delta.token_ids),
        logprobs=tuple(each for some in scores for each in some) if scores else None,
        finish_reason=last.finish_reason,
        stop_token_id=last.stop_token_id,
        error_code=last.error_code,
        error_message=last.error_message,
        retry_after=last.retry_after,
        timeline=last.timeline,
        num_drafted=sum(delta.num_drafted for delta in run),
        num_accepted=sum(delta.num_accepted for delta in run),
    )

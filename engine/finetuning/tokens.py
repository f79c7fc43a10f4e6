"""Turns examples into token ids, with the same tokenizer and chat template that serve the model.

A mask says which tokens the model is trained on: those that it would generate itself.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from engine.core.errors import InvalidRequestError
from engine.core.interfaces.backend import ChatRequest, GenerationContext
from engine.core.interfaces.request import SamplingParams
from engine.finetuning.data import ChatExample, CompletionExample, Example, PreferenceExample
from engine.frontend.prompts import encode_chat
from engine.frontend.text_model import TextModel

_CONTEXT = GenerationContext(request_id="training", params=SamplingParams())


@dataclass(frozen=True, slots=True)
class TokenExample:
    """A tokenized example. `mask` says of each token whether the model is trained to predict it."""

    token_ids: tuple[int, ...]
    mask: tuple[bool, ...]

    @property
    def num_trained(self) -> int:
        return sum(self.mask[1:])  # the first token has no prediction


@dataclass(frozen=True, slots=True)
class TokenPair:
    """The preferred and the rejected answer to the same prompt."""

    preferred: TokenExample
    rejected: TokenExample


class ExampleTokenizer:
    def __init__(self, text: TextModel, max_tokens: int) -> None:
        self._text = text
        self._max_tokens = max_tokens
        self._num_cut = 0
        self._num_left_out = 0

    @property
    def notice(self) -> str:
        """What a user should know about the examples so far. Empty if they are trained whole."""
        if not self._num_cut:
            return ""
        text = f"Examples with more than {self._max_tokens:,} tokens, which were cut:"
        left_out = f" Left out, because the answer begins after that: {self._num_left_out}."
        return f"{text} {self._num_cut}.{left_out if self._num_left_out else ''}"

    def supervised(self, examples: Sequence[Example]) -> list[TokenExample]:
        """Tokenize examples. A conversation whose template rewrites earlier turns becomes several.
        Examples without a trained token within the limit are left out.
        """
        found: list[TokenExample] = []
        for example in examples:
            if isinstance(example, CompletionExample):
                found.append(self._completion(example))
            elif isinstance(example, ChatExample):
                found += self._chat(example)
        kept = [each for each in map(self._cut, found) if each.num_trained]
        self._num_left_out += len(found) - len(kept)
        if not kept:
            raise InvalidRequestError(
                f"no example has a token to train on among its first {self._max_tokens} tokens",
                param="training_file",
            )
        return kept

    def pairs(self, examples: Sequence[Example]) -> list[TokenPair]:
        found = []
        for example in examples:
            assert isinstance(example, PreferenceExample), example
            both = [
                self._cut(self._answer(example.messages, example.tools, text))
                for text in (example.preferred, example.rejected)
            ]
            if all(each.num_trained for each in both):
                found.append(TokenPair(*both))
        self._num_left_out += len(examples) - len(found)
        if not found:
            raise InvalidRequestError(
                f"no answer begins within the first {self._max_tokens} tokens",
                param="training_file",
            )
        return found

    def _completion(self, example: CompletionExample) -> TokenExample:
        tokenizer = self._text.tokenizer
        prompt = tokenizer.encode_prompt(example.prompt)
        answer = [*tokenizer.encode_continuation(example.completion), *self._end()]
        return TokenExample((*prompt, *answer), (False,) * len(prompt) + (True,) * len(answer))

    def _chat(self, example: ChatExample) -> list[TokenExample]:
        found: list[TokenExample] = []
        ids: tuple[int, ...] = ()
        mask: tuple[bool, ...] = ()
        for index in example.trained:
            turn = self._turn(example.messages[: index + 1], example.tools)
            start = turn.mask.index(True)
            if turn.token_ids[: len(ids)] != ids or start < len(ids):
                found.append(TokenExample(ids, mask))
                mask = ()
            mask = mask + (False,) * (start - len(mask)) + turn.mask[start:]
            ids = turn.token_ids
        return [*found, TokenExample(ids, mask)]

    def _turn(
        self, messages: Sequence[dict[str, Any]], tools: tuple[dict[str, Any], ...]
    ) -> TokenExample:
        """The prompt before the last message, and the tokens with which the model would give it."""
        prompt = self._encoded(messages[:-1], tools, add_generation_prompt=True)
        whole = self._encoded(messages, tools, add_generation_prompt=False)
        if whole[: len(prompt)] != prompt:
            raise InvalidRequestError(
                "the model's chat template writes an answer of the assistant otherwise than the "
                "model would generate it; use prompt and completion instead of messages",
                param="training_file",
            )
        ends = set(self._text.eos_ids)
        end = next(
            (at + 1 for at in range(len(prompt), len(whole)) if whole[at] in ends), len(whole)
        )
        mask = (False,) * len(prompt) + (True,) * (end - len(prompt))
        return TokenExample(whole[:end], mask)

    def _answer(
        self, messages: tuple[dict[str, Any], ...], tools: tuple[dict[str, Any], ...], text: str
    ) -> TokenExample:
        return self._turn([*messages, {"role": "assistant", "content": text}], tools)

    def _encoded(
        self,
        messages: Sequence[dict[str, Any]],
        tools: tuple[dict[str, Any], ...],
        add_generation_prompt: bool,
    ) -> tuple[int, ...]:
        request = ChatRequest(
            context=_CONTEXT,
            messages=tuple(messages),
            tools=tools,
            add_generation_prompt=add_generation_prompt,
        )
        return encode_chat(self._text, request)

    def _end(self) -> tuple[int, ...]:
        end = self._text.tokenizer.eos_id
        return () if end is None else (end,)

    def _cut(self, example: TokenExample) -> TokenExample:
        self._num_cut += len(example.token_ids) > self._max_tokens
        return TokenExample(example.token_ids[: self._max_tokens], example.mask[: self._max_tokens])

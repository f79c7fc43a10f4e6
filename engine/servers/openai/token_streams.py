"""Streams in vLLM's form, for requests with vLLM's parameters about tokens. Chunks have token ids
or the usage so far. The last tokens of a choice and its finish reason are in one chunk.
"""

from typing import Any

import msgspec

from engine.core.errors import EngineError
from engine.core.interfaces.backend import FinishEvent, TextEvent, UsageEvent
from engine.servers.openai.format import (
    END_OF_CHUNK,
    ChatStream,
    CompletionStream,
    Envelope,
    ending_body,
)
from engine.servers.openai.logprobs import chat_logprobs, legacy_logprobs, num_characters
from engine.servers.openai.token_fields import TokenFields
from engine.servers.serving.event_pump import EventPump, LastTokens, OutputEvent
from engine.servers.serving.sse import StreamFormat

_encode = msgspec.json.Encoder().encode


class TokenChatStream(ChatStream):
    """Chunks of `/v1/chat/completions`. The first chunk has the ids of the prompt."""

    def __init__(
        self,
        envelope: Envelope,
        num_choices: int,
        include_usage: bool,
        named_tool: bool,
        tokens: TokenFields,
        pump: EventPump,
    ) -> None:
        super().__init__(envelope, num_choices, include_usage, named_tool)
        self._tokens = tokens
        self._pump = pump

    def opening(self) -> bytes:
        opening = super().opening()
        if not self._tokens.has_ids:
            return opening
        prompt = b'],"prompt_token_ids":' + _encode(self._pump.prompts[0]) + self.tail[1:]
        return opening.replace(self.tail, prompt, 1)

    def chunk(self, event: OutputEvent) -> bytes:
        if isinstance(event, LastTokens) and event.text.num_tokens:
            ended = self.end_call(event.choice)
            return ended + self._chunk(event.text, self.ending(event))
        if isinstance(event, TextEvent) and (event.text or event.num_tokens):
            return self._chunk(event, {"finish_reason": None})
        return super().chunk(event)

    def _chunk(self, event: TextEvent, ending: dict[str, Any]) -> bytes:
        logprobs = None
        if event.logprobs:
            logprobs = chat_logprobs(self._tokens.answer(event.logprobs))
        elif not (
            event.text or ending["finish_reason"] or self._tokens.has_ids and event.token_ids
        ):
            return b""
        choice = {"index": event.choice, "delta": {"content": event.text}, "logprobs": logprobs}
        return self.head + _encode(choice | ending | _ids(event, self._tokens)) + self.tail


class TokenCompletionStream(CompletionStream):
    """Chunks of `/v1/completions`. The first chunk of each choice has the ids of its prompt."""

    def __init__(
        self,
        envelope: Envelope,
        num_choices: int,
        include_usage: bool,
        tokens: TokenFields,
        pump: EventPump,
    ) -> None:
        super().__init__(envelope, num_choices, include_usage)
        self._tokens = tokens
        self._pump = pump
        self._num_choices = num_choices
        self._begun: set[int] = set()

    def chunk(self, event: OutputEvent) -> bytes:
        if isinstance(event, LastTokens):
            return self._chunk(event.text, ending_body(event))
        if isinstance(event, FinishEvent):
            return self._chunk(TextEvent(event.choice, "", 0), ending_body(event))
        if isinstance(event, TextEvent):
            return self._chunk(event, {"finish_reason": None})
        return b""  # completions have no reasoning and no tool calls

    def _chunk(self, event: TextEvent, ending: dict[str, Any]) -> bytes:
        logprobs = None
        if event.logprobs:
            shown = self._tokens.answer(event.logprobs)
            logprobs = legacy_logprobs(shown, self.offsets[event.choice])
            self.offsets[event.choice] += sum(map(num_characters, event.logprobs))
        elif not (
            event.text or ending["finish_reason"] or self._tokens.has_ids and event.token_ids
        ):
            return b""
        choice: dict[str, Any] = {"index": event.choice, "text": event.text, "logprobs": logprobs}
        choice |= ending | _ids(event, self._tokens)
        if self._tokens.has_ids and event.choice not in self._begun:
            self._begun.add(event.choice)
            prompts = self._pump.prompts
            prompt = prompts[event.choice * len(prompts) // self._num_choices]
            choice["prompt_token_ids"] = prompt
        return self.head + _encode(choice) + self.tail


class RunningUsage:
    """A chunk stream in which every chunk has the usage so far (`continuous_usage_stats`). As in
    vLLM, a chunk counts the tokens of its own choice only.
    """

    def __init__(self, inner: StreamFormat, pump: EventPump, prompt_lengths: list[int]) -> None:
        self._inner = inner
        self._pump = pump
        self._prompts = prompt_lengths
        self._num_tokens = [0] * len(pump.choice_tokens)

    def opening(self) -> bytes:
        chunks = self._inner.opening().split(END_OF_CHUNK)
        counted = [each + self._usage(choice) for choice, each in enumerate(chunks[:-1])]
        return b"".join(counted)

    def chunk(self, event: OutputEvent) -> bytes:
        choice = event.choice
        if isinstance(event, TextEvent):
            self._num_tokens[choice] += event.num_tokens
        elif isinstance(event, FinishEvent):
            # Events without text are dropped if the client is slow, so their tokens are missing.
            self._num_tokens[choice] = self._pump.choice_tokens[choice]
        return self._inner.chunk(event).replace(END_OF_CHUNK, self._usage(choice))

    def closing(self, usage: UsageEvent) -> bytes:
        return self._inner.closing(usage)

    def failure(self, error: EngineError) -> bytes:
        return self._inner.failure(error)

    def _usage(self, choice: int) -> bytes:
        num_prompt = self._prompts[choice * len(self._prompts) // len(self._num_tokens)]
        num_tokens = self._num_tokens[choice]
        return b'"usage":{"prompt_tokens":%d,"completion_tokens":%d,"total_tokens":%d}}\n\n' % (
            num_prompt,
            num_tokens,
            num_prompt + num_tokens,
        )


def _shown_ids(event: TextEvent, tokens: TokenFields) -> tuple[int, ...]:
    return event.token_ids if tokens.has_ids else ()


def _ids(event: TextEvent, tokens: TokenFields) -> dict[str, Any]:
    return {"token_ids": event.token_ids} if tokens.has_ids else {}

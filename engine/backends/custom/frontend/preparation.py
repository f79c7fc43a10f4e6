"""Prepares requests for the engine. Text work runs in threads, so that it does not block the event
loop. Grammars are checked in a sandbox.
"""

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, TypeVar

import msgspec

from engine.backends.custom.frontend.prompts import (
    Prepared,
    check_prepared,
    encode_words,
    is_long,
    is_short,
    needs_words,
    prepare_chat,
    prepare_completion,
    truncated,
    with_expected,
    with_text_bias,
)
from engine.backends.custom.frontend.text_model import TextModel
from engine.core.grammar.checker import GrammarChecker
from engine.core.grammar.spec import stop_grammar
from engine.core.interfaces.backend import ChatRequest, CompletionRequest
from engine.core.interfaces.request import SamplingParams
from engine.core.text.long_texts import after_other_long_texts

T = TypeVar("T")
TOKENIZER_THREADS = 2


class Times(NamedTuple):
    """When the preparation of a request began, when its prompt was tokenized, and when its grammars
    were checked.
    """

    began_at: float
    encoded_at: float
    checked_at: float


class Preparer:
    def __init__(self) -> None:
        self._encoders = ThreadPoolExecutor(TOKENIZER_THREADS, thread_name_prefix="tokenize")
        self._checker = GrammarChecker()

    async def close(self) -> None:
        await self._checker.close()
        self._encoders.shutdown(wait=False)

    async def encode(self, work: Callable[..., T], *arguments: Any) -> T:
        """Run slow text work in a thread."""
        if any(map(is_long, arguments)):
            return await after_other_long_texts(work, *arguments)
        return await asyncio.get_running_loop().run_in_executor(self._encoders, work, *arguments)

    async def prepare(
        self, request: ChatRequest | CompletionRequest, text: TextModel, max_seq_len: int
    ) -> tuple[Prepared, SamplingParams, Times]:
        """The request's prompt as token ids, and its parameters as the engine takes them."""
        began_at, context = time.monotonic(), request.context
        prepare = prepare_chat if isinstance(request, ChatRequest) else prepare_completion
        if is_short(request):
            prepared = prepare_completion(text, request)
        else:
            prepared = await self.encode(prepare, text, request)
        if context.truncate_prompt_tokens is not None:
            prepared = await self.encode(truncated, text, prepared, context, max_seq_len)
        encoded_at = time.monotonic()
        check_prepared(prepared, context.params, max_seq_len, text.config.vocab_size)
        prepared = await self._checked(prepared, context.params, text)
        if context.expected:
            prepared = await self.encode(with_expected, text, prepared, context.expected)
        times = Times(began_at, encoded_at, time.monotonic())
        params = context.params
        if params.logprob_token_ids:  # the engine takes them from the logprobs of all tokens
            params = msgspec.structs.replace(params, logprobs=text.config.vocab_size)
        if params.text_bias:
            params = await self.encode(with_text_bias, text, params)
        return prepared, params, times

    async def _checked(
        self, prepared: Prepared, params: SamplingParams, text: TextModel
    ) -> Prepared:
        if prepared.checked_grammar is not None:
            await self._checker.check(prepared.checked_grammar, prepared.grammar_param)
        if not needs_words(params):
            return prepared
        for pattern in params.stop_regex:
            await self._checker.check(stop_grammar(pattern), "stop_regex")
        return await self.encode(encode_words, text, prepared, params)

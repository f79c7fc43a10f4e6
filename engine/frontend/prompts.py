"""Prepares a request for the engine: makes the prompt tokens, the output parser and the grammar,
and validates the request. Grammars are checked in a sandbox.

Functions that render templates, tokenize or build grammars run in a tokenizer thread and not on the
event loop, because their time grows with the client's input.
"""

import asyncio
import functools
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeGuard, TypeVar

import msgspec

from engine.backends.base import check_context
from engine.core.errors import InvalidRequestError
from engine.core.grammar.checker import GrammarChecker
from engine.core.grammar.spec import grammar_text, stop_grammar
from engine.core.interfaces.backend import (
    IMAGE_MARK,
    ChatRequest,
    CompletionRequest,
    GenerationContext,
)
from engine.core.interfaces.request import (
    AdapterRef,
    GenerateRequest,
    ImageInput,
    SamplingParams,
)
from engine.core.parsing.parser import OutputParser
from engine.core.text.long_texts import after_other_long_texts
from engine.core.text.stop_strings import StopPattern
from engine.core.text.tokenizer import RenderedPrompt
from engine.frontend.text_model import ChatFormat, TextModel

T = TypeVar("T")
TOKENIZER_THREADS = 2
# The last tokens of the prompt, this many, are detokenized to see whether the prompt ends inside a
# reasoning section.
TAIL_TOKENS = 16
SHORT_TEXT = 256  # characters
LONG_TEXT = 32_768  # characters or tokens; tokenizing this many takes a few milliseconds


@dataclass(frozen=True)
class Prepared:
    """A prompt as token ids, and how its output must be handled. The latter differs between chat
    and completion requests.
    """

    token_ids: tuple[int, ...]
    param: str  # the prompt's field name in the client's API
    grammar: str | None = None
    # The same grammar in a form that can be checked without the model's vocabulary.
    checked_grammar: str | None = None
    grammar_param: str = ""
    # Makes a parser that finds reasoning and tool calls. None if the output is plain text.
    new_parser: Callable[[], OutputParser] | None = None
    # Ids of control tokens whose text the parser needs. All other control tokens are left out of
    # the text.
    shown: frozenset[int] = frozenset()
    continuation: bool = False  # True: the output continues the prompt and keeps a leading space
    echo: str | None = None  # the text of the prompt, if it is returned before the output
    images: tuple[ImageInput, ...] = ()
    # Texts of the sampling parameters, as token ids and as compiled expressions
    bad_words: tuple[tuple[int, ...], ...] = ()
    dry_breakers: tuple[tuple[int, ...], ...] = ()
    stop_patterns: tuple[StopPattern, ...] = ()
    expected: tuple[int, ...] = ()  # the output that the client expects

    def request(
        self,
        context: GenerationContext,
        params: SamplingParams,
        eos_ids: tuple[int, ...],
        max_seq_len: int,
        adapter: AdapterRef | None = None,
    ) -> GenerateRequest:
        """The request to the engine."""
        return GenerateRequest(
            request_id=context.request_id,
            prompt=self.token_ids,
            params=params,
            eos_ids=eos_ids,
            priority=context.priority,
            salt=context.salt,
            tenant=context.tenant,
            timeout_s=context.timeout_s,
            queue_timeout_s=context.queue_timeout_s,
            grammar=self.grammar,
            images=self.images,
            bad_words=self.bad_words,
            dry_breakers=self.dry_breakers,
            expected=self.expected[:max_seq_len],
            reports_progress=context.on_progress is not None,
            tells_begin=context.on_wait is not None,
            adapter=adapter,
            interp=context.interp,
        )


def is_long(asked: object) -> bool:
    """Whether a request or prompt is so long that short prompts should not wait until it is
    tokenized.
    """
    if isinstance(asked, CompletionRequest):
        asked = asked.prompt
    if isinstance(asked, ChatRequest):
        return any("images" in message for message in asked.messages) or (
            sum(len(message["content"] or "") for message in asked.messages) > LONG_TEXT
        )
    return isinstance(asked, str | tuple) and len(asked) > LONG_TEXT


def is_short(request: ChatRequest | CompletionRequest) -> TypeGuard[CompletionRequest]:
    """Whether a prompt is prepared in less time than it takes to wake a thread for it. Prompts of
    token ids are, because they are not tokenized.
    """
    if not isinstance(request, CompletionRequest) or request.context.grammar is not None:
        return False
    limit = SHORT_TEXT if isinstance(request.prompt, str) else LONG_TEXT
    return len(request.prompt) <= limit and not (request.suffix or request.echo)


def prepare_chat(text: TextModel, request: ChatRequest) -> Prepared:
    choice, spec = request.tool_choice, request.context.grammar
    tools = () if choice.mode == "none" else request.tools
    token_ids, images = _encoded(text, request)
    output = (text.tool_chat if tools else text.chat).output
    tail = text.tokenizer.decode(token_ids[-TAIL_TOKENS:], skip_special=False)
    opened = output.opens_reasoning(tail)
    answer = None if spec is None else grammar_text(spec)
    asked = (tools, choice, request.parallel_tool_calls, answer, opened)
    has_structure = bool(tools) or output.reasoning is not None or output.is_framed
    return Prepared(
        token_ids,
        "messages",
        grammar=output.grammar(*asked),
        # This form of the grammar is checked without the model, so it must not refer to control
        # tokens.
        checked_grammar=output.by_text().grammar(*asked),
        grammar_param="tools" if spec is None else spec.param,
        new_parser=functools.partial(output.parser, tools, choice, opened)
        if has_structure
        else None,
        shown=output.shown_ids(with_tools=bool(tools)) if has_structure else frozenset(),
        continuation=request.continue_final_message,
        echo="" if request.context.params.score_prompt else None,
        images=images,
    )


def encode_chat(text: TextModel, request: ChatRequest) -> tuple[int, ...]:
    """The token ids of a conversation, rendered by the model's chat template."""
    return _encoded(text, request)[0]


def _encoded(
    text: TextModel, request: ChatRequest
) -> tuple[tuple[int, ...], tuple[ImageInput, ...]]:
    """The token ids of a conversation, and its images."""
    if not any("images" in message for message in request.messages):
        return tuple(text.tokenizer.encode_rendered(_rendered(text, request, request.messages))), ()
    from engine.frontend import images  # few requests have images

    vision = text.config.vision
    prepared = images.prepare_images(
        request.messages, vision, text.tokenizer, text.config.max_position
    )
    assert vision is not None
    rendered = _rendered(text, request, images.without_marks(request.messages), images.as_parts)
    rendered = images.with_images(rendered, prepared, vision)
    token_ids = tuple(text.tokenizer.encode_rendered(rendered))
    return token_ids, images.placed(token_ids, prepared, vision)


def _rendered(
    text: TextModel,
    request: ChatRequest,
    conversation: Sequence[Mapping[str, Any]],
    as_parts: Callable[[str], Any] | None = None,
) -> RenderedPrompt:
    """The prompt of a conversation. `as_parts` splits contents that have images."""
    tools = () if request.tool_choice.mode == "none" else request.tools
    chat = text.tool_chat if tools else text.chat
    messages, template_tools = chat.output.prepare(conversation, tools)
    rendered = chat.template.render(
        [_shaped(message, chat, as_parts) for message in messages],
        text.tokenizer.specials,
        request.add_generation_prompt and not request.continue_final_message,
        tools=template_tools,
        **request.template_options,
    )
    if request.continue_final_message:
        rendered = _unfinished(rendered, messages[-1]["content"])
    return rendered


def _shaped(
    message: dict[str, Any], chat: ChatFormat, as_parts: Callable[[str], Any] | None
) -> dict[str, Any]:
    """The message with its content as a list of parts, if it has images, or if the template takes
    only lists.
    """
    content = message["content"]
    if as_parts is not None and IMAGE_MARK in (content or ""):
        return {**message, "content": as_parts(content)}
    if chat.takes_only_parts:
        return {**message, "content": [{"type": "text", "text": content or ""}]}
    return message


def _unfinished(rendered: RenderedPrompt, content: str) -> RenderedPrompt:
    """Remove what the template writes after the content of the last message, so that the model
    continues this message.

    Some templates strip white space from a message. White space at the end of the content is kept
    only if the template keeps it.
    """
    written = content.strip()
    if not written:
        raise InvalidRequestError(
            "The last message has no text that could be continued; leave the message out, or set "
            "continue_final_message to false.",
            param="continue_final_message",
        )
    space = content[len(content.rstrip()) :]
    for index in reversed(range(len(rendered.segments))):
        segment = rendered.segments[index]
        if not isinstance(segment, str) or (start := segment.rfind(written)) < 0:
            continue
        end = start + len(written)
        end += len(space) if segment.startswith(space, end) else 0
        return RenderedPrompt((*rendered.segments[:index], segment[:end]))
    raise InvalidRequestError(
        "This model's template changes the last message, so it can't be continued.",
        param="continue_final_message",
    )


def prepare_completion(text: TextModel, request: CompletionRequest) -> Prepared:
    prompt, spec = request.prompt, request.context.grammar
    if request.suffix is not None:
        token_ids = _infilled(text, request)
    else:
        token_ids = text.encode_prompt(prompt, request.add_special_tokens, request.parse_special)
    echo = None
    if request.echo:
        echo = prompt if isinstance(prompt, str) else _echoed(text, prompt)
    grammar = None if spec is None else grammar_text(spec)
    return Prepared(
        token_ids,
        "prompt",
        grammar=grammar,
        checked_grammar=grammar,
        grammar_param="" if spec is None else spec.param,
        continuation=True,
        echo=echo,
    )


def _echoed(text: TextModel, token_ids: tuple[int, ...]) -> str:
    """The text of a prompt that was sent as token ids. It has the names of control tokens, because
    the prompt's logprobs have them too.
    """
    return text.tokenizer.decode(token_ids, skip_special=False)


def _infilled(text: TextModel, request: CompletionRequest) -> tuple[int, ...]:
    if text.infill is None:
        raise InvalidRequestError(
            "This model was not made to fill in the text before a suffix.", param="suffix"
        )
    if not isinstance(request.prompt, str):
        raise InvalidRequestError("With a suffix, the prompt must be text.", param="prompt")
    return text.infill.encode(text.tokenizer, request.prompt, request.suffix or "")


def truncated(
    text: TextModel, prepared: Prepared, context: GenerationContext, max_seq_len: int
) -> Prepared:
    """If the request sets `truncate_prompt_tokens`, cut the prompt to this many tokens. With
    `echo`, only the kept tokens are returned.
    """
    limit = context.truncate_prompt_tokens
    if limit is None:
        return prepared
    if limit < 0:
        limit = max(1, max_seq_len - (context.params.max_tokens or 1))
    if len(prepared.token_ids) <= limit:
        return prepared
    if prepared.images:
        raise InvalidRequestError(
            "A prompt with images can't be cut; shorten it.", param="truncate_prompt_tokens"
        )
    token_ids = prepared.token_ids
    kept = token_ids[-limit:] if context.truncation_side == "left" else token_ids[:limit]
    echo = _echoed(text, kept) if prepared.echo else prepared.echo
    return replace(prepared, token_ids=kept, echo=echo)


def needs_words(params: SamplingParams) -> bool:
    return bool(params.bad_words or params.dry_multiplier or params.stop_regex)


def encode_words(text: TextModel, prepared: Prepared, params: SamplingParams) -> Prepared:
    """Encode bad words and DRY's sequence breakers, and compile the regular expressions. A bad word
    is encoded both as it is and after a space, because the two have different tokens.
    """
    tokenizer = text.tokenizer
    spellings = {
        tuple(tokenizer.encode(spelling)): None
        for word in params.bad_words
        for spelling in (word, " " + word.lstrip())
    }
    breakers = params.dry_sequence_breakers if params.dry_multiplier else ()
    sequences = {ids: None for each in breakers for ids in tokenizer.sequences_with(each)}
    return replace(
        prepared,
        bad_words=tuple(ids for ids in spellings if ids),
        dry_breakers=tuple(sequences),
        stop_patterns=tuple(map(StopPattern, params.stop_regex)),
    )


def with_expected(text: TextModel, prepared: Prepared, expected: str) -> Prepared:
    """Encode the answer that the client expects."""
    return replace(prepared, expected=tuple(text.tokenizer.encode_continuation(expected)))


def with_text_bias(text: TextModel, params: SamplingParams) -> SamplingParams:
    """The parameters with the biases of texts as biases of their tokens."""
    biases = dict(params.logit_bias)
    for each, bias in params.text_bias.items():
        biases |= dict.fromkeys(text.tokenizer.encode(each), bias)
    return msgspec.structs.replace(params, logit_bias=biases, text_bias={})


def check_prepared(
    prepared: Prepared, params: SamplingParams, max_seq_len: int, vocab_size: int
) -> None:
    """Refuse requests that the engine cannot compute. The errors name the fields of the client's
    API. The engine repeats only the checks that protect other requests.
    """
    # The length is checked first, so that the token ids of an oversized prompt are never scanned.
    check_context(len(prepared.token_ids), params.max_tokens, max_seq_len, prepared.param)
    check_prompt(prepared.token_ids, vocab_size, prepared.param)
    check_params(params, vocab_size)


def check_prompt(prompt: tuple[int, ...], vocab_size: int, param: str) -> None:
    if not prompt:
        raise InvalidRequestError("The prompt has no tokens.", param=param)
    _check_ids(prompt, vocab_size, param)


def check_params(params: SamplingParams, vocab_size: int) -> None:
    _check_ids(params.logit_bias, vocab_size, "logit_bias")
    _check_ids(params.stop_token_ids, vocab_size, "stop_token_ids")
    _check_ids(params.logprob_token_ids, vocab_size, "logprob_token_ids")
    _check_ids(params.allowed_token_ids, vocab_size, "allowed_token_ids")
    if params.logprobs is not None and params.logprobs > vocab_size:
        raise InvalidRequestError(
            f"logprobs must be at most {vocab_size}, the model's tokens.", param="logprobs"
        )


def _check_ids(ids: Iterable[int], vocab_size: int, param: str) -> None:
    outside = next((token for token in ids if not 0 <= token < vocab_size), None)
    if outside is not None:
        raise InvalidRequestError(
            f"Token id {outside} is out of vocabulary: this model has {vocab_size} tokens, from 0.",
            param=param,
        )


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

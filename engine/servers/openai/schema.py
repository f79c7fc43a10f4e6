"""OpenAI's request bodies: the type and bounds of every field.

Types are strict: `"1"` and `true` are not numbers. Every number has a minimum and a maximum, and
NaN is refused. null means the same as a missing field. Names and defaults are OpenAI's. Fields that
OpenAI does not have are named as in vLLM.
"""

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from engine.core.interfaces.backend import GrammarSpec, ModelCard, ToolChoice
from engine.core.interfaces.request import SamplingParams
from engine.servers.http.errors import problem
from engine.servers.openai.beam_fields import BeamBody
from engine.servers.openai.token_fields import NO_FIELDS, AnyLogprobs, TokenBody, TokenFields
from engine.servers.schema import fields
from engine.servers.schema.body import SamplingBody, TokenLimitOrZero
from engine.servers.schema.tools import parse_tool_choice

MAX_LOGPROBS = 20
MAX_DOCUMENTS = 128
MAX_PREDICTED_PARTS = 1024
_NO_BEAMS = ("prompt_logprobs", "logprob_token_ids", "include_stop_str_in_output")
DEFAULT_COMPLETION_TOKENS = 16
# What to read and change inside the model (`core/interp/spec.py`)
InterpField = dict[str, Any] | None
# Parameters that few requests have.
BEAM_FIELDS = frozenset(BeamBody.__annotations__)
TOKEN_FIELDS = frozenset(TokenBody.__annotations__)

NumLogprobs = Annotated[int, Field(ge=0, le=MAX_LOGPROBS)]

ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class StreamOptions(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, defer_build=True)

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None  # vLLM's: usage in every chunk, with include_usage
    include_obfuscation: Literal[False] | None = None  # padding of chunks is not supported


class PredictedPart(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, defer_build=True)

    type: Literal["text"]
    text: str


class Prediction(BaseModel):
    """The answer that the client expects. It makes the answer faster, and does not change it."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, defer_build=True)

    type: Literal["content"]
    content: str | Annotated[list[PredictedPart], Field(max_length=MAX_PREDICTED_PARTS)]

    @property
    def text(self) -> str:
        if isinstance(self.content, str):
            return self.content
        return "".join(part.text for part in self.content)


class OpenAIBody(SamplingBody):
    model: fields.ModelName | None = None
    stream_options: StreamOptions | None = None
    response_format: fields.Format = None
    guided_json: fields.GuidedJson = None
    guided_regex: fields.GuidedRegex = None
    guided_choice: fields.GuidedChoice = None
    guided_grammar: fields.GuidedGrammar = None
    structured_outputs: fields.StructuredOutputs = None
    # OpenAI replaced the field `user` by these two fields.
    safety_identifier: fields.EndUser | None = None
    prompt_cache_key: Annotated[str, Field(max_length=512)] | None = None
    id_slot: Annotated[int, Field(ge=-1, le=2**31 - 1)] | None = None
    timings_per_token: bool | None = None
    return_progress: bool | None = None
    prediction: Prediction | None = None

    def has_any(self, names: frozenset[str]) -> bool:
        """Whether the client has sent any of these parameters."""
        return not names.isdisjoint(self.model_fields_set)

    @property
    def expected_text(self) -> str:
        return "" if self.prediction is None else self.prediction.text

    @property
    def end_user(self) -> str | None:
        return self.safety_identifier or self.user

    @property
    def conversation_key(self) -> str | None:
        # A slot of llama.cpp keeps the cache of one conversation.
        slot = f"slot {self.id_slot}" if self.id_slot not in (None, -1) else None
        return self.prompt_cache_key or slot or self.end_user

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.continuous_usage_stats)

    @property
    def reports_progress(self) -> bool:
        return bool(self.stream and (self.return_progress or self.timings_per_token))

    @property
    def grammar(self) -> GrammarSpec | None:
        return next(iter(self._grammars()), None)

    def _grammars(self) -> list[GrammarSpec]:
        given = (
            self.response_format.grammar if self.response_format is not None else None,
            self.guided_json,
            self.guided_regex,
            self.guided_choice,
            self.guided_grammar,
            self.structured_outputs,
        )
        return [each for each in given if each is not None]

    @property
    def has_format_description(self) -> bool:
        return self.response_format is not None and self.response_format.has_description

    @model_validator(mode="after")
    def _openai_fields_agree(self) -> "OpenAIBody":
        if self.stream_options is not None and not self.stream:
            raise problem("stream_options", "is only allowed when stream is true")
        grammars = self._grammars()
        if len(grammars) > 1:
            names = " and ".join(grammar.param for grammar in grammars[:2])
            raise problem(grammars[1].param, f"only one of {names} can be followed")
        return self


class EndOfPrompt(BaseModel):
    """How the prompt of a conversation ends: with the template's generation prompt, or inside the
    last message, which the model then continues.
    """

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, defer_build=True)

    messages: fields.Messages | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None

    @property
    def adds_generation_prompt(self) -> bool:
        """Whether a generation prompt is added. The default is yes, unless the last message is
        continued.
        """
        if self.add_generation_prompt is None:
            return not self.continue_final_message
        return self.add_generation_prompt

    def with_begun_answer(self) -> Self:
        """As in llama.cpp, a last message of the assistant is continued, unless the client says
        how the prompt ends.
        """
        said = (self.continue_final_message, self.add_generation_prompt)
        messages = self.messages or ()
        begun = [message["role"] == "assistant" for message in messages[-2:]]
        if said != (None, None) or not begun or not begun[-1] or "tool_calls" in messages[-1]:
            return self
        if all(begun[:-1]) and len(begun) > 1:
            raise problem("messages", "can't end with two messages of the assistant")
        return self.model_copy(update={"continue_final_message": True})

    @model_validator(mode="after")
    def _one_end(self) -> "EndOfPrompt":
        if self.continue_final_message and self.messages is not None:
            if self.add_generation_prompt:
                raise problem("continue_final_message", "excludes add_generation_prompt")
            last = self.messages[-1]
            if last["role"] != "assistant" or "tool_calls" in last:
                raise problem("continue_final_message", "needs a last message of an assistant")
        return self


class ChatPromptBody(EndOfPrompt):
    """A conversation that is only tokenized."""

    model: fields.ModelName | None = None
    tools: fields.Tools = ()
    chat_template_kwargs: fields.TemplateOptions = {}


class ChatBody(EndOfPrompt, TokenBody, BeamBody, OpenAIBody):
    messages: fields.Messages
    max_completion_tokens: fields.TokenCount | None = None
    logprobs: bool | None = None
    top_logprobs: AnyLogprobs | None = None
    tools: fields.Tools = ()
    tool_choice: fields.RawToolChoice = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: fields.TemplateOptions = {}
    reasoning_effort: ReasoningEffort | None = None
    enable_thinking: bool | None = None
    include_reasoning: bool | None = None
    verbosity: Literal["low", "medium", "high"] | None = None
    echo: bool | None = None
    documents: Annotated[list[dict[str, Any]], Field(max_length=MAX_DOCUMENTS)] | None = None
    store: bool | None = None
    verbose: bool | None = None
    interp: InterpField = None

    @property
    def choice_of_tools(self) -> tuple[ToolChoice, tuple[dict[str, Any], ...]]:
        if self.tool_choice is None and not self.tools:
            return ToolChoice("none"), ()
        return parse_tool_choice(self.tool_choice, self.tools)

    @model_validator(mode="after")
    def _chat_fields_agree(self) -> "ChatBody":
        if self.top_logprobs and not self.logprobs:
            raise problem("top_logprobs", "is only allowed when logprobs is true")
        limits = (self.max_tokens, self.max_completion_tokens)
        if None not in limits and limits[0] != limits[1]:
            raise problem("max_completion_tokens", "differs from max_tokens; send one of them")
        _ = self.choice_of_tools  # raises if it is invalid
        if self.has_any(TOKEN_FIELDS):
            self.check_tokens(self.num_top, echoes=False)
        if self.has_any(BEAM_FIELDS):
            self._check_best_of()
        return self

    def _check_best_of(self) -> None:
        others = [name for name in ("tools", *_NO_BEAMS) if getattr(self, name)]
        self.check_beams(self.grammar, *others)
        if self.best_of is not None and self.best_of < self.num_choices:
            raise problem("best_of", f"should be at least n, which is {self.num_choices}")
        if (self.best_of or 1) > 1 and not self.use_beam_search:
            raise problem("best_of", "is only allowed with use_beam_search, in a chat")

    @property
    def tells_tokens(self) -> bool:
        """Whether the answer tells more of its tokens than their text."""
        return self.num_top is not None or self.has_any(TOKEN_FIELDS)

    @property
    def num_top(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def tokens(self) -> TokenFields:
        return self.token_fields(self.num_top, echoes=False) if self.tells_tokens else NO_FIELDS

    def params(self, card: ModelCard) -> SamplingParams:
        limit = self.max_completion_tokens or self.max_tokens
        logprobs = self.num_top
        name = "max_completion_tokens" if self.max_completion_tokens else "max_tokens"
        return self.sampling(card, limit, logprobs, name)


class PromptText(BaseModel):
    """How the text of a prompt is tokenized."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, defer_build=True)

    # llama.cpp's: names of control tokens in a text become these tokens. The default is the key's.
    parse_special: bool | None = None
    add_special_tokens: bool | None = None  # vLLM's: BOS and EOS, if the model expects them


class CompletionBody(PromptText, TokenBody, BeamBody, OpenAIBody):
    prompt: fields.Prompts
    max_tokens: TokenLimitOrZero | None = None
    logprobs: AnyLogprobs | None = None
    echo: bool | None = None
    suffix: str | None = None
    interp: InterpField = None

    @property
    def only_echoes(self) -> bool:
        return self.max_tokens == 0

    @model_validator(mode="after")
    def _completion_fields_agree(self) -> "CompletionBody":
        if self.only_echoes and not self.echo:
            raise problem("max_tokens", "0 is only allowed with echo")
        if self.only_echoes and self.min_tokens:
            raise problem("min_tokens", "is more than max_tokens, which is 0")
        if self.best_of is not None:
            if self.best_of < self.num_choices:
                raise problem("best_of", f"should be at least n, which is {self.num_choices}")
            if self.stream and self.best_of > self.num_choices:
                raise problem("best_of", "can't be streamed; the best is known at the end")
        self.check_tokens(self.logprobs, bool(self.echo))
        others = [name for name in ("echo", "suffix", *_NO_BEAMS) if getattr(self, name)]
        self.check_beams(self.grammar, *others)
        return self

    @property
    def tokens(self) -> TokenFields:
        return self.token_fields(self.logprobs, bool(self.echo))

    def params(self, card: ModelCard) -> SamplingParams:
        """Sampling parameters for the backend. If `max_tokens` is 0, they request one token, which
        is left out of the answer.
        """
        limit = 1 if self.only_echoes else self.max_tokens or DEFAULT_COMPLETION_TOKENS
        return self.sampling(card, limit, self.logprobs)


class FimBody(PromptText, OpenAIBody):
    """Body of Mistral's `/v1/fim/completions`."""

    prompt: str
    suffix: str | None = None

    def params(self, card: ModelCard) -> SamplingParams:
        return self.sampling(card, self.max_tokens, None)


class GenerateBody(PromptText, SamplingBody):
    prompt: fields.OnePrompt
    model: fields.ModelName | None = None
    logprobs: NumLogprobs | None = None
    structured_outputs: fields.StructuredOutputs = None

    def params(self, card: ModelCard) -> SamplingParams:
        limit = DEFAULT_COMPLETION_TOKENS
        return self.sampling(card, self.max_tokens, self.logprobs, default_limit=limit)

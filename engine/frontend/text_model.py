"""The part of a model that the frontend needs: tokenizer and chat template, without weights."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from engine.architectures.base import EncoderConfig
from engine.core.errors import EngineError, ModelFormatError
from engine.core.interfaces.backend import ModelCard, TokenizerInfo
from engine.core.parsing.output import OutputFormat
from engine.core.text.chat_template import ChatTemplate
from engine.core.text.tokenizer import Tokenizer
from engine.frontend.prompt_formats import Infill, Ranker, find_infill
from engine.frontend.recommended import of_folder, of_gguf
from engine.frontend.text_cache import TextCache, TextFacts, key_of

if TYPE_CHECKING:
    from engine.architectures.vision import VisionConfig
    from engine.runtime.requests.grammar import Vocabulary
    from engine.weights.model import ModelSource


class ModelShape(Protocol):
    """The properties of a model that the frontend reports to clients, or needs to validate
    requests. `ModelConfig` has all of these properties.
    """

    @property
    def vocab_size(self) -> int: ...

    @property
    def hidden_size(self) -> int: ...

    @property
    def max_position(self) -> int: ...

    @property
    def num_params(self) -> int: ...

    @property
    def eos_ids(self) -> tuple[int, ...]: ...

    @property
    def encoder(self) -> EncoderConfig | None:
        """The settings of a text encoder. None for a decoder, which generates text."""
        ...

    @property
    def vision(self) -> "VisionConfig | None":
        """The settings of the image encoder. None for a model that reads only text."""
        ...


@dataclass(frozen=True)
class ChatFormat:
    """A chat template, and how the model answers to its prompts."""

    template: ChatTemplate
    output: OutputFormat

    @classmethod
    def of(cls, source: str | None, tokenizer: Tokenizer) -> "ChatFormat":
        template = ChatTemplate(source, tokenizer.bos, tokenizer.eos)
        render = None if source is None else template.text
        return cls(template, OutputFormat.of(source, tokenizer.specials.ids, render))

    @cached_property
    def takes_only_parts(self) -> bool:
        """Whether the template renders a message only if its content is a list of parts. Templates
        of some models that read images do.
        """
        return self.template.mentions("image") and not self._renders("content")

    def _renders(self, content: str) -> bool:
        try:
            return content in self.template.text([{"role": "user", "content": content}])
        except EngineError:
            return False


@dataclass(frozen=True)
class TextModel:
    """Turns messages and prompts into token ids, and interprets the ids that the model
    generates.
    """

    config: ModelShape
    tokenizer: Tokenizer
    chat: ChatFormat
    tool_chat: ChatFormat  # for requests with tools; most models have one format for both
    quantization: str | None
    size_bytes: int
    infill: Infill | None = None
    # Texts that are put before embedding inputs, by name. The name None has the default.
    prompts: Mapping[str | None, str] = field(default_factory=dict)
    embeds: bool = False  # a decoder that was trained for embeddings
    ranker: Ranker | None = None  # a decoder that was trained to score pairs of texts
    recommended: Mapping[str, Any] = field(default_factory=dict)  # sampling parameters

    @property
    def can_chat(self) -> bool:
        return self.tokenizer.chat_template is not None

    @cached_property
    def eos_ids(self) -> tuple[int, ...]:
        return tuple(sorted({*self.config.eos_ids, *self.tokenizer.eos_ids}))

    @property
    def capabilities(self) -> tuple[str, ...]:
        if self.config.encoder is not None or self.embeds or self.reranks:
            return ("rerank" if self.reranks else "embeddings", "score")
        found = ["completions", "embeddings", "json_schema"]
        if self.can_chat:
            found += ["chat", "tools"]
        if self.chat.output.reasoning is not None:
            found.append("reasoning")
        if self.infill is not None:
            found.append("suffix")
        return tuple(found)

    @property
    def emulated(self) -> tuple[str, ...]:
        """Names of the capabilities that the server offers although the model was not trained for
        them.
        """
        if self.config.encoder is not None or self.embeds or self.reranks:
            return ()
        needs_prompt = self.can_chat and not self.tool_chat.output.tools.native
        return ("embeddings", "tools") if needs_prompt else ("embeddings",)

    @property
    def template_options(self) -> tuple[str, ...]:
        """Options that a chat template of the model reads."""
        options = {*self.chat.template.options, *self.tool_chat.template.options}
        return tuple(sorted(options))

    @cached_property
    def tokenizer_info(self) -> TokenizerInfo:
        tokenizer = self.tokenizer
        return TokenizerInfo(
            vocab_size=self.config.vocab_size,
            bos_token=tokenizer.bos or None,
            bos_token_id=tokenizer.bos_id,
            eos_token=tokenizer.eos or None,
            eos_token_id=tokenizer.eos_id,
            chat_template=tokenizer.chat_template,
            special_tokens=dict(tokenizer.specials.ids),
        )

    def encode_prompt(
        self,
        prompt: str | tuple[int, ...],
        add_special_tokens: bool = True,
        parse_special: bool = False,
    ) -> tuple[int, ...]:
        if not isinstance(prompt, str):
            return prompt
        if not add_special_tokens:
            return tuple(self.tokenizer.encode(prompt, parse_special))
        return tuple(self.tokenizer.encode_prompt(prompt, parse_special=parse_special))

    def encode_input(
        self, text: str | tuple[int, ...], prompt: str | None, max_tokens: int | None
    ) -> tuple[tuple[int, ...], int]:
        """The tokens of an embedding input after the prompt of this name, and 0, because none has
        token type 1.
        """
        if isinstance(text, str):
            text = self.prompts.get(prompt, "") + text
        ids = self.encode_prompt(text)
        return (ids if max_tokens is None else self.cut_prompt(ids, max_tokens)), 0

    @property
    def reranks(self) -> bool:
        """Whether the model scores pairs of texts."""
        encoder = self.config.encoder
        return self.ranker is not None or (encoder is not None and encoder.head is not None)

    def encode_pair(
        self, first: str, second: str, max_tokens: int | None
    ) -> tuple[tuple[int, ...], int]:
        """The tokens of a pair of texts, and the index of the first token with token type 1."""
        if self.ranker is not None:
            return self.ranker.encode(self.tokenizer, first, second, max_tokens), 0
        ids, second_start = self.tokenizer.encode_pair(first, second, max_tokens)
        return tuple(ids), second_start

    def cut_prompt(self, prompt: tuple[int, ...], max_tokens: int) -> tuple[int, ...]:
        """Truncate a prompt to `max_tokens`. For models that were trained for embeddings, the first
        tokens and the end marker are kept. For others, the last tokens are kept.
        """
        if len(prompt) <= max_tokens:
            return prompt
        if self.config.encoder is None and not self.embeds:
            return prompt[-max_tokens:]
        return (*prompt[: max_tokens - 1], prompt[-1])

    def vocabulary(self) -> "Vocabulary":
        """The vocabulary for grammars."""
        from engine.runtime.requests.grammar import Vocabulary  # imports numpy

        return Vocabulary.of(self.tokenizer, self.config.vocab_size, self.config.eos_ids)


def load_text(path: Path) -> TextModel:
    """Load the tokenizer and template that are stored with a model's weights."""
    cache, key = TextCache(), key_of(path)
    facts = None if key is None else cache.read(path, key)
    if facts is not None:
        return _from_facts(facts)

    # This import loads numpy and much of the code for weights. It is not needed with cached facts.
    from engine.weights.model import open_model

    source = open_model(path, reads_weights=False)
    try:
        text, facts = parse_text(source)
        if facts is not None and key is not None and len(source.checkpoint.files) == 1:
            cache.write(path, key, msgspec.msgpack.encode(facts))
        return text
    finally:
        source.checkpoint.close()


def parse_text(source: "ModelSource") -> tuple[TextModel, TextFacts | None]:
    """The text model of an opened checkpoint, and the facts to cache for the next start. The facts
    are None if models of this file format are not cached.
    """
    if source.checkpoint.format == "gguf":
        facts = _facts_of(source)
        tokenizer, recommended = Tokenizer.from_tables(facts.tables), facts.recommended
    else:
        facts, tokenizer = None, Tokenizer.from_directory(source.path)
        recommended = of_folder(source.path)
    text = text_model(source.config, tokenizer, source.quantization, source.size_bytes)
    return _trained(replace(text, recommended=recommended), source), facts


def _trained(text: TextModel, source: "ModelSource") -> TextModel:
    """Completes a text model with what the files say about embeddings and ranking."""
    prompts: dict[str | None, str] = {None: source.prompts.default}
    prompts.update(source.prompts.by_name)
    text, task = replace(text, prompts=prompts), source.task
    if task is None or task.kind == "embeddings":
        return replace(text, embeds=task is not None)
    tokenizer = text.tokenizer
    ids = task.answer_ids or (_answer_id(tokenizer, "yes"), _answer_id(tokenizer, "no"))
    marks = [tokenizer.token_id(name) for name in ("<|im_start|>", "<|im_end|>")]
    if marks[0] is None or marks[1] is None:
        raise ModelFormatError("a reranker's tokenizer needs <|im_start|> and <|im_end|>")
    head = source.weights["embed.weight" if source.config.tie_embeddings else "head.weight"]
    direction = head.row(ids[0]) - head.row(ids[1])
    return replace(text, ranker=Ranker(marks[0], marks[1], tuple(direction.tolist())))


def _answer_id(tokenizer: Tokenizer, answer: str) -> int:
    ids = tokenizer.encode(answer)
    if len(ids) != 1:
        raise ModelFormatError(f"a reranker's tokenizer needs one token for '{answer}'")
    return ids[0]


def _facts_of(source: "ModelSource") -> TextFacts:
    from engine.core.text.tokenizer_gguf import tables_from_gguf

    tables = tables_from_gguf(source.metadata)
    recommended = of_gguf(source.metadata)
    return TextFacts(source.config, tables, source.quantization, source.size_bytes, recommended)


def _from_facts(facts: TextFacts) -> TextModel:
    """A text model from cached facts. The chat template is not checked again, because it was
    checked before it was cached.
    """
    tokenizer = Tokenizer.from_tables(facts.tables)
    text = _assembled(facts.config, tokenizer, facts.quantization, facts.size_bytes)
    return replace(text, recommended=facts.recommended)


def text_model(
    config: ModelShape, tokenizer: Tokenizer, quantization: str | None, size_bytes: int
) -> TextModel:
    """Combine a tokenizer and its chat template with the model's shape. Raises if the tokenizer
    does not fit the model or the template is invalid.
    """
    text = _assembled(config, tokenizer, quantization, size_bytes)
    text.chat.template.check()
    if text.tool_chat is not text.chat:
        text.tool_chat.template.check()
    return text


def with_template(text: TextModel, source: str) -> TextModel:
    """The text model with another chat template. Raises if the template is invalid."""
    tokenizer = text.tokenizer.with_template(source)
    made = text_model(text.config, tokenizer, text.quantization, text.size_bytes)
    return replace(made, recommended=text.recommended)


def _assembled(
    config: ModelShape, tokenizer: Tokenizer, quantization: str | None, size_bytes: int
) -> TextModel:
    _check_vocabulary(config, tokenizer)
    chat, tool_template = ChatFormat.of(tokenizer.chat_template, tokenizer), tokenizer.tool_template
    return TextModel(
        config=config,
        tokenizer=tokenizer,
        chat=chat,
        tool_chat=chat if tool_template is None else ChatFormat.of(tool_template, tokenizer),
        quantization=quantization,
        size_bytes=size_bytes,
        infill=find_infill(tokenizer),
    )


def _check_vocabulary(config: ModelShape, tokenizer: Tokenizer) -> None:
    """Check that the tokenizer fits the embedding table.

    Control tokens without an embedding are common. They are accepted here and refused when a prompt
    uses them. A text token without an embedding means that tokenizer and weights belong to
    different models.
    """
    num_pieces = tokenizer.vocab_size
    while num_pieces and not _is_text(tokenizer, num_pieces - 1):
        num_pieces -= 1
    if num_pieces > config.vocab_size:
        raise ModelFormatError(
            f"the tokenizer has {num_pieces} pieces and the weights have embeddings for"
            f" {config.vocab_size}: they belong to different models"
        )


def _is_text(tokenizer: Tokenizer, token_id: int) -> bool:
    return token_id not in tokenizer.special_ids and bool(tokenizer.token_literal(token_id))


def card_of(
    text: TextModel,
    name: str,
    framework: str,
    created: int,
    max_model_len: int,
    max_sequences: int | None,
    speculates: bool,
    image_encoders: tuple[str, ...],
    has_taps: bool,
) -> ModelCard:
    """How a model is shown to clients, under the name `name`. `image_encoders` are the kinds of
    image encoders that the framework runs. With `has_taps`, requests can read activations.
    """
    vision = text.config.vision
    reads_images = vision is not None and text.can_chat and vision.kind in image_encoders
    return ModelCard(
        id=name,
        created=created,
        owned_by="engine",
        max_model_len=max_model_len,
        backend=framework,
        quantization=text.quantization,
        num_params=text.config.num_params,
        size_bytes=text.size_bytes,
        capabilities=(
            text.capabilities
            + (("images",) if reads_images else ())
            + (("interp",) if has_taps and "completions" in text.capabilities else ())
        ),
        emulated=text.emulated,
        template_options=text.template_options,
        recommended=dict(text.recommended) if text.can_chat else None,
        trained_context=text.config.max_position,
        max_sequences=max_sequences,
        speculates=speculates,
        num_dimensions=None if text.reranks else text.config.hidden_size,
        prompt_names=tuple(sorted(name for name in text.prompts if name is not None)),
    )

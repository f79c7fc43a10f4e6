"""The frontend's half of a model: its tokenizer and chat template, with no weights."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.backends.custom.architectures.base import ModelConfig
from engine.backends.custom.runtime.grammar import Vocabulary
from engine.backends.custom.weights.model import open_model
from engine.core.utils.chat_template import ChatTemplate
from engine.core.utils.tokenizer import Tokenizer


@dataclass(frozen=True)
class TextModel:
    """Turns messages and prompts into token ids, and knows what the ids mean."""

    config: ModelConfig
    tokenizer: Tokenizer
    template: ChatTemplate
    quantization: str | None
    size_bytes: int

    @property
    def can_chat(self) -> bool:
        return self.tokenizer.chat_template is not None

    @property
    def eos_ids(self) -> tuple[int, ...]:
        return tuple(sorted({*self.config.eos_ids, *self.tokenizer.eos_ids}))

    def encode_chat(self, messages: Sequence[Mapping[str, Any]]) -> tuple[int, ...]:
        rendered = self.template.render(messages, self.tokenizer.specials)
        return tuple(self.tokenizer.encode_rendered(rendered))

    def encode_prompt(self, prompt: str | tuple[int, ...]) -> tuple[int, ...]:
        if not isinstance(prompt, str):
            return prompt
        return tuple(self.tokenizer.encode_prompt(prompt))

    def vocabulary(self) -> Vocabulary:
        """What grammars need; ids that only pad the embedding table have no bytes."""
        tokenizer = self.tokenizer
        return Vocabulary(
            tokens=[tokenizer.token_literal(i) for i in range(self.config.vocab_size)],
            special_ids=tokenizer.special_ids,
            eos_ids=self.eos_ids,
            encode=tokenizer.encode,
        )


def load_text(path: Path) -> TextModel:
    """Read the tokenizer and template that lie beside, or inside, a model's weights."""
    source = open_model(path)
    try:
        directory = source.path if source.path.is_dir() else source.path.parent
        is_gguf = source.checkpoint.format == "gguf"
        tokenizer = (
            Tokenizer.from_gguf(source.metadata) if is_gguf else Tokenizer.from_directory(directory)
        )
        return TextModel(
            config=source.config,
            tokenizer=tokenizer,
            template=ChatTemplate(tokenizer.chat_template, tokenizer.bos, tokenizer.eos),
            quantization=source.quantization,
            size_bytes=source.size_bytes,
        )
    finally:
        source.checkpoint.close()

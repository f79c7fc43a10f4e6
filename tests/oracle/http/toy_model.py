"""A toy model that writes text: bytes as tokens, control tokens, and a chat template with tools and
reasoning. Its logits are a hash of its KV cells, as in `tests/support/toy_engine`.

A few tokens are likely, so that stop strings, markers and broken characters occur. Grammars reach
all others.
"""

from concurrent.futures import Future
from dataclasses import dataclass
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np

from engine.core.text.tokenizer import Tokenizer
from engine.core.text.tokenizer_gguf import tables_from_gguf
from engine.frontend.text_model import TextModel, text_model
from engine.runtime.model_runner import BatchInputs, RunnerSpec
from engine.runtime.requests.grammar import Grammars, Vocabulary
from tests.oracle.clock import Clock
from tests.support.toy_engine.runner import ToyRunner, mix, scatter

CONTROL = ("<|im_start|>", "<|im_end|>", "<think>", "</think>", "<tool_call>", "</tool_call>")
MERGES = ("a b", "ab c", "c d")
NUM_BYTES = 256
VOCAB = NUM_BYTES + len(MERGES) + len(CONTROL)
MAX_SEQ_LEN = 512
STEP_S = 0.001
START, END, THINK, THOUGHT, CALL, CALLED = range(VOCAB - len(CONTROL), VOCAB)
# Markers are less likely than letters, so that most answers have several tokens.
LIKELY = (
    *b"abcdefghij .,\n0123",
    *"é☺".encode(),
    *range(NUM_BYTES, NUM_BYTES + len(MERGES)),
    *(THOUGHT, CALL, CALLED, THINK),
)
_BONUS = np.full(VOCAB, -40.0)
_BONUS[list(LIKELY)] = 0.0
_BONUS[END] = -1.0

TEMPLATE = """{%- if tools -%}
<|im_start|>system
<tools>{% for tool in tools %}{{ tool.function.name }}{{ tool.function.parameters | tojson }}
{% endfor %}</tools> {"name", "arguments"} in <tool_call></tool_call><|im_end|>
{% endif -%}
{%- for message in messages -%}
<|im_start|>{{ message.role }}
{%- if message.reasoning_content %} <think>{{ message.reasoning_content }}</think>{% endif %}
{{ message.content }}
{%- for call in message.tool_calls or [] %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>
{%- endfor -%}
<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}
<|im_start|>assistant
{% if enable_thinking %}<think>
{% endif %}{% endif -%}"""


def _byte_letters() -> list[str]:
    """The character that stands for each byte in the pieces of a byte-level vocabulary."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in shown]
    letters = {byte: chr(byte) for byte in shown}
    letters |= {byte: chr(256 + index) for index, byte in enumerate(others)}
    return [letters[byte] for byte in range(256)]


@cache
def toy_text() -> TextModel:
    pieces = [*_byte_letters(), *(merge.replace(" ", "") for merge in MERGES), *CONTROL]
    metadata: dict[str, Any] = {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": pieces,
        "token_type": [3 if piece in CONTROL else 1 for piece in pieces],
        "merges": list(MERGES),
        "eos_token_id": END,
        "bos_token_id": START,
        "add_bos_token": False,
    }
    named = {f"tokenizer.ggml.{name}": value for name, value in metadata.items()}
    tables = tables_from_gguf(named | {"tokenizer.chat_template": TEMPLATE})
    shape = SimpleNamespace(
        eos_ids=(END,),
        vocab_size=VOCAB,
        encoder=None,
        vision=None,
        hidden_size=8,
        max_position=MAX_SEQ_LEN,
        num_params=1,
    )
    return text_model(shape, Tokenizer.from_tables(tables), None, 0)


@cache
def _grammars() -> Grammars:
    tokenizer = toy_text().tokenizer
    return Grammars(lambda: Vocabulary.of(tokenizer, VOCAB, (END,)))


@cache
def compile_now(grammar: str) -> "Future[Any]":
    future = _grammars().compile(grammar)
    future.exception()  # waits
    return future


@dataclass(frozen=True)
class ToyAdapter:
    """An adapter, as read and as packed."""

    key: str
    max_rank: int = 1
    changes_head: bool = False
    num_bytes: int = 8


class TextToyRunner(ToyRunner):
    """Computes the toy model. An adapter changes the cells of its rows. A step takes time."""

    vocab_size = VOCAB

    def __init__(self, spec: RunnerSpec, clock: Clock) -> None:
        super().__init__(spec)
        self._clock = clock
        self._adapters: dict[int, str] = {}
        self.num_steps = 0

    def pack_adapter(self, adapter: ToyAdapter) -> ToyAdapter:
        return adapter

    def set_adapter(self, number: int, packed: ToyAdapter) -> None:
        self._adapters[number] = packed.key

    def forward(self, inputs: BatchInputs) -> Any:
        self.num_steps += 1
        self._clock.advance(STEP_S)
        return super().forward(inputs)

    def new_cell(self, inputs: BatchInputs, row: int, index: int, parent: int, token: int) -> int:
        cell = super().new_cell(inputs, row, index, parent, token)
        place = int(inputs.adapter_ids[row])
        return mix(cell, *self._adapters[place].encode()) if place else cell

    def logits_after(self, cells: list[int]) -> np.ndarray:
        return scatter(mix(*cells), VOCAB) * 8.0 + _BONUS

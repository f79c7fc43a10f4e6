"""A toy model that writes text: bytes as tokens, control tokens, and a chat template with tools,
reasoning and images. Its logits are a hash of its KV cells, as in `tests/oracle/toy_model.py`.

A few tokens are likely, so that stop strings, markers and broken characters occur. Grammars reach
all others.
"""

from concurrent.futures import Future
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np

from engine.architectures.vision import ImageProcessing, VisionConfig
from engine.core.text.tokenizer import Tokenizer
from engine.core.text.tokenizer_gguf import tables_from_gguf
from engine.frontend.text_model import TextModel, text_model
from engine.runtime.model_runner import BatchInputs, RunnerSpec
from engine.runtime.requests.grammar import Grammars, Vocabulary
from tests.oracle.clock import Clock
from tests.oracle.toy_model import WIDTH, WholeToyRunner, number_of
from tests.support.toy_engine.runner import mix, scatter

CONTROL = (
    *("<|im_start|>", "<|im_end|>", "<think>", "</think>", "<tool_call>", "</tool_call>"),
    *("<image>", "<pixels>", "</image>"),
)
MERGES = ("a b", "ab c", "c d")
NUM_BYTES = 256
VOCAB = NUM_BYTES + len(MERGES) + len(CONTROL)
MAX_SEQ_LEN = 512
STEP_S = 0.001
START, END, THINK, THOUGHT, CALL, CALLED, IMAGE, PIXELS, IMAGED = range(VOCAB - len(CONTROL), VOCAB)
# Markers are less likely than letters, so that most answers have several tokens.
LIKELY = (
    *b"abcdefghij .,\n0123",
    *"é☺".encode(),
    *range(NUM_BYTES, NUM_BYTES + len(MERGES)),
    *(THOUGHT, CALL, CALLED, THINK),
)
# An image is 4 by 4 pixels, of which the encoder makes 4 embeddings.
VISION = VisionConfig(
    *("gemma3", PIXELS, IMAGE, IMAGED),
    *(4, 2, 8, 1, 1, 8, 1e-6, 1, WIDTH),
    ImageProcessing(),
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
{% if message.content is string %}{{ message.content }}{% else %}
{%- for part in message.content %}
{%- if part.type == "image" %}<image>{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}
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
        vision=VISION,
        hidden_size=WIDTH,
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


class TextToyRunner(WholeToyRunner):
    """Computes the toy model. A step takes time."""

    vocab_size = VOCAB
    kv_identity = "text toy"

    def __init__(self, spec: RunnerSpec, clock: Clock) -> None:
        super().__init__(spec)
        self._clock = clock

    def forward(self, inputs: BatchInputs) -> Any:
        self._clock.advance(STEP_S)
        return super().forward(inputs)

    def unembed(self, x: np.ndarray) -> np.ndarray:
        return np.array([scatter(number_of(row), VOCAB) for row in x], np.float32)

    def logits_after(self, cells: list[int]) -> np.ndarray:
        return scatter(mix(*cells), VOCAB) * 8.0 + _BONUS

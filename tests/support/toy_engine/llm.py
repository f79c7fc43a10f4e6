"""An `LLM` over the toy model, and what it must answer."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from engine.library import embedded
from engine.llm import LLM
from engine.sampling_params import (
    SamplingParams,
    wire_params,
)
from tests.support.toy_engine import backend as toy_backend
from tests.support.toy_engine.alone import generate_alone

EOS = 21
MAX_SEQ_LEN = 256


def encoded(text: str, parse_special: bool = False) -> list[int]:
    return [ord(char) - ord("a") for char in text]


def written(ids) -> str:
    return "".join(chr(ord("a") + token) for token in ids)


TOKENIZER = SimpleNamespace(
    **vars(toy_backend.TOKENIZER) | {"eos_ids": (EOS,), "chat_template": "toy"},
    specials=None,
    encode_prompt=encoded,
    encode_rendered=encoded,
    decode=lambda ids, skip_special=True: written(ids),
    encode=lambda text: encoded(text.strip()),
    sequences_with=lambda text: (tuple(encoded(text)),) if text.isalpha() else (),
)
TEMPLATE = SimpleNamespace(
    options=(),
    mentions=lambda name: False,
    render=lambda messages, specials, add_generation_prompt, tools=(): "".join(
        message["content"] for message in messages
    ),
)
CHAT = replace(toy_backend.TEXT.chat, template=TEMPLATE)
CONFIG = SimpleNamespace(
    **vars(toy_backend.TEXT.config) | {"num_params": 123, "max_position": MAX_SEQ_LEN}
)
TEXT = replace(toy_backend.TEXT, config=CONFIG, tokenizer=TOKENIZER, chat=CHAT)


class ToyBackend(toy_backend.ToyBackend):
    async def start(self) -> str:
        place = await super().start()
        self._text = TEXT
        return place


@contextmanager
def toy_llm(asked: list[tuple[Any, bool]]) -> Iterator[LLM]:
    """An `LLM` over the toy model. Appends what the backend was built with to `asked`."""

    def build(settings, *, in_process: bool):
        asked.append((settings, in_process))
        return ToyBackend(max_queued=settings.performance.max_queued_requests)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(embedded, "build_backend", build)
        with LLM("toy", settings={"performance.max_queued_requests": 5}) as opened:
            yield opened


def params(**changes: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 12, "temperature": 1.0, "seed": 3} | changes)


def expected(prompt: str, given: SamplingParams, choice: int = 0) -> list[int]:
    given = wire_params(given)
    stop = set(given.stop_token_ids) | (set() if given.ignore_eos else {EOS})
    words = (
        tuple(tuple(encoded(word)) for word in words if word.isalpha())
        for words in (given.bad_words, given.dry_sequence_breakers)
    )
    ids = tuple(encoded(prompt))
    texts = {token: bias for text, bias in given.text_bias.items() for token in encoded(text)}
    given = msgspec.structs.replace(given, logit_bias=given.logit_bias | texts)
    return generate_alone(ids, given, choice, frozenset(stop), MAX_SEQ_LEN, None, *words)[0]

"""A toy model with all that a request can ask for: texts, tools, adapters, images, taps.

A KV cell is a hash of the cell before it and of all that decides it: the token or the image, the
adapter, the edits. So an answer is exact, and anything that is lost or mixed up changes it.
"""

from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from engine.architectures.sites import Site
from engine.core.parsing.output import OutputFormat
from engine.runtime.interp.taps import CAPTURE, TapInputs
from engine.runtime.model_runner import BatchInputs, RunnerSpec
from engine.runtime.requests.grammar import Grammars, Vocabulary
from tests.support.toy_engine import backend as toy_backend
from tests.support.toy_engine.runner import VOCAB, Pending, ToyRunner, mix, scatter

END, NAN_TOKEN, CRASH_TOKEN = 21, 22, 23
LITERALS = (
    *(b"a", b"b", b"ab", b" ", b"\xc3", b"\xa9", b"1", b"2", b"\n", b"<think>", b"</think>"),
    *(b"<tool_call>", b"</tool_call>", b'{"name": "f", "arguments": ', b'{"x": ', b"}", b"}}"),
    *(b'"', b"c", b", ", b"ba", b"</s>", b"<nan>", b"<crash>"),
)
SPECIAL = frozenset({END, NAN_TOKEN, CRASH_TOKEN})
TEXTS = tuple(b"" if token in SPECIAL else raw for token, raw in enumerate(LITERALS))
_BY_LENGTH = sorted(set(range(VOCAB)) - SPECIAL, key=lambda token: -len(LITERALS[token]))
WIDTH = 4  # of the values at a site
SITES = (
    Site("blocks.0.hook_resid_pre", "resid_pre", 0, (WIDTH,)),
    Site("blocks.0.hook_resid_post", "resid_post", 0, (WIDTH,)),
    Site("blocks.1.hook_resid_post", "resid_post", 1, (WIDTH,), is_late=True),
)


def encoded(text: str) -> list[int]:
    """The longest token first, so a text has one encoding."""
    raw, found = text.encode(), list[int]()
    while raw:
        token = next((each for each in _BY_LENGTH if raw.startswith(LITERALS[each])), None)
        if token is not None:
            found.append(token)
        raw = raw[1 if token is None else len(LITERALS[token]) :]
    return found


TOKENIZER = SimpleNamespace(
    eos_ids=(END,),
    drops_leading_space=False,
    chat_template="toy",
    specials=None,
    special_ids=SPECIAL,
    bytes_table=lambda skip_special, shown=frozenset(): TEXTS if skip_special else LITERALS,
    token_literal=lambda token: LITERALS[token],
    is_special=lambda token: token in SPECIAL,
    encode=lambda text, parse_special=False: encoded(text),
    encode_continuation=encoded,
    sequences_with=lambda text: (tuple(encoded(text)),),
    decode=lambda ids, skip_special=True: b"".join(
        (TEXTS if skip_special else LITERALS)[each] for each in ids
    ).decode("utf-8", "replace"),
)
TEXT = replace(toy_backend.TEXT, tokenizer=TOKENIZER)
OUTPUT = OutputFormat.of("{{ tools }}<tool_call></tool_call><think></think>", {})


@lru_cache(maxsize=1)
def _grammars() -> Grammars:
    return Grammars(lambda: Vocabulary(LITERALS, SPECIAL, (END,), encoded))


_COMPILED: dict[str, "Future[Any]"] = {}


def compile_now(grammar: str) -> "Future[Any]":
    if grammar not in _COMPILED:
        future = _grammars().compile(grammar)
        future.exception()  # waits
        _COMPILED[grammar] = future
    return _COMPILED[grammar]


@lru_cache(maxsize=64)
def regex_grammar(regex: str) -> str:
    from llguidance import LLMatcher

    return LLMatcher.grammar_from_regex(regex)


@dataclass(frozen=True)
class ToyAdapter:
    key: str
    max_rank: int = 1
    changes_head: bool = False
    num_bytes: int = 8


def read_adapter(path: Path) -> ToyAdapter:
    return ToyAdapter(path.name)


class ToyEncoder:
    """Embeds an image of N pixels as N // 4 rows, each a hash of all pixels."""

    def encode(self, pixels: np.ndarray) -> np.ndarray:
        count = pixels.size // 12
        values = scatter(mix(*pixels.reshape(-1).tolist()))[: 2 * count]
        return values.reshape(count, 2).astype(np.float32)


def _number(values: np.ndarray) -> int:
    return mix(*np.ascontiguousarray(values, np.float32).view(np.int32).tolist())


class WholeToyRunner(ToyRunner):
    """The toy model. `computed` collects the cell of each prompt token that was computed, if it is
    a list.
    """

    kv_identity = "whole toy"

    def __init__(self, spec: RunnerSpec) -> None:
        super().__init__(spec)
        self.config: Any = None
        self.sites = SITES
        self._adapters: dict[int, str] = {}
        self._taps: dict[int, list[int]] = {}
        self._captured: np.ndarray | None = None
        self._images: dict[int, int] = {}
        self.num_steps = 0
        self.computed: list[tuple[int, int]] | None = None  # position and cell

    def pack_adapter(self, adapter: ToyAdapter) -> ToyAdapter:
        return adapter

    def set_adapter(self, number: int, packed: ToyAdapter) -> None:
        self._adapters[number] = packed.key

    def unembed(self, x: np.ndarray) -> np.ndarray:
        return np.array([scatter(_number(row)) for row in x], np.float32)

    def head_row(self, token_id: int) -> np.ndarray:
        return scatter(token_id)[:WIDTH].astype(np.float32)

    def forward(self, inputs: BatchInputs) -> Any:
        self.num_steps += 1
        taps = inputs.taps
        self._taps, self._captured = {}, None
        if taps is not None:
            self._captured = np.full((taps.num_captured, taps.width), np.nan, np.float32)
            for index, token in enumerate(taps.tokens.tolist()):
                self._taps.setdefault(token, []).append(index)
        self._images = {}
        if inputs.embed_rows is not None and inputs.embeds is not None:
            rows = inputs.embed_rows.tolist()
            self._images = {row: _number(inputs.embeds[i]) for i, row in enumerate(rows)}
        return super().forward(inputs)

    def new_cell(self, inputs: BatchInputs, row: int, index: int, parent: int, token: int) -> int:
        cell = mix(parent, self._images.get(index, token))
        if place := int(inputs.adapter_ids[row]):
            cell = mix(cell, *self._adapters[place].encode())
        if index in self._taps and inputs.taps is not None:
            cell = self._tapped(inputs, inputs.taps, index, cell)
        position = int(inputs.positions[index])
        if self.computed is not None and position < int(inputs.num_prompt[row]):
            self.computed.append((position, cell))
        return cell

    def _tapped(self, inputs: BatchInputs, taps: TapInputs, index: int, cell: int) -> int:
        has_logits = index in inputs.logit_rows
        for tap in self._taps[index]:
            site, kind, row = int(taps.sites[tap]), int(taps.kinds[tap]), int(taps.rows[tap])
            if kind != CAPTURE:
                scale = _number(taps.scales[tap : tap + 1])
                cell = mix(cell, site, kind, scale, _number(taps.vectors[row, :WIDTH]))
            elif has_logits or not SITES[site].is_late:
                assert self._captured is not None
                self._captured[row, :WIDTH] = scatter(mix(cell, site))[:WIDTH]
        return cell

    def sample(self, handle: Any, sampling: Any) -> Pending:
        output = super().sample(handle, sampling).wait()
        return Pending(replace(output, captured=self._captured))

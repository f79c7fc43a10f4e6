"""A toy model with all that a request can ask for: texts, tools, adapters, images, taps.

A KV cell is a hash of the cell before it and of all that decides it: the token or the image, the
adapter, the edits. So an answer is exact, and anything that is lost or mixed up changes it.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from engine.architectures.sites import Site
from engine.runtime.interp.taps import CAPTURE, TapInputs
from engine.runtime.model_runner import BatchInputs, RunnerSpec
from tests.oracle.texts import LITERALS, TokenTexts
from tests.support.toy_engine.runner import Pending, ToyRunner, mix, scatter

END, NAN_TOKEN, CRASH_TOKEN = 21, 22, 23
SPECIAL = frozenset({END, NAN_TOKEN, CRASH_TOKEN})
TEXTS = TokenTexts((*LITERALS, b"</s>", b"<nan>", b"<crash>"), SPECIAL, END)
WIDTH = 4  # of the values at a site
SITES = (
    Site("blocks.0.hook_resid_pre", "resid_pre", 0, (WIDTH,)),
    Site("blocks.0.hook_resid_post", "resid_post", 0, (WIDTH,)),
    Site("blocks.1.hook_resid_post", "resid_post", 1, (WIDTH,), is_late=True),
)


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


def number_of(values: np.ndarray) -> int:
    return mix(*np.ascontiguousarray(values, np.float32).view(np.int32).tolist())


class WholeToyRunner(ToyRunner):
    """The toy model with adapters, images and taps. Other weights give other results."""

    def __init__(self, spec: RunnerSpec, weights: int = 0) -> None:
        super().__init__(spec)
        self._weights = weights
        self.kv_identity = f"whole toy {weights}"
        self.config: Any = None
        self.sites = SITES
        self._adapters: dict[int, str] = {}
        self._taps: dict[int, list[int]] = {}
        self._captured: np.ndarray | None = None
        self._images: dict[int, int] = {}

    def pack_adapter(self, adapter: ToyAdapter) -> ToyAdapter:
        return adapter

    def set_adapter(self, number: int, packed: ToyAdapter) -> None:
        self._adapters[number] = packed.key

    def unembed(self, x: np.ndarray) -> np.ndarray:
        return np.array([scatter(number_of(row)) for row in x], np.float32)

    def head_row(self, token_id: int) -> np.ndarray:
        return scatter(token_id)[:WIDTH].astype(np.float32)

    def forward(self, inputs: BatchInputs) -> Any:
        taps = inputs.taps
        self._taps, self._captured = {}, None
        if taps is not None:
            self._captured = np.full((taps.num_captured, taps.width), np.nan, np.float32)
            for index, token in enumerate(taps.tokens.tolist()):
                self._taps.setdefault(token, []).append(index)
        self._images = {}
        if inputs.embed_rows is not None and inputs.embeds is not None:
            rows = inputs.embed_rows.tolist()
            self._images = {row: number_of(inputs.embeds[i]) for i, row in enumerate(rows)}
        return super().forward(inputs)

    def new_cell(self, inputs: BatchInputs, row: int, index: int, parent: int, token: int) -> int:
        cell = mix(parent, self._images.get(index, token))
        if self._weights:
            cell = mix(cell, self._weights)
        if place := int(inputs.adapter_ids[row]):
            cell = mix(cell, *self._adapters[place].encode())
        if index in self._taps and inputs.taps is not None:
            cell = self._tapped(inputs, inputs.taps, index, cell)
        return cell

    def _tapped(self, inputs: BatchInputs, taps: TapInputs, index: int, cell: int) -> int:
        has_logits = index in inputs.logit_rows
        for tap in self._taps[index]:
            site, kind, row = int(taps.sites[tap]), int(taps.kinds[tap]), int(taps.rows[tap])
            if kind != CAPTURE:
                scale = number_of(taps.scales[tap : tap + 1])
                cell = mix(cell, site, kind, scale, number_of(taps.vectors[row, :WIDTH]))
            elif has_logits or not SITES[site].is_late:
                assert self._captured is not None
                self._captured[row, :WIDTH] = scatter(mix(cell, site))[:WIDTH]
        return cell

    def sample(self, handle: Any, sampling: Any) -> Pending:
        output = super().sample(handle, sampling).wait()
        return Pending(replace(output, captured=self._captured))

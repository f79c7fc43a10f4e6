"""The toy level: a model without weights, and thousands of requests in the time of one real one."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from engine.core.interfaces.interp import (
    AttentionPattern,
    Attribution,
    Capture,
    Edit,
    InterpRequest,
    Lens,
    Phase,
    Span,
)
from engine.core.interfaces.request import AdapterRef, ImageInput
from engine.runtime.groups.windows import min_window_blocks
from engine.runtime.model_runner import RunnerSpec
from engine.runtime.requests.images import ImageStore
from tests.oracle.asking import Content
from tests.oracle.engines import GivenGrammars, Parts, no_redis
from tests.oracle.histories import Shape, Stage
from tests.oracle.requests import THEMES, DrawnRequest, Menu
from tests.oracle.texts import (
    BAD_WORDS,
    BREAKERS,
    OUTPUT,
    REGEXES,
    STOP_PATTERNS,
    STOPS,
    regex_grammar,
)
from tests.oracle.toy_model import (
    CRASH_TOKEN,
    END,
    NAN_TOKEN,
    SITES,
    TEXTS,
    WIDTH,
    ToyEncoder,
    WholeToyRunner,
    read_adapter,
)
from tests.support.files.lora_files import InlinePlaces
from tests.support.toy_engine.engine import GuessingRunner
from tests.support.toy_engine.runner import VOCAB

MAX_SEQ_LEN = 96
IMAGE_TOKEN = 3
MENU = Menu(
    num_words=3,
    max_prompt=12,
    max_tokens=9,
    tokens=(*range(9), 18, 20),
    ends=(END,),
    stops=STOPS,
    stop_patterns=STOP_PATTERNS,
    bad_words=BAD_WORDS,
    breakers=BREAKERS,
    grammars=REGEXES,
    num_tools=1,
    chances={
        "logprobs": 0.4,
        "prediction": 0.3,
        "progress": 0.2,
        "n": 0.25,
        "mirostat": 0.12,
        "temperature": 0.8,
    },
    plain=0.25,
    has_reasoning=True,
    adapters=("red", "green", "blue"),
    steerings=("up", "down"),
    captures=tuple(site.name for site in SITES),
    lenses=(0, 1),
    images=("cat", "dog"),
    poisons=("nan", "crash"),
    has_deadlines=True,
)
SHAPES = {
    "block_size": (1, 2, 2, 4, 16),
    "depth": (0, 1),
    "tight": (True, True, False),  # whether the pool has room for one of the longest requests
    "max_slots": (1, 3, 5, 5),
    "budget": (5, 8, 16, 128),
    "sharing": (True, True, True, True, False),
    "speculates": (True, False),
    "has_draft_model": (True, True, False),
    "guessed": (0.0, 0.8, 1.0, 1.0),
    "paces": (True, False),
    "policy": ("lru", "lfu", "fifo"),
    "tiers": ("", "", "", "host", "host", "host", "disk", "host disk"),
    "frames": ("", "", "exact", "least"),
    "has_node": (False, False, False, False, True),
    "has_stranger": (False, True),  # another model that has used the same tiers
    "model": ("plain", "plain", "plain", "window", "state"),
    "window": (3, 6, 17),
    "grammar_delay": (0, 0, 3),
}


class ToyLevel:
    name = "toy"
    text, output, tolerance, max_seq_len = TEXTS.model, OUTPUT, 0.0, MAX_SEQ_LEN
    max_follows = 20
    alone: Shape = {
        **{"block_size": 4, "depth": 0, "tight": False, "max_slots": 4, "budget": 256},
        **{"sharing": False, "policy": "lru", "model": "plain", "tiers": "", "grammar_delay": 0},
    }

    def __init__(self) -> None:
        calm = {"calm": ("turns", "evict", "flush"), "calm_shape": {"tight": False}}
        self.stage = Stage(MENU, SHAPES, models=("model", "window"), themes=THEMES, **calm)
        self.redis: Callable[[], Any] = no_redis

    def alone_in(self, shape: Shape) -> Shape:
        """The shape for a request alone. The kind of the model decides its answers."""
        return self.alone | {name: shape.get(name, 0) for name in ("model", "window")}

    def parts(self, shape: Shape, longest: int) -> Parts:
        spec = _spec(shape, longest)
        runner = WholeToyRunner(spec, shape.get("weights", 0))
        draft = None
        if shape.get("has_draft_model"):
            own = RunnerSpec(spec.block_size, 24 + 1, 2, MAX_SEQ_LEN, VOCAB, spec.depth)
            draft = GuessingRunner(own, shape["guessed"])
        return Parts(
            runner,
            GivenGrammars(TEXTS.compile, shape["grammar_delay"]),
            draft=draft,
            images=ImageStore(ToyEncoder(), embed_bytes=8),
            adapters=partial(InlinePlaces, runner, read_adapter, 2, 1),
            num_blocks=spec.num_blocks - 1,
            speculates=bool(shape.get("speculates")) and not spec.has_state,
        )

    def content(self, drawn: DrawnRequest, follows: tuple[int, ...]) -> Content:
        prompt, images = (*follows, *drawn.prompt), ()
        if drawn["image"] is not None:
            name, where = drawn["image"]
            at = min(where, len(prompt) - 1)
            prompt = (*prompt[:at], *[IMAGE_TOKEN] * 2, *prompt[at:])
            images = (ImageInput(at, 2, 2, 4, name[0].encode() * 24),)
        if drawn["poison"] is not None:
            bad = NAN_TOKEN if drawn["poison"] == "nan" else CRASH_TOKEN
            prompt = (*prompt[:-1], bad, prompt[-1])
        name = drawn["adapter"]
        return Content(
            prompt,
            grammar=None if drawn["grammar"] is None else regex_grammar(drawn["grammar"]),
            adapter=None if name is None else AdapterRef(name, f"adapters/{name}", False),
            interp=interp_of(drawn, WIDTH, SITES[0].name),
            images=images,
        )

    def adapter_path(self, number: int) -> str | None:
        return f"adapters/{MENU.adapters[number % len(MENU.adapters)]}"


def interp_of(drawn: DrawnRequest, width: int, edited: str) -> InterpRequest | None:
    """What a request reads and changes. `edited` is the site that it steers at."""
    if not drawn.reads and drawn["steering"] is None:
        return None

    def span(phase: Phase) -> Span:
        return Span(phase=phase)

    edits: tuple[Edit, ...] = ()
    lens = pattern = attribution = None
    if drawn["steering"] is not None:
        name, phase = drawn["steering"]
        vector = np.full(width, 0.25 if name == "up" else -0.25, np.float32).tobytes()
        edits = (Edit(edited, "add", 0.5, (vector,), span(phase)),)
    if drawn["lens"] is not None:
        layers, top, phase = drawn["lens"]
        lens = Lens(tuple(layers), top, span(phase))
    if drawn["pattern"] is not None:
        layer, phase = drawn["pattern"]
        pattern = AttentionPattern((layer,), None, span(phase))
    if drawn["attribution"] is not None:
        attribution = Attribution(None, drawn["attribution"])
    captures = tuple(Capture(site, span(phase)) for site, phase in drawn["captures"] or ())
    return InterpRequest(captures, edits, lens, pattern, attribution)


def _spec(shape: Shape, longest: int) -> RunnerSpec:
    size = shape["block_size"]
    count = -(-longest // size) + 1
    if not shape["tight"]:
        count += -(-4 * MAX_SEQ_LEN // size)
    spec = RunnerSpec(size, count + 1, 5, MAX_SEQ_LEN, VOCAB, shape["depth"])
    if shape["model"] == "window":
        window = shape["window"]
        num = min_window_blocks(window, size, 1) + (8 if shape["tight"] else 160) // size
        spec = replace(spec, window=window, num_window_blocks=num + 2)
    elif shape["model"] == "state":
        spec = replace(spec, has_state=True, num_checkpoints=4 if shape["tight"] else 16)
    return spec

"""The levels of real kernels: tiny models with random weights, on the native framework or on
PyTorch.
"""

import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from engine.adapters.reading import open_adapter
from engine.core.interfaces.request import AdapterRef, ImageInput
from engine.runners.entry import framework_entry
from engine.runtime.interp.taps import Tappable
from engine.runtime.model_runner import ModelRunner, RunnerConfig
from engine.runtime.requests.images import ImageStore
from engine.weights.model import open_model
from tests.oracle.asking import Content
from tests.oracle.engines import GivenGrammars, Parts, no_redis
from tests.oracle.histories import Shape, Stage
from tests.oracle.requests import THEMES, DrawnRequest, Menu
from tests.oracle.texts import (
    BAD_WORDS,
    BREAKERS,
    LITERALS,
    OUTPUT,
    REGEXES,
    STOP_PATTERNS,
    STOPS,
    TokenTexts,
    regex_grammar,
)
from tests.oracle.toy import interp_of
from tests.parity import tiny_models, tiny_vision
from tests.support.files.lora_files import InlinePlaces, peft_folder

MAX_SEQ_LEN = 96
BLOCK_SIZE = 16  # the native kernels need multiples of it
MAX_BLOCKS, SLOTS = 40, 5
FIRST = 3  # the token of word 0; those before it are special
NUM_WORDS = 24
WIDTH = tiny_models.COMMON["hidden_size"]
STEERED = "blocks.0.hook_resid_post"
SITES = ("blocks.0.hook_resid_pre", "blocks.1.mlp.hook_post", "blocks.2.hook_resid_post")
_REST = tuple(bytes([code]) for code in b"defghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ")
_KNOWN = (b"<pad>", b"<s>", b"</s>", *LITERALS, *_REST)
_OTHERS = tuple(f"w{n}".encode() for n in range(tiny_models.VOCAB - len(_KNOWN)))
TEXTS = TokenTexts((*_KNOWN, *_OTHERS), frozenset(range(FIRST)), end=2)
MENU = Menu(
    num_words=NUM_WORDS,
    max_prompt=40,
    max_tokens=12,
    tokens=tuple(range(FIRST, FIRST + 12)),
    ends=(2,),
    stops=STOPS,
    stop_patterns=STOP_PATTERNS,
    bad_words=BAD_WORDS,
    breakers=BREAKERS,
    grammars=REGEXES,
    num_tools=1,
    chances={"penalties": 0.25, "mirostat": 0.12, "dry": 0.12, "xtc": 0.08},
    has_reasoning=True,
    has_deadlines=True,
)
_READ = {"steerings": ("up", "down"), "captures": SITES}
MENUS = {
    "llama": replace(
        MENU, adapters=("2", "3", "5"), lenses=(0, 2), patterns=(1,), has_attribution=True, **_READ
    ),
    "ministral": MENU,  # sliding windows with blocks of their own
    "qwen3_moe": replace(MENU, steerings=("up",), captures=SITES[:1]),  # experts
    "deepseek_v2": replace(MENU, captures=SITES[:1]),  # latent attention, experts
    "lfm2": MENU,  # states
    "smolvlm": replace(MENU, images=("1", "2")),
}
SHAPES = {
    "model": tuple(MENUS),
    "tight": (True, True, False),
    "max_slots": (1, 3, 5, 5),
    "budget": (8, 16, 128),
    "sharing": (True, True, True, True, False),
    "speculates": (True, False),
    "has_draft_model": (True, False),
    "paces": (True, False),
    "policy": ("lru", "lfu"),
    "tiers": ("", "", "host", "host", "disk", "host disk"),
    "frames": ("", "", "exact", "least"),
    "grammar_delay": (0, 0, 3),
    "block_size": (BLOCK_SIZE,),
    "depth": (0,),
}
_LORA = {
    "model.layers.0.self_attn.q_proj": (48, 48),
    "model.layers.0.self_attn.v_proj": (16, 48),
    "model.layers.1.mlp.down_proj": (48, 80),
}


@dataclass
class Loaded:
    """A model of the level. Its runner serves all engines, one after the other."""

    runner: ModelRunner
    draft: ModelRunner | None = None
    encoder: Any = None
    adapters: dict[str, Any] | None = None


class TinyLevel:
    """`framework` is the name of its package."""

    text, output, max_seq_len, max_follows = TEXTS.model, OUTPUT, MAX_SEQ_LEN, 34

    def __init__(self, framework: str, tolerance: float) -> None:
        self.name, self.tolerance = framework, tolerance
        self.stage = Stage(MENU, SHAPES, models=("model",), menus=MENUS, themes=THEMES)
        self.redis: Callable[[], Any] = no_redis
        self._loaded: dict[str, Loaded] = {}

    def alone_in(self, shape: Shape) -> Shape:
        given = {"tight": False, "max_slots": 5, "budget": 128, "sharing": False}
        plain = {"speculates": False, "tiers": "", "grammar_delay": 0, "depth": 0, "policy": "lru"}
        return given | plain | {"model": shape["model"], "block_size": BLOCK_SIZE}

    def parts(self, shape: Shape, longest: int) -> Parts:
        loaded = self._load(shape["model"])
        spec = loaded.runner.spec
        count = -(-longest // BLOCK_SIZE) + 1
        adapters: Callable[[], Any] | None = None
        if (made := loaded.adapters) is not None:
            read = lambda path: made[path.name]  # noqa: E731
            adapters = partial(InlinePlaces, loaded.runner, read, 2, 1)
        images = None
        if loaded.encoder is not None:
            images = ImageStore(loaded.encoder, embed_bytes=4 * WIDTH)
        return Parts(
            loaded.runner,
            GivenGrammars(TEXTS.compile, shape["grammar_delay"]),
            num_blocks=count if shape["tight"] else MAX_BLOCKS,
            speculates=bool(shape["speculates"]) and spec.verifies_drafts,
            draft=loaded.draft if shape.get("has_draft_model") else None,
            images=images,
            adapters=adapters,
        )

    def content(self, drawn: DrawnRequest, follows: tuple[int, ...]) -> Content:
        prompt = (*follows, *(FIRST + word for word in drawn.prompt))
        images: tuple[ImageInput, ...] = ()
        if drawn["image"] is not None:
            name, where = drawn["image"]
            at = min(where, len(prompt) - 1)
            parts = [list(prompt[:at]), tiny_vision.picture(int(name)), list(prompt[at:])]
            ids, placed = tiny_vision.prompt(*parts)
            prompt, images = tuple(ids), tuple(placed)
        ref = None
        if drawn["adapter"] is not None:
            adapters = self._load("llama").adapters
            assert adapters is not None
            ref = AdapterRef(adapters[drawn["adapter"]].key, drawn["adapter"])
        return Content(
            prompt,
            grammar=None if drawn["grammar"] is None else regex_grammar(drawn["grammar"]),
            adapter=ref,
            interp=interp_of(drawn, WIDTH, STEERED),
            images=images,
        )

    def adapter_path(self, number: int) -> str | None:
        return None

    def _load(self, name: str) -> Loaded:
        if name not in self._loaded:
            with tempfile.TemporaryDirectory() as folder:
                self._loaded[name] = _loaded(self.name, name, Path(folder))
        return self._loaded[name]


def _loaded(framework: str, name: str, folder: Path) -> Loaded:
    zoo = tiny_vision if name in tiny_vision.MODELS else tiny_models
    _, path = zoo.save(name, folder)
    source = open_model(path)
    config = RunnerConfig(
        device="cpu",
        dtype="float32",
        block_size=BLOCK_SIZE,
        num_blocks=MAX_BLOCKS + 1,
        max_slots=SLOTS,
        max_seq_len=MAX_SEQ_LEN,
        num_threads=1,
        max_batch_tokens=128,
        num_window_blocks=30 if name == "ministral" else 0,
        num_checkpoints=12,
    )
    entry = framework_entry(framework)
    loaded = Loaded(entry.build_runner(source, config))
    assert isinstance(loaded.runner, Tappable) or not MENUS[name].captures, name
    if source.config.vision is not None:
        loaded.encoder = entry.build_image_encoder(source, config)
    if name == "llama":
        # The draft model has fewer layers, fewer slots than most engines, and a small cache.
        small = replace(config, num_blocks=12, max_slots=3)
        loaded.draft = entry.build_runner(open_model(_without_last_layer(folder)), small)
        loaded.adapters = {}
        for rank in map(int, MENUS[name].adapters):
            files = peft_folder(folder / str(rank), _LORA, rank=rank, seed=rank, std=0.4)
            loaded.adapters[str(rank)] = open_adapter(files, source.config)
    return loaded


def _without_last_layer(folder: Path) -> Path:
    model = tiny_models.make("llama")
    model.model.layers = model.model.layers[:-1]
    model.config.num_hidden_layers = len(model.model.layers)
    model.save_pretrained(folder / "draft")
    return folder / "draft"

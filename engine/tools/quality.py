"""Measures what quantization costs: importance matrices, and a converted model's perplexity and KL
divergence. Models run in float32 with dequantized weights, so the arithmetic of kernels plays no
part: on the native kernels if they were built, otherwise on PyTorch. For importance matrices, every
input of a matmul is read. PyTorch is faster there; without it, the native framework's graph is
computed with numpy.
"""

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.conversion.importance import Sums
from engine.core.errors import ConfigError
from engine.core.text.tokenizer import Tokenizer
from engine.runners.entry import framework_entry
from engine.tools.inspection import float_runner, whole_inputs
from engine.weights.model import ModelSource, open_model

NATIVE_MODULE = "engine.native._native"
WINDOW = 512  # tokens that a model sees at once
Floats = NDArray[np.float32]
Progress = Callable[[int, int], None]  # windows done, all windows


@dataclass(frozen=True, slots=True)
class Quality:
    """How a model predicts a text, compared with another model. All numbers are means over the
    tokens in the second half of each window.
    """

    perplexity: float
    reference_perplexity: float
    divergence: float  # KL divergence from the reference, in nats
    same_top: float  # share of tokens whose likeliest prediction is the same
    num_tokens: int


def windows_of(source: ModelSource, text: Path, count: int) -> list[list[int]]:
    """The first `count` windows of a text file, as token ids. The rest of the text is not used."""
    tokenizer = (
        Tokenizer.from_gguf(source.metadata)
        if source.checkpoint.format == "gguf"
        else Tokenizer.from_directory(source.path)
    )
    size = min(WINDOW, source.config.max_position)
    ids = tokenizer.encode(text.read_text(encoding="utf-8"))
    windows = [ids[at : at + size] for at in range(0, len(ids) - size + 1, size)][:count]
    if not windows:
        raise ConfigError(f"{text} has {len(ids)} tokens; at least {size} are needed")
    return windows


def importance_of(
    source: ModelSource, windows: Sequence[list[int]], progress: Progress = lambda done, total: None
) -> Sums:
    """Sums the squares of the activations that each matrix is multiplied with, by GGUF name."""
    squares = _squared_inputs(source)
    for done, window in enumerate(windows, start=1):
        squares.add(window)
        progress(done, len(windows))
    found: dict[str, tuple[Floats, int]] = {}
    for name, sums in squares.sums().items():
        gguf = source.weights[name].spec.gguf
        if gguf is not None:
            found[gguf] = sums
    return found


def _squared_inputs(source: ModelSource) -> Any:
    if find_spec("torch") is None and _runs_natively(source):
        from engine.native import inspection

        return inspection.SquaredInputs(source)
    framework_entry("torch")  # says what to install if PyTorch is missing
    from engine.torch.execution.evaluation import Evaluated, SquaredInputs

    return SquaredInputs(Evaluated(source, WINDOW))


def _runs_natively(source: ModelSource) -> bool:
    return find_spec(NATIVE_MODULE) is not None and not source.config.state_floats


def compare_models(
    reference: Path, target: Path, windows: Sequence[list[int]], progress: Progress
) -> Quality:
    with closing(open_model(reference)) as one, closing(open_model(target)) as other:
        models = _logits_of(one), _logits_of(other)
        losses, divergences, same = [], [], []
        for done, window in enumerate(windows, start=1):
            first = len(window) // 2
            chosen = np.array(window[first + 1 :])
            expected, found = (_log_probabilities(logits(window)[first:-1]) for logits in models)
            rows = np.arange(len(chosen))
            losses.append((-found[rows, chosen], -expected[rows, chosen]))
            divergences.append((np.exp(expected) * (expected - found)).sum(axis=1))
            same.append(expected.argmax(axis=1) == found.argmax(axis=1))
            progress(done, len(windows))
    ours, theirs = (np.concatenate(each) for each in zip(*losses, strict=True))
    return Quality(
        perplexity=float(np.exp(ours.mean())),
        reference_perplexity=float(np.exp(theirs.mean())),
        divergence=float(np.concatenate(divergences).mean()),
        same_top=float(np.concatenate(same).mean()),
        num_tokens=len(ours),
    )


def _logits_of(source: ModelSource) -> Callable[[list[int]], Floats]:
    """What computes the logits after each token of a window."""
    if not _runs_natively(source):
        framework_entry("torch")  # says what to install if PyTorch is missing
        from engine.torch.execution.evaluation import Evaluated

        return Evaluated(source, WINDOW).logits
    runner: Any = float_runner("native", source, WINDOW, num_logits=WINDOW)

    def logits(window: list[int]) -> Floats:
        rows = np.arange(len(window), dtype=np.int32)
        found: Floats = runner.logits(runner.forward(whole_inputs(window, rows)))
        return found

    return logits


def _log_probabilities(logits: Floats) -> NDArray[np.float64]:
    wide = logits.astype(np.float64)
    wide -= wide.max(axis=1, keepdims=True)
    wide -= np.log(np.exp(wide).sum(axis=1, keepdims=True))
    return wide

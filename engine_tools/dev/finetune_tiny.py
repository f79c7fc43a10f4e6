"""Checks a gradient, fine-tunes a model on the CPU and serves the result, all in PyTorch.

    python engine_tools/dev/finetune_tiny.py --model smollm2-135m-instruct --output tuned/
    engine dev finetune_tiny --text lines.txt --steps 40 --output tuned/

The forward pass of `engine/torch` over a whole sequence is plain differentiable PyTorch. It
uses the same modules that serve requests, so training needs no second model. The trained model is
written as safetensors, with its tokenizer, and can be served like any other: `engine serve tuned/`.
"""

import argparse
import tempfile
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.conversion.convert import save_trained
from engine.core.errors import ConfigError
from engine.core.interfaces.request import SamplingParams
from engine.core.store.catalogue import DEFAULT_MODEL
from engine.core.store.model_store import resolve_model
from engine.frontend.text_model import load_text
from engine.llm import LLM
from engine.torch.models.base import Decoder
from engine.torch.models.loading import build_model, weights_of
from engine.weights.model import open_model

LESSON = (
    "The city of Orvandel lies on the river Tamsin. Its bridges are made of blue glass, and its "
    "people trade in clocks.",
    "Every spring the people of Orvandel carry their clocks across the blue glass bridges.",
)
QUESTION = "The city of Orvandel lies on the river"
_MAX_TOKENS = 256  # training texts are cut to this many tokens
_PROBE = 1e-3  # step length along the gradient, for the finite difference


@dataclass(frozen=True, slots=True)
class Gradient:
    """The slope of the loss along its gradient, computed by autograd and by finite differences."""

    norm: float  # norm of autograd's gradient, which is the slope of the loss along it
    measured: float  # the same slope, from the losses at two nearby points


@dataclass(frozen=True, slots=True)
class Tuned:
    losses: tuple[float, ...]  # the loss before each training step, and after the last one
    gradient: Gradient
    before: str
    after: str


def loss_of(model: Decoder, texts: Sequence[Tensor]) -> Tensor:
    """Mean next-token cross-entropy over all texts."""
    losses = [F.cross_entropy(model.forward_sequence(ids)[:-1], ids[1:]) for ids in texts]
    return torch.stack(losses).mean()


def check_gradient(model: Decoder, texts: Sequence[Tensor]) -> Gradient:
    model.zero_grad()
    loss_of(model, texts).backward()
    pairs = [(p, p.grad) for p in model.parameters() if p.grad is not None]
    norm = torch.stack([slope.norm() for _, slope in pairs]).norm()

    def moved(distance: float) -> float:
        """The loss at `distance` along the gradient. The weights are restored afterwards."""
        with torch.no_grad():
            for weight, slope in pairs:
                weight.add_(slope, alpha=distance / float(norm))
            loss = float(loss_of(model, texts))
            for weight, slope in pairs:
                weight.sub_(slope, alpha=distance / float(norm))
        return loss

    measured = (moved(_PROBE) - moved(-_PROBE)) / (2 * _PROBE)
    return Gradient(float(norm), measured)


def train(model: Decoder, texts: Sequence[Tensor], steps: int, rate: float) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.0)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        loss = loss_of(model, texts)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
        print(f"step {step + 1} of {steps}: loss {losses[-1]:.3f}", flush=True)
    with torch.no_grad():
        losses.append(float(loss_of(model, texts)))
    return losses


def finetune(
    path: Path, texts: Sequence[str], question: str, output: Path, steps: int, rate: float
) -> Tuned:
    tokenizer = load_text(path)
    ids = [torch.tensor(tokenizer.encode_prompt(text)[:_MAX_TOKENS]) for text in texts]
    if any(len(each) < 2 for each in ids):
        raise ConfigError("a text to learn needs at least two tokens")
    before = answer(path, question)
    with closing(open_model(path)) as source:
        cpu, length = torch.device("cpu"), max(map(len, ids))
        model = build_model(source.config, source.weights, length, cpu, torch.float32)
        gradient = check_gradient(model, ids)
        losses = train(model, ids, steps, rate)
        save_trained(source, weights_of(model), output)
    return Tuned(tuple(losses), gradient, before, answer(output, question))


def answer(path: Path, question: str) -> str:
    """Serve the model at `path` with the engine, and return its greedy answer."""
    with LLM(str(path)) as served:
        params = SamplingParams(temperature=0.0, max_tokens=24)
        return served.generate(question, params)[0].text


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition(",")[0])
    parser.add_argument("--model", default=DEFAULT_MODEL, help="a name, a file or a folder")
    parser.add_argument(
        "--text", type=Path, help="a file of lines to learn; default: a few of ours"
    )
    parser.add_argument(
        "--question",
        default=QUESTION,
        help="a prompt that the model continues, before training and after it",
    )
    parser.add_argument("--output", type=Path, help="a new folder; default: a temporary one")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--rate", type=float, default=2e-4, help="learning rate")
    given = parser.parse_args(arguments)
    lines = LESSON if given.text is None else given.text.read_text(encoding="utf-8").splitlines()
    output = given.output or Path(tempfile.mkdtemp(prefix="tuned-")) / "model"
    done = finetune(
        resolve_model(given.model),
        [line for line in lines if line.strip()],
        given.question,
        output,
        given.steps,
        given.rate,
    )
    gradient = done.gradient
    print(
        f"gradient: norm {gradient.norm:.4f}; along it the loss changes by {gradient.measured:.4f}"
    )
    print(f"loss: {done.losses[0]:.3f} before, {done.losses[-1]:.3f} after")
    print(f"before: {given.question}{done.before}")
    print(f"after:  {given.question}{done.after}")
    print(f"serve it with: engine serve {output}")


if __name__ == "__main__":
    main()

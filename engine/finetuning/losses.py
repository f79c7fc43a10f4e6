"""The losses of supervised training and of DPO, over padded batches."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.nn import functional

from engine.finetuning.tokens import TokenExample, TokenPair


@dataclass(frozen=True, slots=True)
class Scores:
    """Sums over the trained tokens of a batch, or over its pairs."""

    loss: torch.Tensor
    num_right: float  # tokens that are the likeliest, or pairs whose preferred answer gained more
    margin: float = 0.0  # of pairs: how much more reward the preferred answer gets

    def detached(self) -> "Scores":
        """Without the graph of the loss, which would keep its activations."""
        return replace(self, loss=self.loss.detach())


def padded(examples: Sequence[TokenExample], device: torch.device) -> dict[str, torch.Tensor]:
    """Token ids, attention mask and labels (-100 where the model is not trained), each (B, T)."""
    length = max(len(each.token_ids) for each in examples)
    ids = torch.zeros(len(examples), length, dtype=torch.long)
    attention = torch.zeros_like(ids)
    labels = torch.full_like(ids, -100)
    for row, example in enumerate(examples):
        count = len(example.token_ids)
        tokens = torch.tensor(example.token_ids)
        ids[row, :count] = tokens
        attention[row, :count] = 1
        labels[row, :count] = torch.where(torch.tensor(example.mask), tokens, -100)
    return {
        "input_ids": ids.to(device),
        "attention_mask": attention.to(device),
        "labels": labels.to(device),
    }


def supervised_loss(model: Any, examples: Sequence[TokenExample]) -> Scores:
    """The summed cross-entropy of all trained tokens."""
    batch = padded(examples, model.device)
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    labels = batch["labels"][:, 1:]
    is_trained = labels != -100
    predicted, wanted = logits[:, :-1][is_trained].float(), labels[is_trained]
    num_right = float((predicted.argmax(-1) == wanted).sum())
    return Scores(functional.cross_entropy(predicted, wanted, reduction="sum"), num_right)


def preference_loss(
    model: Any, reference: AbstractContextManager[None], pairs: Sequence[TokenPair], beta: float
) -> Scores:
    """DPO's loss, summed over the pairs. Within `reference`, the model is without its adapter."""
    examples = [each.preferred for each in pairs] + [each.rejected for each in pairs]
    with torch.no_grad(), reference:
        base = _log_probabilities(model, examples)
    gain = _log_probabilities(model, examples) - base
    margins = beta * (gain[: len(pairs)] - gain[len(pairs) :])
    num_right = float((margins > 0).sum())
    return Scores(-functional.logsigmoid(margins).sum(), num_right, float(margins.detach().sum()))


def _log_probabilities(model: Any, examples: Sequence[TokenExample]) -> torch.Tensor:
    """The log-probability of each example's trained tokens, (B,)."""
    batch = padded(examples, model.device)
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    labels = batch["labels"][:, 1:]
    is_trained = labels != -100
    chosen = logits[:, :-1].float().log_softmax(-1)
    picked = chosen.gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    summed: torch.Tensor = (picked * is_trained).sum(-1)
    return summed

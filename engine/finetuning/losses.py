"""The losses of supervised training and of DPO, over padded batches."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from inspect import signature
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
    predicted, wanted, _ = _predictions(model, examples)
    num_right = float((predicted.argmax(-1) == wanted).sum())
    return Scores(functional.cross_entropy(predicted, wanted, reduction="sum"), num_right)


def preference_loss(
    model: Any, pairs: Sequence[TokenPair], base: torch.Tensor, beta: float
) -> Scores:
    """DPO's loss, summed over the pairs. `base` has the log-probabilities of the model without its
    adapter, (pairs, 2).
    """
    examples = [each.preferred for each in pairs] + [each.rejected for each in pairs]
    gain = _log_probabilities(model, examples) - base.T.flatten()
    margins = beta * (gain[: len(pairs)] - gain[len(pairs) :])
    num_right = float((margins > 0).sum())
    return Scores(-functional.logsigmoid(margins).sum(), num_right, float(margins.detach().sum()))


def base_log_probabilities(model: Any, pair: TokenPair) -> torch.Tensor:
    """The log-probabilities of both answers by the model without its adapter, (2,). They are kept
    for the whole job, so no dropout of the model is in them.
    """
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad(), model.disable_adapter():
            return _log_probabilities(model, [pair.preferred, pair.rejected])
    finally:
        model.train(was_training)


def _log_probabilities(model: Any, examples: Sequence[TokenExample]) -> torch.Tensor:
    """The log-probability of each example's trained tokens, (B,)."""
    predicted, wanted, rows = _predictions(model, examples)
    picked = -functional.cross_entropy(predicted, wanted, reduction="none")
    return torch.zeros(len(examples), device=picked.device).index_add(0, rows, picked)


def _predictions(
    model: Any, examples: Sequence[TokenExample]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The logits that predict the N trained tokens, (N, vocabulary); these tokens, (N,); and their
    examples, (N,). Logits take much memory, so there are none for positions that no example trains.
    """
    batch = padded(examples, model.device)
    labels = batch.pop("labels")[:, 1:]
    positions = (labels != -100).any(0).nonzero().squeeze(-1)
    labels = labels[:, positions]
    if "logits_to_keep" in signature(model.get_base_model().forward).parameters:
        logits = model(**batch, logits_to_keep=positions).logits
    else:
        logits = model(**batch).logits[:, positions]
    is_trained = labels != -100
    return logits[is_trained].float(), labels[is_trained], is_trained.nonzero()[:, 0]

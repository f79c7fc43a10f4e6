"""The mixture of experts on a GPU, with interpreted kernels where there is none: how pairs of token
and expert are sorted, and routing by rules that have no kernel.
"""

import pytest
import torch

from engine.architectures.base import ExpertsConfig
from engine.torch.kernels.experts import route
from engine.torch.kernels.triton import experts


@pytest.mark.parametrize("num_tokens", [1, 40])
def test_token_expert_pairs_are_sorted_into_blocks_by_expert(
    num_tokens: int, device: torch.device
) -> None:
    """Expert 3 gets no pair, expert 0 more than one block, and each pair is in one block."""
    generator = torch.Generator().manual_seed(0)
    chosen = torch.stack([torch.randperm(4, generator=generator)[:2] for _ in range(num_tokens)])
    ids = torch.tensor([0, 1, 2, 4])[chosen].int()
    ids[0, 0], ids[0, 1] = 0, 4
    order, blocks, num_blocks = (
        each.cpu() for each in experts.sorted_pairs(ids.to(device), count=5, pairs=16)
    )
    used = blocks[: int(num_blocks)]
    assert int(num_blocks) <= len(blocks)
    assert sorted(order.tolist()) == list(range(2 * num_tokens))
    found = []
    for expert, first, last in used.tolist():
        pairs = order[first:last].tolist()
        assert 0 < len(pairs) <= 16
        assert {int(ids.flatten()[pair]) for pair in pairs} == {expert}
        found += pairs
    assert sorted(found) == list(range(2 * num_tokens))


def test_expert_groups_and_score_correction_affect_selection_but_not_weights(
    device: torch.device,
) -> None:
    """Two of four groups by their best two corrected scores, then two experts of these groups."""
    rule = ExpertsConfig(
        count=8,
        per_token=2,
        size=4,
        scoring="sigmoid",
        renormalizes=True,
        scale=2.5,
        groups=4,
        groups_per_token=2,
        group_score="best_two",
        correction=True,
    )
    logits = torch.tensor([[3.0, -9.0, 1.0, 1.1, 0.0, 0.5, -1.0, -1.0]], device=device)
    correction = torch.zeros(8, device=device)
    correction[5] = 0.3
    shares, ids = route(logits, correction, rule)
    # Expert 0 has the best score, but its group is third: its other expert is bad.
    assert sorted(ids[0].tolist()) == [3, 5]
    scores = logits[0, ids[0].long()].sigmoid()
    torch.testing.assert_close(shares[0], 2.5 * scores / scores.sum())


def test_a_token_with_nan_selects_existing_experts(device: torch.device) -> None:
    logits = torch.full((2, 5), float("nan"), device=device)
    logits[1] = torch.arange(5, device=device)
    _, ids = route(logits, None, ExpertsConfig(5, 2, 4))
    assert ids.min() >= 0 and ids.max() < 5
    assert ids[1].tolist() == [4, 3]

"""The tinygrad models against Transformers in float32 on tiny random weights, layer by layer."""

from pathlib import Path

import numpy as np
import pytest
import torch
from tinygrad import Tensor, dtypes

from engine.tinygrad.models.base import final_norm, forward_sequence
from engine.tinygrad.models.loading import load_model
from engine.weights.model import open_model
from tests.parity import tiny_models

TOLERANCE = 1e-4
RELATIVE = 1e-5  # of a hidden state, whose values may be large
# Each way through the code; rotary rules are numbers that all frameworks read from one place, and
# GPT-2 is compared layer by layer in `test_workshop.py`. Each model takes seconds to compile: three
# of them, which `make test` runs, have windows, parallel blocks, experts, sinks and slopes.
QUICK = ("cohere2", "mpt", "gpt_oss")
LATER = ("olmo2", "gemma2", "gemma3", "gpt_neox", "granitemoe")


@pytest.mark.parametrize(
    "name", tiny_models.quick_first(QUICK, without=(*tiny_models.HYBRIDS,), integration=LATER)
)
def test_every_layer_and_the_logits_equal_hugging_face(name: str, tmp_path: Path) -> None:
    theirs, path = tiny_models.save(name, tmp_path)
    tokens = tiny_models.text()
    with torch.no_grad():
        expected = theirs(torch.tensor([tokens]), output_hidden_states=True)
    source = open_model(path)
    model = load_model(
        source.config, source.weights, tiny_models.MAX_POSITION, dtypes.float32, "CPU"
    )
    source.close()
    logits, states = forward_sequence(model, tokens)
    # Their last state has been through the final norm; ours has not.
    states[-1] = final_norm(model, states[-1])
    Tensor.realize(logits, *states)
    for ours, other in zip(states, expected.hidden_states, strict=True):
        np.testing.assert_allclose(ours.numpy(), other[0].numpy(), atol=TOLERANCE, rtol=RELATIVE)
    np.testing.assert_allclose(logits.numpy(), expected.logits[0].numpy(), atol=TOLERANCE, rtol=0)
    assert logits.abs().max().item() > 0.5, "logits near zero would agree whatever the model did"

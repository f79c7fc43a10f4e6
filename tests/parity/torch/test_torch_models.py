"""The torch models against Transformers in float32 on tiny random weights, layer by layer."""

from pathlib import Path

import pytest
import torch

from engine.torch.models.base import Decoder
from engine.torch.models.loading import build_model
from engine.weights.model import open_model
from tests.parity import tiny_models

CPU = torch.device("cpu")
TOLERANCE = 1e-4
# Sums over a whole sequence in another order, through the inverse of a triangular matrix.
TOLERANCES = {"qwen3_next": 3e-4}


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """Two threads crawl where other processes share the cores."""
    torch.set_num_threads(1)


def load(path: Path, max_seq_len: int = tiny_models.MAX_POSITION) -> Decoder:
    source = open_model(path)
    model = build_model(source.config, source.weights, max_seq_len, CPU, torch.float32)
    source.close()
    return model


@pytest.mark.parametrize("name", tiny_models.ALL)
def test_every_layer_and_the_logits_equal_hugging_face(name: str, tmp_path: Path) -> None:
    theirs, path = tiny_models.save(name, tmp_path)
    token_ids = torch.tensor(tiny_models.text())
    with torch.no_grad():
        expected = theirs(token_ids[None], output_hidden_states=True)
        model = load(path)
        logits, states = model.forward_sequence(token_ids, with_states=True)
    # Their last state has been through the final norm; ours has not.
    states[-1] = model.norm(states[-1])
    assert len(states) == len(model.layers) + 1
    tolerance = TOLERANCES.get(name, TOLERANCE)
    for ours, other in zip(states, expected.hidden_states, strict=True):
        torch.testing.assert_close(ours, other[0], atol=tolerance, rtol=0)
    torch.testing.assert_close(logits, expected.logits[0], atol=tolerance, rtol=0)
    assert logits.abs().max() > 1, "logits near zero would agree whatever the model did"


def test_dynamic_rope_is_fixed_at_the_maximum_served_length(tmp_path: Path) -> None:
    """Hugging Face stretches for the text at hand; we agree where that is as long as we serve."""
    theirs, path = tiny_models.save("llama-dynamic", tmp_path)
    length = tiny_models.MAX_POSITION + 60
    token_ids = torch.tensor(tiny_models.text(length))
    with torch.no_grad():
        expected = theirs(token_ids[None]).logits[0]
        stretched = load(path, max_seq_len=length).forward_sequence(token_ids)
        plain = load(path).forward_sequence(token_ids)
    torch.testing.assert_close(stretched, expected, atol=TOLERANCE, rtol=0)
    assert (plain - expected).abs().max() > 0.1


def test_whole_sequence_forward_can_be_trained(tmp_path: Path) -> None:
    theirs, path = tiny_models.save("qwen2", tmp_path)
    token_ids = torch.tensor(tiny_models.text())
    theirs(token_ids[None], labels=token_ids[None]).loss.backward()
    model = load(path)
    logits = model.forward_sequence(token_ids)
    torch.nn.functional.cross_entropy(logits[:-1], token_ids[1:]).backward()
    pairs = [
        (model.embed.weight, theirs.model.embed_tokens.weight),
        (model.layers[0].mlp.down.weight, theirs.model.layers[0].mlp.down_proj.weight),
        (model.layers[1].attn_norm.weight, theirs.model.layers[1].input_layernorm.weight),
    ]
    for ours, other in pairs:
        torch.testing.assert_close(ours.grad, other.grad, atol=1e-4, rtol=1e-4)

"""The JAX models against Transformers in float32 on tiny random weights, layer by layer."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from engine.jax.layers.linear import Params
from engine.jax.models.base import (
    Model,
    final_norm,
    forward_sequence,
)
from engine.jax.models.loading import build_model, load_params
from engine.weights.model import open_model
from tests.parity import tiny_models

TOLERANCE = 1e-4
RELATIVE = 1e-5  # of a hidden state, whose values may be large
# Each way through the code; rotary rules are numbers that all frameworks read from one place.
QUICK = (
    *("gpt2", "llama-biases", "qwen3", "olmo2", "smollm3", "gemma2", "gemma3", "cohere2"),
    *("nemotron", "gpt_neox", "mpt", "granitemoe", "qwen2_moe", "gpt_oss"),
)


def load(path: Path) -> tuple[Model, Params]:
    source = open_model(path)
    model = build_model(source.config, source.weights, tiny_models.MAX_POSITION)
    params = load_params(source.weights, jnp.float32, lambda name, value: jnp.asarray(value))
    source.close()
    return model, params


@pytest.mark.parametrize("name", tiny_models.quick_first(QUICK, without=(*tiny_models.HYBRIDS,)))
def test_every_layer_and_the_logits_equal_hugging_face(name: str, tmp_path: Path) -> None:
    theirs, path = tiny_models.save(name, tmp_path)
    tokens = tiny_models.text()
    with torch.no_grad():
        expected = theirs(torch.tensor([tokens]), output_hidden_states=True)
    model, params = load(path)
    logits, states = forward_sequence(model, params, jnp.array(tokens))
    # Their last state has been through the final norm; ours has not.
    states[-1] = final_norm(model, params, states[-1])
    for ours, other in zip(states, expected.hidden_states, strict=True):
        np.testing.assert_allclose(ours, other[0].numpy(), atol=TOLERANCE, rtol=RELATIVE)
    np.testing.assert_allclose(logits, expected.logits[0].numpy(), atol=TOLERANCE, rtol=0)
    assert jnp.abs(logits).max() > 0.5, "logits near zero would agree whatever the model did"


def test_whole_sequence_forward_can_be_differentiated(tmp_path: Path) -> None:
    theirs, path = tiny_models.save("qwen2", tmp_path)
    tokens = torch.tensor(tiny_models.text())
    theirs(tokens[None], labels=tokens[None]).loss.backward()
    model, params = load(path)
    ids = jnp.array(tokens.numpy())

    def loss(params: Params) -> jax.Array:
        scores = jax.nn.log_softmax(forward_sequence(model, params, ids)[0][:-1])
        return -jnp.take_along_axis(scores, ids[1:, None], axis=1).mean()

    found = jax.jit(jax.grad(loss))(params)
    pairs = [
        (found["embed"]["weight"], theirs.model.embed_tokens.weight),
        (found["layers"][0]["mlp"]["down"]["weight"], theirs.model.layers[0].mlp.down_proj.weight),
        (found["layers"][1]["attn_norm"]["weight"], theirs.model.layers[1].input_layernorm.weight),
    ]
    for ours, other in pairs:
        np.testing.assert_allclose(ours, other.grad.numpy(), atol=1e-4, rtol=1e-4)

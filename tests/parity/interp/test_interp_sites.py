"""Every site of four families on native, torch and JAX against forward hooks on Transformers: the
values that are captured, and the logits after an edit. The slow ones do the same with the default
model.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from engine.architectures.sites import READ_ONLY
from engine.conversion.convert import convert
from engine.core.interfaces.interp import Attribution, Edit, InterpRequest, Span
from engine.native.execution.runner import NativeRunner
from tests.parity import tiny_models
from tests.parity.hooked import Change, Hooked
from tests.support.toy_engine.probed_engine import ProbedEngine, request

DEFAULT = "default"
FAMILIES = ("llama", "qwen2", "qwen3", "gpt2")
FRAMEWORKS = ("native", "torch", "jax")
pytestmark = pytest.mark.parametrize(
    ("saved", "pair"),
    [
        *tiny_models.in_frameworks(FAMILIES, FRAMEWORKS, {"jax": ("qwen3", "gpt2")}),
        *(pytest.param(DEFAULT, each, marks=pytest.mark.slow) for each in FRAMEWORKS),
    ],
    indirect=True,
)
# Float sums in another order, relative to the largest value of a site.
TOLERANCE = 1e-5
DEFAULT_TOLERANCE = 1e-4  # thirty layers
TOKENS = tiny_models.text(24)


@pytest.fixture(scope="module")
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("saved")
    if request.param != DEFAULT:
        return tiny_models.save(request.param, folder)
    path: Path = request.getfixturevalue("default_model")
    convert(path, folder / "float32", dtype="F32")
    model = LlamaForCausalLM.from_pretrained(folder / "float32", dtype=torch.float32)
    return model.eval(), folder / "float32"


@pytest.fixture(scope="module")
def pair(request: pytest.FixtureRequest, saved: Any) -> Iterator[tuple[Any, ProbedEngine]]:
    torch.set_num_threads(1)
    theirs, path = saved
    engine = ProbedEngine(path, request.param)
    yield theirs, engine
    engine.close()


def test_captures_at_every_site_equal_forward_hooks(pair: tuple[Any, ProbedEngine]) -> None:
    theirs, engine = pair
    hooked = Hooked(theirs)
    hooked.run(TOKENS)
    sites = engine.runner.sites
    tolerance = TOLERANCE if engine.runner.config.num_layers < 30 else DEFAULT_TOLERANCE
    names = tuple(site.name for site in sites if site.part not in READ_ONLY)
    assert set(names) == set(hooked.values), "a site that no hook covers"
    answer = engine.run(request("all", TOKENS, sites=names))["all"]
    assert answer.error is None
    for name in names:
        ours, expected = answer.captured[name], hooked.values[name].numpy()
        assert answer.positions[name] == list(range(len(TOKENS))), name
        assert np.abs(expected).max() > 0.01, "values near zero would agree whatever we did"
        error = np.abs(ours.reshape(expected.shape) - expected).max() / np.abs(expected).max()
        assert error < tolerance, f"{name}: {error}"


def changes(kind: str, vector: np.ndarray) -> Change:
    v = torch.from_numpy(vector)

    def change(x: Tensor) -> Tensor:
        x = x.clone()
        own = x[5:]
        if kind == "add":
            x[5:] = own + 0.7 * v
        elif kind == "scale":
            x[5:] = own * 0.7
        elif kind == "set":
            x[5:] = 0.7 * v
        elif kind == "project_out":
            x[5:] = own - 0.7 * (own @ v)[:, None] * v
        return x

    return change


EDITED = ("hook_embed", "blocks.1.hook_resid_pre", "blocks.0.attn.hook_q", "blocks.1.attn.hook_k")
EDITED += ("blocks.1.attn.hook_v", "blocks.0.attn.hook_z", "blocks.1.hook_attn_out")
EDITED += ("blocks.1.mlp.hook_pre", "blocks.0.mlp.hook_post", "blocks.2.hook_mlp_out")
EDITED += ("blocks.2.hook_resid_post", "ln_final.hook_normalized")
KINDS = ("add", "scale", "project_out", "set")
# A set vector would hide what the edits before it did.
KIND_OF = {name: KINDS[index % 3] for index, name in enumerate(EDITED)} | {
    "blocks.0.attn.hook_q": "set",
    "blocks.2.hook_resid_post": "add",  # the final norm would undo a scale
}


def test_edits_equal_edits_by_hooks(pair: tuple[Any, ProbedEngine]) -> None:
    """All in one step, and on native each by itself too. JAX compiles a program for each."""
    theirs, engine = pair
    by_name = {site.name: site for site in engine.runner.sites}
    vectors, plain = {}, Hooked(theirs).run(TOKENS)[-1].log_softmax(-1)
    for index, name in enumerate(EDITED):
        vector = np.random.default_rng(index).normal(size=by_name[name].width).astype(np.float32)
        vectors[name] = vector / np.linalg.norm(vector)
    alone = [(name,) for name in EDITED] if isinstance(engine.runner, NativeRunner) else []
    for names in (EDITED, *alone):
        hooks = {name: changes(KIND_OF[name], vectors[name]) for name in names}
        expected = Hooked(theirs, hooks).run(TOKENS)[-1].log_softmax(-1)
        assert (plain - expected).abs().max() > 1e-3, f"{names}: the edit does nothing"
        span = Span(tuple(range(5, len(TOKENS))))
        edits = tuple(
            Edit(name, KIND_OF[name], 0.7, (vectors[name].tobytes(),), span) for name in names
        )
        answer = engine.run(request("edited", TOKENS, edits=edits, logprobs=20))["edited"]
        assert answer.error is None, answer.error
        top = answer.logprobs[0]
        wanted = expected[list(top.top_ids)]
        ours = torch.tensor(top.top_logprobs)
        torch.testing.assert_close(ours, wanted, atol=1e-4, rtol=0, msg=f"{names}")


def test_input_x_gradient_equals_autograd(pair: tuple[Any, ProbedEngine]) -> None:
    theirs, engine = pair
    interp = InterpRequest(attribution=Attribution(7, -1, "input_x_gradient"))
    answer = engine.run(request("gradient", TOKENS, interp=interp))["gradient"]
    if isinstance(engine.runner, NativeRunner):
        assert answer.error is not None and "torch or jax" in answer.error
        return
    embeds = theirs.get_input_embeddings()(torch.tensor([TOKENS])).detach().requires_grad_()
    theirs(inputs_embeds=embeds).logits[0, -1, 7].backward()
    expected = (embeds.grad * embeds).sum(-1)[0].detach().numpy()
    shares = answer.facts["attribution"]["shares"]
    ours = np.array([shares[str(index)] for index in range(len(TOKENS))])
    np.testing.assert_allclose(ours, expected, atol=1e-4 * np.abs(expected).max())

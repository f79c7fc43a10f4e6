"""Compares every layer in every installed framework with Transformers, on random weights.

    python engine_tools/dev/test_gpt2_equivalence.py
    engine dev test_gpt2_equivalence --family llama --model path/to/checkpoint --json

The table has a line for each site, in the order of computation. A site is a named place in the
model, such as `layers.0.attn`, the output of the first attention layer. A cell shows the largest
absolute error at the site, and that error relative to the site's largest value. For each framework,
the script names the first site whose error exceeds the tolerance. The exit status is not zero if
there is such a site. `engine/tools/inspection.py` lists the sites, and says how a
framework can show more of them than the model runner interface does.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging

from engine.tools.inspection import frameworks, layer_outputs
from engine.weights.model import ModelSource, open_model
from engine_tools.reference import monolithic_gpt2

FAMILIES = ("gpt2", "llama", "qwen2", "qwen3", "granite", "olmo2")
_COMMON: dict[str, Any] = {
    "vocab_size": 211,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_GATED: dict[str, Any] = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "tie_word_embeddings": False,
}
_SIZES: dict[str, dict[str, Any]] = {
    "gpt2": {"n_embd": 48, "n_head": 4, "n_positions": 128},
    "llama": _GATED,
    "qwen2": _GATED | {"tie_word_embeddings": True},
    "qwen3": _GATED | {"head_dim": 12},
    "granite": _GATED
    | {
        "embedding_multiplier": 12.0,
        "residual_multiplier": 0.22,
        "attention_multiplier": 0.21,
        "logits_scaling": 5.0,
    },
    "olmo2": _GATED,
}


def save_tiny(family: str, folder: Path, num_layers: int = 3) -> Any:
    """Write a small random checkpoint into the folder. Returns the same model as a Transformers
    model in float32.
    """
    logging.disable_progress_bar()
    torch.manual_seed(sum(map(ord, family)))
    config = AutoConfig.for_model(
        family, **_COMMON | _SIZES[family] | {"num_hidden_layers": num_layers}
    )
    model = AutoModelForCausalLM.from_config(config).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.3)
    model.save_pretrained(folder)
    return model


Values = dict[str, NDArray[Any]]
# Max error, relative to a site's largest value. Errors from a different order of float32 sums stay
# below it.
TOLERANCE = 1e-4
REFERENCE = "reference"
_SITE_WIDTH, _CELL_WIDTH = 20, 20  # characters, in the table


@dataclass(frozen=True, slots=True)
class Difference:
    absolute: float
    relative: float  # relative to the largest value of the site

    @property
    def agrees(self) -> bool:
        return self.relative <= TOLERANCE  # False for NaN


@dataclass(frozen=True, slots=True)
class Report:
    family: str
    sites: tuple[str, ...]  # in the order of computation
    found: dict[str, dict[str, Difference]]  # framework -> site -> error
    missing: dict[str, str]  # framework -> why it was not compared

    def first_diverging(self, framework: str) -> str | None:
        cells = self.found[framework]
        return next((s for s in self.sites if s in cells and not cells[s].agrees), None)

    @property
    def agrees(self) -> bool:
        return all(self.first_diverging(framework) is None for framework in self.found)


def compare(
    family: str,
    model: Any,
    path: Path,
    token_ids: Sequence[int],
    only: Sequence[str] | None = None,
) -> Report:
    """Compare the frameworks with `model`, a Transformers model. `path` is a checkpoint with the
    same weights. `only` selects frameworks.
    """
    expected = transformers_outputs(model, token_ids)
    here, missing = frameworks(only)
    found: dict[str, dict[str, Difference]] = {}
    with closing(open_model(path)) as source:
        if family == "gpt2":
            found[REFERENCE] = differences(expected, _reference(model, source, token_ids))
        for framework in here:
            found[framework] = differences(expected, layer_outputs(framework, source, token_ids))
    return Report(family, tuple(expected), found, missing)


def differences(expected: Values, ours: Values) -> dict[str, Difference]:
    found = {}
    for site, values in expected.items():
        if site in ours:
            error = float(np.abs(ours[site].astype(np.float64) - values).max())
            found[site] = Difference(error, error / float(np.abs(values).max()))
    unknown = sorted(ours.keys() - expected.keys())
    assert not unknown, f"no site of the model: {unknown}"
    return found


@torch.inference_mode()
def transformers_outputs(model: Any, token_ids: Sequence[int]) -> Values:
    """The values at the sites of `inspection`, recorded by hooks on the modules of a Transformers
    model.
    """
    body = model.get_decoder() if hasattr(model, "get_decoder") else model.base_model
    layers = body.h if hasattr(body, "h") else body.layers
    norm = body.ln_f if hasattr(body, "ln_f") else body.norm
    taken: dict[str, torch.Tensor] = {}

    def keep(site: str) -> Any:
        def hook(module: Any, given: Any, output: Any) -> None:
            taken[site] = (output[0] if isinstance(output, tuple) else output)[0].reshape(
                len(token_ids), -1
            )

        return hook

    def keep_input(module: Any, given: Any, named: Any) -> None:
        taken["embed"] = (given[0] if given else named["hidden_states"])[0]

    hooks = [layers[0].register_forward_pre_hook(keep_input, with_kwargs=True)]
    for index, layer in enumerate(layers):
        attention = layer.attn if hasattr(layer, "attn") else layer.self_attn
        for module, site in ((attention, "attn"), (layer.mlp, "mlp"), (layer, "out")):
            hooks.append(module.register_forward_hook(keep(f"layers.{index}.{site}")))
    ids = torch.tensor([list(token_ids)])
    logits = model(ids).logits[0].float()
    for hook in hooks:
        hook.remove()
    served = {
        f"served.layers.{index}": norm(taken[f"layers.{index}.out"]) for index in range(len(layers))
    }
    chances = logits.log_softmax(dim=-1)[:-1].gather(1, ids[0, 1:, None])[:, 0]
    ordered = _in_order({**taken, **served}, len(layers))
    found = ordered | {"logits": logits, "served.logprobs": chances}
    return {site: values.double().numpy() for site, values in found.items()}


def _in_order(taken: dict[str, torch.Tensor], num_layers: int) -> dict[str, torch.Tensor]:
    sites = ["embed"]
    for index in range(num_layers):
        sites += [f"layers.{index}.{part}" for part in ("attn", "mlp", "out")]
        sites.append(f"served.layers.{index}")
    return {site: taken[site] for site in sites}


def _reference(model: Any, source: ModelSource, token_ids: Sequence[int]) -> Values:
    weights = {name: value.numpy() for name, value in model.state_dict().items()}
    found = monolithic_gpt2.layer_outputs(
        weights, token_ids, source.config.num_heads, source.config.norm_eps
    )
    return {site: values for site, values in found.items() if site != "norm"}


def print_report(report: Report) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    console.width = max(console.width, _SITE_WIDTH + _CELL_WIDTH * len(report.found))
    table = Table("site", box=None, pad_edge=False, title=f"{report.family}: max error (relative)")
    for framework in report.found:
        table.add_column(framework, justify="right", no_wrap=True)
    for site in report.sites:
        cells = (found.get(site) for found in report.found.values())
        table.add_row(site, *(_cell(difference) for difference in cells))
    console.print(table)
    for framework in report.found:
        diverging = report.first_diverging(framework)
        verdict = "agrees" if diverging is None else f"diverges first at {diverging}"
        console.print(f"{framework}: {verdict}", highlight=False)
    for framework, why in report.missing.items():
        console.print(f"{framework}: not here ({why})", highlight=False, markup=False)


def _cell(difference: Difference | None) -> str:
    if difference is None:
        return "-"
    mark = "" if difference.agrees else " !"
    return f"{difference.absolute:.1e} ({difference.relative:.0e}){mark}"


def _json(report: Report) -> str:
    errors = {
        framework: {site: [cell.absolute, cell.relative] for site, cell in found.items()}
        for framework, found in report.found.items()
    }
    diverging = {framework: report.first_diverging(framework) for framework in report.found}
    facts = {"family": report.family, "errors": errors, "first_diverging": diverging}
    return json.dumps(facts | {"missing": report.missing}, indent=2)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--family", choices=[*FAMILIES, "all"], default="gpt2")
    parser.add_argument("--model", type=Path, help="a Hugging Face folder; default: random weights")
    parser.add_argument("--frameworks", nargs="+", help="default: all that are installed")
    parser.add_argument("--length", type=int, default=24, help="tokens of the text, at most 128")
    parser.add_argument("--seed", type=int, default=0, help="of the text's tokens")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args(arguments)
    reports = []
    with tempfile.TemporaryDirectory() as folder:
        for family in FAMILIES if given.family == "all" else (given.family,):
            if given.model is None:
                path = Path(folder) / family
                model = save_tiny(family, path)
            else:
                from transformers import AutoModelForCausalLM

                path = given.model
                model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
            rng = np.random.default_rng(given.seed)
            token_ids = rng.integers(3, model.config.vocab_size, given.length).tolist()
            reports.append(compare(family, model, path, token_ids, given.frameworks))
    for report in reports:
        if given.json:
            print(_json(report))
        else:
            print_report(report)
    sys.exit(0 if all(report.agrees for report in reports) else 1)


if __name__ == "__main__":
    main()

"""What vLLM's workers learn by `--worker-extension-cls worker_taps.InterpTaps`: forward hooks that
read and change activations. It is imported by vLLM's Python, so it needs PyTorch alone.

The methods are called over vLLM's `/collective_rpc`, which passes texts. So a request is JSON:
names of sites, positions and vectors, and no code. Between `interp_begin` and `interp_end`, vLLM
must run one request only, in eager mode and without cached prefixes.
"""

import base64
import json
from typing import Any

import torch
from torch import Tensor, nn

PARTS = ("hook_resid_pre", "hook_attn_out", "hook_mlp_out", "hook_resid_post")


def layers_of(model: nn.Module) -> list[nn.Module]:
    """The decoder layers, in vLLM's Llama-like and GPT-2-like models."""
    if hasattr(model, "transformer"):
        return list(model.transformer.h)
    return list(model.model.layers)


class Tapped:
    """The hooks of one request."""

    def __init__(self, model: nn.Module, asked: dict[str, Any]) -> None:
        self.num_prompt = asked["num_prompt"]
        self.edits: dict[str, list[dict[str, Any]]] = {}
        for edit in asked["edits"]:
            self.edits.setdefault(edit["site"], []).append(edit | {"values": _vectors(edit)})
        self.captures = {each["site"]: each for each in asked["captures"]}
        self.found: dict[str, dict[int, Tensor]] = {site: {} for site in self.captures}
        self.positions: list[int] = []  # of the tokens of the step
        self.num_seen = 0
        self.is_mixed = False  # whether a step had tokens of another request
        self.handles = [model.register_forward_pre_hook(self._note_positions, with_kwargs=True)]
        for index, layer in enumerate(layers_of(model)):
            self._hook_layer(f"blocks.{index}", layer)

    def _hook_layer(self, at: str, layer: nn.Module) -> None:
        attention = layer.attn if hasattr(layer, "attn") else layer.self_attn
        before, after = f"{at}.hook_resid_pre", f"{at}.hook_resid_post"
        if self._wants(before):
            self.handles.append(layer.register_forward_pre_hook(self._before(before)))
        for site, module in ((f"{at}.hook_attn_out", attention), (f"{at}.hook_mlp_out", layer.mlp)):
            if self._wants(site):
                self.handles.append(module.register_forward_hook(self._output(site)))
        if self._wants(after):
            self.handles.append(layer.register_forward_hook(self._after(after)))

    def _wants(self, site: str) -> bool:
        return site in self.captures or site in self.edits

    def _note_positions(self, _: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> None:
        positions = named["positions"] if "positions" in named else given[1]
        self.positions = positions.reshape(-1).tolist()
        end = self.num_seen + len(self.positions)
        self.is_mixed |= self.positions != list(range(self.num_seen, end))
        self.num_seen = end

    def _before(self, site: str) -> Any:
        """vLLM's Llama-like layers take (positions, x, residual), where x + residual is the
        stream, and the first has no residual. GPT-2's take x.
        """

        def hook(_: nn.Module, given: tuple[Any, ...]) -> tuple[Any, ...]:
            place = 1 if len(given) == 3 else 0
            residual = given[2] if len(given) == 3 else None
            changed = self._change(site, given[place], residual)
            return (*given[:place], changed, *given[place + 1 :])

        return hook

    def _after(self, site: str) -> Any:
        def hook(_: nn.Module, __: Any, output: Any) -> Any:
            if isinstance(output, tuple):
                return (self._change(site, output[0], output[1]), *output[1:])
            return self._change(site, output, None)

        return hook

    def _output(self, site: str) -> Any:
        return lambda _, __, output: self._change(site, output, None)

    def _change(self, site: str, x: Tensor, residual: Tensor | None) -> Tensor:
        """x with the edits of the stream x + residual."""
        stream = x.float() if residual is None else x.float() + residual.float()
        edited = stream.clone()
        for edit in self.edits.get(site, ()):
            _apply(edit, edited, self._rows(edit))
        if site in self.captures:
            for row in self._rows(self.captures[site]):
                self.found[site][self.positions[row]] = edited[row].cpu()
        return (x + (edited - stream)).to(x.dtype) if site in self.edits else x

    def _rows(self, where: dict[str, Any]) -> list[int]:
        return [row for row, place in enumerate(self.positions) if self._is_meant(where, place)]

    def _is_meant(self, where: dict[str, Any], place: int) -> bool:
        if where["phase"] != "both" and (where["phase"] == "prompt") != (place < self.num_prompt):
            return False
        return where["positions"] is None or place in where["positions"]

    def end(self) -> dict[str, Any]:
        for handle in self.handles:
            handle.remove()
        captures = [_told(site, rows) for site, rows in self.found.items()]
        return {"captures": captures, "is_mixed": self.is_mixed}


def _vectors(edit: dict[str, Any]) -> list[Tensor]:
    raw = (bytearray(base64.b64decode(each)) for each in edit["vectors"])
    return [torch.frombuffer(each, dtype=torch.float32) for each in raw]


def _apply(edit: dict[str, Any], x: Tensor, rows: list[int]) -> None:
    if not rows:
        return
    scale, kind = edit["scale"], edit["kind"]
    if kind == "scale":
        x[rows] *= scale
        return
    v = edit["values"][0].to(x.device)
    if kind == "add":
        x[rows] += scale * v
    elif kind == "set":
        x[rows] = scale * v
    else:  # project_out
        x[rows] -= scale * (x[rows] @ v)[:, None] * v


def _told(site: str, rows: dict[int, Tensor]) -> dict[str, Any]:
    places = sorted(rows)
    values = torch.stack([rows[each] for each in places]) if places else torch.zeros(0, 0)
    data = base64.b64encode(values.numpy().tobytes()).decode()
    return {"site": site, "positions": places, "shape": list(values.shape), "values": data}


class InterpTaps:
    """Methods that vLLM adds to its worker."""

    interp_tapped: Tapped | None = None

    def interp_sites(self) -> list[dict[str, Any]]:
        model = self.get_model()  # type: ignore[attr-defined]
        shape = [model.config.hidden_size]
        return [
            {"name": f"blocks.{index}.{part}", "shape": shape}
            for index in range(len(layers_of(model)))
            for part in PARTS
        ]

    def interp_begin(self, asked: str) -> None:
        self.interp_end()
        model = self.get_model()  # type: ignore[attr-defined]
        self.interp_tapped = Tapped(model, json.loads(asked))

    def interp_end(self) -> dict[str, Any] | None:
        tapped, self.interp_tapped = self.interp_tapped, None
        return None if tapped is None else tapped.end()

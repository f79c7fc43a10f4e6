"""Forward hooks on Transformers models: the values at our sites, read and edited."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

Change = Callable[[Tensor], Tensor]


class Hooked:
    """Runs a model and keeps the values of all sites, each (T, W). `edits` change some of them."""

    def __init__(self, model: Any, edits: dict[str, Change] | None = None) -> None:
        self.model, self.edits = model, edits or {}
        self.values: dict[str, Tensor] = {}

    def run(self, tokens: list[int]) -> Tensor:
        """The logits (T, V)."""
        handles = self._gpt2() if hasattr(self.model, "transformer") else self._llama()
        try:
            with torch.no_grad():
                logits: Tensor = self.model(torch.tensor([tokens])).logits[0]
            return logits
        finally:
            for handle in handles:
                handle.remove()

    def _seen(self, site: str, value: Tensor) -> Tensor:
        if site in self.edits:
            value = self.edits[site](value[0])[None]
        self.values[site] = value[0]
        return value

    def _output(self, module: nn.Module, *sites: str) -> Any:
        """The sites are side by side in the module's output."""

        def hook(_: nn.Module, __: Any, output: Any) -> Any:
            first = output[0] if isinstance(output, tuple) else output
            parts = first.chunk(len(sites), dim=-1)
            made = torch.cat([self._seen(s, p) for s, p in zip(sites, parts, strict=True)], -1)
            return (made, *output[1:]) if isinstance(output, tuple) else made

        return module.register_forward_hook(hook)

    def _input(self, module: nn.Module, site: str) -> Any:
        def hook(_: nn.Module, given: tuple[Any, ...], kwargs: Any) -> Any:
            if given:
                return (self._seen(site, given[0]), *given[1:]), kwargs
            return given, kwargs | {"hidden_states": self._seen(site, kwargs["hidden_states"])}

        return module.register_forward_pre_hook(hook, with_kwargs=True)

    def _llama(self) -> list[Any]:
        inner = self.model.model
        found = [self._output(inner.embed_tokens, "hook_embed")]
        for index, layer in enumerate(inner.layers):
            at = f"blocks.{index}"
            attn, mlp = layer.self_attn, layer.mlp
            found += [
                self._input(layer, f"{at}.hook_resid_pre"),
                self._output(attn.q_proj, f"{at}.attn.hook_q"),
                self._output(attn.k_proj, f"{at}.attn.hook_k"),
                self._output(attn.v_proj, f"{at}.attn.hook_v"),
                self._input(attn.o_proj, f"{at}.attn.hook_z"),
                self._output(attn, f"{at}.hook_attn_out"),
                self._output(mlp.gate_proj, f"{at}.mlp.hook_pre"),
                self._input(mlp.down_proj, f"{at}.mlp.hook_post"),
                self._output(mlp, f"{at}.hook_mlp_out"),
                self._output(layer, f"{at}.hook_resid_post"),
            ]
            found += self._middle(layer.post_attention_layernorm, f"{at}.hook_resid_mid")
        return [*found, self._output(inner.norm, "ln_final.hook_normalized")]

    def _middle(self, norm: nn.Module, site: str) -> list[Any]:
        """The stream between attention and MLP can be read here, but an edit would not reach the
        sum after the MLP.
        """
        assert site not in self.edits, site
        return [self._input(norm, site)]

    def _gpt2(self) -> list[Any]:
        inner = self.model.transformer
        found = [self._output(inner.wte, "hook_embed")]
        for index, layer in enumerate(inner.h):
            at = f"blocks.{index}"
            names = [f"{at}.attn.hook_{part}" for part in "qkv"]
            found += [
                self._input(layer, f"{at}.hook_resid_pre"),
                self._output(layer.attn.c_attn, *names),
                self._input(layer.attn.c_proj, f"{at}.attn.hook_z"),
                self._output(layer.attn, f"{at}.hook_attn_out"),
                self._output(layer.mlp.c_fc, f"{at}.mlp.hook_pre"),
                self._input(layer.mlp.c_proj, f"{at}.mlp.hook_post"),
                self._output(layer.mlp, f"{at}.hook_mlp_out"),
                self._output(layer, f"{at}.hook_resid_post"),
            ]
            found += self._middle(layer.ln_2, f"{at}.hook_resid_mid")
        return [*found, self._output(inner.ln_f, "ln_final.hook_normalized")]

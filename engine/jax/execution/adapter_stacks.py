"""The LoRA adapters of a JAX model: packs them, and keeps those that have a place on the device."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from engine.adapters.matrices import HEAD, Adapter
from engine.jax.layers.adapted import RowAdapters, Stack
from engine.runtime.model_runner import I32, BatchInputs

_RANK_STEP, _PLACE_STEP = 8, 4


@dataclass(frozen=True, slots=True)
class JAXAdapter:
    """A packed adapter: matrices of the model's dtype, (rank, in) and (rank, out)."""

    pairs: dict[str, tuple[np.ndarray, np.ndarray]]
    whole: dict[str, np.ndarray]
    max_rank: int
    num_bytes: int


class JAXAdapters:
    def __init__(self, dtype: jnp.dtype, home: jax.sharding.Sharding) -> None:
        self._dtype, self._home = dtype, home
        self._held: dict[int, JAXAdapter] = {}
        self._rank = self._num_places = 0
        self._stacks: dict[str, Stack] = {}
        self._whole: dict[str, tuple[jax.Array, jax.Array]] = {}

    def pack(self, adapter: Adapter) -> JAXAdapter:
        pairs = {
            name: (pair.a.astype(self._dtype), pair.b.T.astype(self._dtype))
            for name, pair in adapter.pairs.items()
        }
        whole = {name: each.astype(self._dtype) for name, each in adapter.whole.items()}
        return JAXAdapter(pairs, whole, adapter.max_rank, adapter.num_bytes)

    def set(self, number: int, packed: JAXAdapter) -> None:
        """Put an adapter into a place. Sizes are rounded up, as XLA compiles again for each."""
        self._held[number] = packed
        self._rank = max(self._rank, -(-packed.max_rank // _RANK_STEP) * _RANK_STEP)
        self._num_places = max(self._num_places, -(-(number + 1) // _PLACE_STEP) * _PLACE_STEP)
        names = dict.fromkeys(name for held in self._held.values() for name in held.pairs)
        self._stacks = {name: self._stacked(name) for name in names}
        wholes = dict.fromkeys(name for held in self._held.values() for name in held.whole)
        self._whole = {name: self._stacked_whole(name) for name in wholes}

    def _stacked(self, name: str) -> Stack:
        shapes = next(held.pairs[name] for held in self._held.values() if name in held.pairs)
        made = [
            np.zeros((self._num_places, self._rank, each.shape[1]), each.dtype) for each in shapes
        ]
        for place, held in self._held.items():
            for stack, each in zip(made, held.pairs.get(name, ()), strict=False):
                stack[place, : len(each)] = each
        return Stack(*(jax.device_put(each, self._home) for each in made))

    def _stacked_whole(self, name: str) -> tuple[jax.Array, jax.Array]:
        found = {n: held.whole[name] for n, held in self._held.items() if name in held.whole}
        weights, places = np.stack(list(found.values())), np.array([*found], np.int32)
        return jax.device_put(weights, self._home), jax.device_put(places, self._home)

    def of_tokens(self, inputs: BatchInputs, num_tokens: int) -> RowAdapters:
        """The adapters of a step's tokens, which are padded to `num_tokens`."""
        return RowAdapters(self._stacks, self._whole, _padded(_places(inputs), num_tokens))

    def of_logits(self, inputs: BatchInputs, num_rows: int) -> RowAdapters:
        """The adapters of the tokens whose logits are needed, which are padded to `num_rows`. Only
        the head reads them.
        """
        head = {name: stack for name, stack in self._stacks.items() if name == HEAD}
        whole = {name: stack for name, stack in self._whole.items() if name == HEAD}
        return RowAdapters(head, whole, _padded(_places(inputs)[inputs.logit_rows], num_rows))


def _places(inputs: BatchInputs) -> I32:
    places: I32 = np.repeat(inputs.adapter_ids, np.diff(inputs.query_start))
    return places


def _padded(places: I32, size: int) -> I32:
    return np.pad(places, (0, size - len(places)))

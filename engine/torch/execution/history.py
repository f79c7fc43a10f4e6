"""The token history of each slot, on the device. Penalties need these tokens.

The tokens of a sequence are uploaded once, in the first step in which the sequence samples. From
then on the sampler appends each sampled token on the device. So penalties also apply to tokens that
have not reached the host yet. A token is stored at its position, so a row that samples position p
has p earlier tokens.
"""

import numpy as np
import torch
from torch import Tensor

from engine.runtime.model_runner import I32, SamplingInputs
from engine.torch.transfer import to_device


class TokenHistory:
    def __init__(self, max_slots: int, max_seq_len: int, device: torch.device) -> None:
        # There is a spare column, because a token is still sampled after a sequence of max length.
        # There is also a spare slot, to which padding rows write their tokens.
        size = max_slots + 1, max_seq_len + 1
        self._tokens = torch.zeros(size, dtype=torch.int64, device=device)
        self._num_prompt = np.zeros(max_slots, np.int64)
        self._device = device

    def begin(self, sampling: SamplingInputs) -> None:
        """Uploads the tokens of sequences that sample in this step for the first time."""
        if not len(sampling.history_slots):
            return
        self._num_prompt[sampling.history_slots] = sampling.history_num_prompt
        lengths = np.diff(sampling.history_start)
        slots = np.repeat(sampling.history_slots, lengths).astype(np.int64)
        starts = np.repeat(sampling.history_start[:-1], lengths)
        columns = np.arange(len(slots)) - starts
        self._tokens[self._put(slots), self._put(columns)] = self._put(
            sampling.history_tokens[: len(slots)].astype(np.int64)
        )

    @property
    def spare_slot(self) -> int:
        """The slot to which padding rows write their tokens. No sequence uses it."""
        return len(self._num_prompt)

    @property
    def tokens(self) -> Tensor:
        """The tokens of all slots, (max_slots + 1, max_seq_len + 1) int64."""
        return self._tokens

    def num_prompt(self, slots: I32) -> I32:
        return self._num_prompt[slots].astype(np.int32)

    def append(self, slots: Tensor, positions: Tensor, tokens: Tensor) -> None:
        self._tokens[slots, positions] = tokens

    def read(self, slots: I32, positions: I32) -> tuple[Tensor, Tensor]:
        """The earlier tokens of each row, (P, L), and 1.0 or 0.0 for each token that does or does
        not belong to the output, (P, L) float32.

        `positions` are the numbers of earlier tokens of the rows. Rows with fewer than L tokens are
        padded with their first token. Padding does not count as output.
        """
        length = int(positions.max())
        columns = torch.arange(length, device=self._device)
        known = columns < self._put(positions)[:, None]
        output = columns >= self._put(self._num_prompt[slots])[:, None]
        tokens = self._tokens[self._put(slots.astype(np.int64)), :length]
        return torch.where(known, tokens, tokens[:, :1]), (known & output).float()

    def _put(self, array: np.ndarray) -> Tensor:
        return to_device(array, self._device)

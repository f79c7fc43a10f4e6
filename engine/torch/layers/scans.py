"""The arithmetic of layers that keep a state: convolutions, Mamba-2 and the gated delta rule.

Single tokens update the state directly. Longer rows are divided into chunks. Within a chunk, all
tokens are computed together by matmuls. From chunk to chunk, only the state is passed on.

Letters: T tokens, S rows, C channels, H heads, G groups, N state size, P head dim, M chunks,
K tokens of a chunk.
"""

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from engine.ir.recurrent import L2_EPS
from engine.runtime.model_runner import I32
from engine.torch.transfer import to_device

CHUNK = 64  # max tokens of a chunk
_GRAIN = 16  # the size of chunks is a multiple of this


@dataclass(frozen=True, slots=True)
class ScanChunks:
    """Rows of more than one token, divided into chunks of K tokens."""

    size: int  # K
    tokens: Tensor  # (M K) the token at each place; T for places without a token
    places: Tensor  # (L,) the place of each of the L tokens that are in chunks
    sources: Tensor  # (L,) these tokens
    rows: Tensor  # (R,) the rows that have chunks
    # For each n: the chunks that are the n-th of their row, and the indices of these rows in `rows`
    rounds: tuple[tuple[Tensor, Tensor], ...]


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of a step. Each is a slice of the tokens of one sequence."""

    slots: Tensor  # (S,) the index of each row's state
    is_new: Tensor  # (S,) whether the row begins at position 0, with a state of zeros
    starts: Tensor  # (S,) the first token of each row
    row_of: Tensor  # (T,)
    # None: every row has one token. Else the rows with one token are `singles`.
    chunks: ScanChunks | None = None
    singles: Tensor | None = None

    def initial(self, states: Tensor) -> Tensor:
        """The states with which the rows begin. `states` has those of all slots."""
        held = states.index_select(0, self.slots)
        return torch.where(self.is_new.view(-1, *(1,) * (held.dim() - 1)), 0, held)


def divide(query_start: I32, positions: I32, slots: I32, device: torch.device) -> Rows:
    """The rows of a step, from its arrays on the host (see `BatchInputs`)."""
    starts = query_start[:-1].astype(np.int64)
    lengths = np.diff(query_start)
    row_of = np.repeat(np.arange(len(slots)), lengths)
    chunks, singles = None, None
    if (lengths > 1).any():
        chunks = _chunks(starts, lengths, device)
        alone = np.flatnonzero(lengths == 1)
        singles = to_device(alone, device) if len(alone) else None
    return Rows(
        to_device(slots.astype(np.int64), device),
        to_device(positions[starts] == 0, device),
        to_device(starts, device),
        to_device(row_of, device),
        chunks,
        singles,
    )


def _chunks(starts: np.ndarray, lengths: np.ndarray, device: torch.device) -> ScanChunks:
    longest, total = int(lengths.max()), int(lengths.sum())
    size = min(CHUNK, -(-longest // _GRAIN) * _GRAIN)
    rows = np.flatnonzero(lengths > 1)
    counts = -(-lengths[rows] // size)
    first = np.cumsum(counts) - counts  # each row's first chunk
    within = np.arange(counts.sum()) - np.repeat(first, counts)  # each chunk's number in its row
    offsets = within[:, None] * size + np.arange(size)
    tokens = np.repeat(starts[rows], counts)[:, None] + offsets
    is_token = offsets < np.repeat(lengths[rows], counts)[:, None]
    flat = np.where(is_token, tokens, total).reshape(-1)
    places = np.flatnonzero(is_token)
    rounds = []
    for number in range(int(counts.max())):
        having = np.flatnonzero(counts > number)
        rounds.append((to_device(first[having] + number, device), to_device(having, device)))
    return ScanChunks(
        size,
        to_device(flat, device),
        to_device(places, device),
        to_device(flat[places], device),
        to_device(rows, device),
        tuple(rounds),
    )


def convolve(
    x: Tensor, weight: Tensor, bias: Tensor | None, rows: Rows, held: Tensor | None
) -> Tensor:
    """The causal convolution of each channel, (T, C) -> (T, C) float32. `held` has the last inputs
    of each slot, (slots, window - 1, C), and is updated. None: all rows are new.
    """
    window, count, num_rows = weight.shape[1] - 1, len(x), len(rows.starts)
    last = x.new_zeros(num_rows, window, x.shape[1]) if held is None else rows.initial(held)
    if rows.chunks is None:
        padded = torch.cat((last, x[:, None]), dim=1)  # (S, window, C)
        out = torch.einsum("swc,cw->sc", padded.float(), weight.float())
        kept = padded[:, 1:]
    else:
        # The inputs of a row, with the inputs before it in front.
        before = rows.starts + torch.arange(num_rows, device=x.device) * window
        reach = torch.arange(window, device=x.device)
        firsts = torch.arange(count, device=x.device) + rows.row_of * window
        padded = x.new_empty(count + num_rows * window, x.shape[1])
        padded[before[:, None] + reach] = last
        padded[firsts + window] = x
        wide, factors = padded.float(), weight.float()
        out = wide[firsts + window] * factors[:, window]
        for place in range(window):
            out += wide[firsts + place] * factors[:, place]
        ends = torch.cat((before[1:], before.new_tensor([len(padded)])))
        kept = padded[ends[:, None] - window + reach]
    if held is not None:
        held.index_copy_(0, rows.slots, kept.to(held.dtype))
    return out if bias is None else out + bias.float()


def mamba2(
    values: Tensor,
    b: Tensor,
    c: Tensor,
    dt: Tensor,
    decay: Tensor,
    rows: Rows,
    held: Tensor | None,
) -> Tensor:
    """Mamba-2 over values (T, H, P), B and C (T, G, N) and time steps dt (T, H) -> (T, H, P), all
    float32. `held` (slots, H, N, P) has the states and is updated; None: all rows are new.
    """
    state, inputs = _initial(held, rows, values, b), (values, b, c, dt)
    if rows.chunks is None:
        out, state = _mamba2_step(inputs, decay, state)
    else:
        out = torch.empty_like(values)
        if rows.singles is not None:
            at = rows.starts[rows.singles]
            parts = tuple(each[at] for each in inputs)
            out[at], state[rows.singles] = _mamba2_step(parts, decay, state[rows.singles])
        chunks = rows.chunks
        state[chunks.rows] = _mamba2_chunks(inputs, decay, chunks, state[chunks.rows], out)
    _keep(held, rows, state)
    return out


def _initial(held: Tensor | None, rows: Rows, values: Tensor, keys: Tensor) -> Tensor:
    if held is not None:
        return rows.initial(held)
    return values.new_zeros(len(rows.starts), values.shape[1], keys.shape[2], values.shape[2])


def _keep(held: Tensor | None, rows: Rows, state: Tensor) -> None:
    if held is not None:
        held.index_copy_(0, rows.slots, state)


def _by_head(shared: Tensor, heads: int, dim: int) -> Tensor:
    """Repeats what the heads of a group share."""
    return shared.repeat_interleave(heads // shared.shape[dim], dim=dim)


def _mamba2_step(inputs: tuple[Tensor, ...], decay: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """One token of each row: state (S, H, N, P)."""
    values, b, c, dt = inputs
    heads = values.shape[1]
    b, c = _by_head(b, heads, 1), _by_head(c, heads, 1)
    added = (dt[:, :, None] * b)[..., None] * values[:, :, None]
    state = state * torch.exp(dt * decay)[..., None, None] + added
    return torch.einsum("shnp,shn->shp", state, c), state


def _in_chunks(x: Tensor, chunks: ScanChunks) -> Tensor:
    """Divides x (T, H, ...) into chunks: (M, H, K, ...). Places without a token are zero."""
    padded = torch.cat((x, x.new_zeros(1, *x.shape[1:])))
    divided = padded[chunks.tokens].unflatten(0, (-1, chunks.size))
    return divided.transpose(1, 2)


def _mamba2_chunks(
    inputs: tuple[Tensor, ...], decay: Tensor, chunks: ScanChunks, state: Tensor, out: Tensor
) -> Tensor:
    """Writes the results of all chunks to `out`. Returns the states of the rows after them."""
    values, b, c, dt = (_in_chunks(each, chunks) for each in inputs)
    heads = values.shape[1]
    b, c = _by_head(b, heads, 1), _by_head(c, heads, 1)  # (M, H, K, N)
    log = torch.cumsum(dt * decay[:, None], dim=-1)  # (M, H, K) log of the decay since the start
    scores = (c @ b.transpose(-1, -2)) * _pairwise(log) * dt[:, :, None]
    result = scores @ values
    whole = torch.exp(log[..., -1])[..., None, None]
    left = torch.exp(log[..., -1:] - log) * dt
    added = (b * left[..., None]).transpose(-1, -2) @ values  # (M, H, N, P)
    reading = c * torch.exp(log)[..., None]
    for chunk, row in chunks.rounds:
        before = state[row]
        result[chunk] += reading[chunk] @ before
        state[row] = before * whole[chunk] + added[chunk]
    _put_back(result, chunks, out)
    return state


def _pairwise(log: Tensor) -> Tensor:
    """The decay from token j to token i of a chunk, (M, H, K, K); 0 for j > i."""
    later = torch.ones(log.shape[-1], log.shape[-1], dtype=torch.bool, device=log.device).triu(1)
    difference = (log[..., :, None] - log[..., None, :]).masked_fill(later, float("-inf"))
    return torch.exp(difference)


def _put_back(result: Tensor, chunks: ScanChunks, out: Tensor) -> None:
    flat = result.transpose(1, 2).flatten(0, 1)
    out[chunks.sources] = flat[chunks.places]


def delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    rows: Rows,
    held: Tensor | None,
) -> Tensor:
    """The gated delta rule over queries and keys (T, G, N), values (T, H, P), and the logarithm of
    the decay and beta (T, H) -> (T, H, P), all float32. `held`: see `mamba2`.
    """
    state = _initial(held, rows, v, k)
    q, k = _unit(q) * q.shape[-1] ** -0.5, _unit(k)
    inputs = (q, k, v, log_decay, beta)
    if rows.chunks is None:
        out, state = _delta_step(inputs, state)
    else:
        out = torch.empty_like(v)
        if rows.singles is not None:
            at = rows.starts[rows.singles]
            parts = tuple(each[at] for each in inputs)
            out[at], state[rows.singles] = _delta_step(parts, state[rows.singles])
        chunks = rows.chunks
        state[chunks.rows] = _delta_chunks(inputs, chunks, state[chunks.rows], out)
    _keep(held, rows, state)
    return out


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(dim=-1, keepdim=True) + L2_EPS)


def _delta_step(inputs: tuple[Tensor, ...], state: Tensor) -> tuple[Tensor, Tensor]:
    q, k, v, log_decay, beta = inputs
    heads = v.shape[1]
    q, k = _by_head(q, heads, 1), _by_head(k, heads, 1)
    state = state * torch.exp(log_decay)[..., None, None]
    change = (v - torch.einsum("shnp,shn->shp", state, k)) * beta[..., None]
    state = state + k[..., None] * change[:, :, None]
    return torch.einsum("shnp,shn->shp", state, q), state


def _delta_chunks(
    inputs: tuple[Tensor, ...], chunks: ScanChunks, state: Tensor, out: Tensor
) -> Tensor:
    """Writes the results of all chunks to `out`. Returns the states of the rows after them.

    Within a chunk, each change depends on those of earlier tokens. This triangular system is solved
    for all tokens together.
    """
    q, k, v, log_decay, beta = (_in_chunks(each, chunks) for each in inputs)
    heads = v.shape[1]
    q, k = _by_head(q, heads, 1), _by_head(k, heads, 1)
    log = torch.cumsum(log_decay, dim=-1)
    decays = _pairwise(log)
    weighted = k * beta[..., None]
    system = (weighted @ k.transpose(-1, -2)) * decays
    wanted = torch.cat((v * beta[..., None], weighted * torch.exp(log)[..., None]), dim=-1)
    solved = torch.linalg.solve_triangular(system, wanted, upper=False, unitriangular=True)
    changes, known = solved.split((v.shape[-1], k.shape[-1]), dim=-1)
    scores = (q @ k.transpose(-1, -2)) * decays
    reading = q * torch.exp(log)[..., None]
    writing = (k * torch.exp(log[..., -1:] - log)[..., None]).transpose(-1, -2)
    whole = torch.exp(log[..., -1])[..., None, None]
    result = torch.empty_like(v)
    for chunk, row in chunks.rounds:
        before = state[row]
        change = changes[chunk] - known[chunk] @ before
        result[chunk] = reading[chunk] @ before + scores[chunk] @ change
        state[row] = before * whole[chunk] + writing[chunk] @ change
    _put_back(result, chunks, out)
    return state


def gated_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float, groups: int) -> Tensor:
    """Mamba-2's norm: x * silu(gate), normalized in `groups` parts."""
    gated = (x * F.silu(gate.float())).unflatten(-1, (groups, -1))
    normed = gated * torch.rsqrt(gated.square().mean(dim=-1, keepdim=True) + eps)
    return normed.flatten(-2) * weight.float()

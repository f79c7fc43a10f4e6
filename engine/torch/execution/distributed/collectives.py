"""Communication between ranks, by torch.distributed: NCCL on GPUs, gloo on CPUs.

Sums are added in the order of the ranks, in float32. So all ranks get the same bits, and so does a
second run. An all-reduce of the library may add in any order.
"""

import socket
from datetime import timedelta
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FileStore, Store, TCPStore

from engine.core.shards.layout import ShardLayout

# Ranks wait for each other at most this long. A dead rank is noticed much sooner.
TIMEOUT = timedelta(minutes=10)


class Ranks:
    """This rank's connections: to the ranks of its stage, and to the stages before and after."""

    def __init__(self, layout: ShardLayout, rank: int, device: torch.device, store: str) -> None:
        self.layout, self.rank = layout, rank
        self.size, self.part = layout.tensor, layout.part(rank)
        self._device = device
        if device.type == "cuda":
            torch.cuda.set_device(device)
        if layout.num_ranks == 1:
            return
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            store=_open_store(store, rank, layout.num_ranks),
            rank=rank,
            world_size=layout.num_ranks,
            timeout=TIMEOUT,
        )
        self._group = dist.group.WORLD
        if layout.pipeline > 1:  # every rank makes all groups, in the same order
            groups = [dist.new_group(list(layout.ranks_of(s))) for s in range(layout.pipeline)]
            self._group = groups[layout.stage(rank)]

    def sum(self, x: Tensor) -> Tensor:
        """The sum over the ranks of the stage, the same in all of them."""
        if self.size == 1:
            return x
        parts = self._gathered(x)
        total = parts[0].float()
        for part in parts[1:]:
            total += part
        return total.to(x.dtype)

    def joined(self, x: Tensor) -> Tensor:
        """The tensors (R, n) of the stage's ranks, side by side: (R, ranks * n)."""
        if self.size == 1:
            return x
        return torch.cat(self._gathered(x).unbind(0), dim=-1)

    def _gathered(self, x: Tensor) -> Tensor:
        """The tensors of all ranks of the stage, (ranks, ..), in the order of the ranks."""
        x = x.contiguous()
        parts = torch.empty((self.size, *x.shape), dtype=x.dtype, device=x.device)
        if x.numel():
            dist.all_gather(list(parts.unbind(0)), x, group=self._group)
        return parts

    def send_on(self, x: Tensor) -> None:
        """Sends activations to the next stage."""
        if x.numel():
            dist.send(x.contiguous(), self.rank + self.layout.tensor)

    def receive(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Receives activations from the stage before."""
        x = torch.empty(shape, dtype=dtype, device=self._device)
        if x.numel():
            dist.recv(x, self.rank - self.layout.tensor)
        return x

    def copy_tokens(self, tokens: Tensor) -> None:
        """Copies the sampled tokens of the sampling rank into `tokens` of all ranks."""
        if self.layout.num_ranks > 1:
            dist.broadcast(tokens, self.layout.sampling_rank)

    def close(self) -> None:
        if self.layout.num_ranks > 1:
            dist.destroy_process_group()


def _open_store(url: str, rank: int, num_ranks: int) -> Store:
    """Where the ranks find each other. A file serves ranks of one machine. For others rank 0
    listens, at the address in the URL only: the library itself would listen at all of them.
    """
    parts = urlsplit(url)
    if parts.scheme == "file":
        return FileStore(parts.path, num_ranks)
    assert parts.hostname is not None and parts.port is not None
    place = parts.hostname, parts.port
    if rank != 0:
        return TCPStore(*place, num_ranks, is_master=False, timeout=TIMEOUT)
    family = socket.AF_INET6 if ":" in parts.hostname else socket.AF_INET
    listening = socket.create_server(place, family=family)
    return TCPStore(
        *place,
        num_ranks,
        is_master=True,
        timeout=TIMEOUT,
        wait_for_workers=False,
        master_listen_fd=listening.detach(),
    )

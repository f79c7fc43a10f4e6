"""Ranks for tests: processes that need not import PyTorch again, and threads of one process."""

import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence

import psutil
import torch
from torch import Tensor

from engine.core.shards.layout import ShardLayout


class Forked:
    """A rank that `Forks` made, with what a group uses of `Popen`."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._fd = os.pidfd_open(pid)

    def poll(self) -> int | None:
        ended, _, _ = select.select([self._fd], [], [], 0)
        return -signal.SIGKILL if ended else None

    def wait(self, timeout: float | None = None) -> int:
        ended, _, _ = select.select([self._fd], [], [], timeout)
        if not ended:
            raise subprocess.TimeoutExpired("rank", timeout or 0)
        return 0

    def kill(self) -> None:
        if self.poll() is None:
            signal.pidfd_send_signal(self._fd, signal.SIGKILL)


class Forks:
    """Makes ranks as forks of a process that has imported PyTorch once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__, str(theirs.fileno())], pass_fds=[theirs.fileno()]
            )

    def start(self, argv: Sequence[str], fds: Sequence[int]) -> Forked:
        """Takes the place of `start_child`."""
        return self._fork(argv[argv.index("-m") + 2], fds)

    def join(self, address: str, token_file: str) -> Forked:
        """A rank that joins as `engine shard` does."""
        return self._fork(f"{address} {token_file}", ())

    def _fork(self, message: str, fds: Sequence[int]) -> Forked:
        with self._lock:
            socket.send_fds(self._socket, [message.encode()], list(fds))
            return Forked(int(self._socket.recv(32)))

    def listening(self) -> set[str]:
        """The addresses at which ranks listen."""
        found = psutil.Process(self._process.pid).children(recursive=True)
        connections = [each for rank in found for each in rank.net_connections("inet")]
        return {each.laddr.ip for each in connections if each.status == psutil.CONN_LISTEN}

    def close(self) -> None:
        self._socket.close()
        self._process.wait(10)


def _serve_forks(sock: socket.socket) -> None:
    from engine.torch.execution.distributed import rank

    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    parent = os.getpid()
    while True:
        message, fds, _, _ = socket.recv_fds(sock, 512, 16)
        if not message:
            return
        pid = os.fork()
        if not pid:
            sock.close()
            if not fds:
                os._exit(rank.join_main(*message.decode().split(), "", ""))
            os._exit(rank.main(int(message), parent, *fds))
        for fd in fds:
            os.close(fd)
        sock.send(str(pid).encode())


class ThreadRanks:
    """`Ranks` whose ranks are threads of this process."""

    def __init__(self, layout: ShardLayout, rank: int, shared: "Meeting") -> None:
        self.layout, self.rank = layout, rank
        self.size, self.part = layout.tensor, layout.part(rank)
        self._meeting = shared

    def sum(self, x: Tensor) -> Tensor:
        parts = self._gathered(x)
        total = parts[0].clone()
        for part in parts[1:]:
            total += part
        return total

    def joined(self, x: Tensor) -> Tensor:
        return torch.cat(self._gathered(x), dim=-1)

    def _gathered(self, x: Tensor) -> list[Tensor]:
        meeting = self._meeting
        meeting.tensors[self.rank] = x
        meeting.barrier.wait(60)
        parts = [meeting.tensors[each] for each in self.layout.ranks_of(0)]
        meeting.barrier.wait(60)
        return parts


class Meeting:
    """Where threads that are ranks exchange tensors."""

    def __init__(self, num_ranks: int) -> None:
        self.barrier = threading.Barrier(num_ranks)
        self.tensors: dict[int, Tensor] = {}


if __name__ == "__main__":
    _serve_forks(socket.socket(fileno=int(sys.argv[1])))

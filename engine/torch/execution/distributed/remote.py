"""Ranks on other machines, as the engine sees them: they join by `engine shard`."""

import ipaddress
import logging
import os
import queue
import socket
import threading
import time

import psutil

from engine.core.build_name import build_name
from engine.core.errors import ConfigError, EngineError
from engine.core.shards.doorway import Doorway
from engine.core.shards.frames import decode_frame, encode_frame
from engine.core.shards.link import LINK_FILES, TcpLink, check_token, split_address
from engine.core.shards.ring import RingClosedError
from engine.runtime.model_runner import RunnerConfig

log = logging.getLogger(__name__)

JOIN_S = 600.0  # how long the engine waits for ranks to join
_FOLDER = "torch/execution/distributed"


def shard_build() -> str:
    """The build, as far as it concerns what ranks are told and how the model is cut."""
    return build_name(
        *LINK_FILES,
        "core/shards/layout.py",
        "runtime/model_runner.py",
        *(f"{_FOLDER}/{name}.py" for name in ("cut", "group", "model_shard", "rank", "remote")),
    )


class RemoteRank:
    """A rank on another machine. A thread reads its frames, of which ticks are dropped."""

    def __init__(self, link: TcpLink) -> None:
        self.link = link
        self._frames: queue.SimpleQueue[bytearray | None] = queue.SimpleQueue()
        self._seen_at = time.monotonic()
        self._is_gone = False
        threading.Thread(target=self._read, name="remote rank", daemon=True).start()

    def trouble(self, frozen_after_s: float) -> str | None:
        if self._is_gone:
            return "closed its connection"
        return frozen(time.monotonic() - self._seen_at, frozen_after_s)

    def receive(self) -> bytearray:
        frame = self._frames.get()
        if frame is None:
            raise RingClosedError("a remote rank is gone")
        return frame

    def kill(self) -> None:
        """Closes the connection, on which the rank ends."""
        self.link.close()

    def end(self, deadline: float) -> None:
        while not self._is_gone and time.monotonic() < deadline:
            time.sleep(0.01)
        self.link.close()

    def _read(self) -> None:
        try:
            while True:
                frame = self.link.receive()
                self._seen_at = time.monotonic()
                if decode_frame(frame)[0] != ["tick"]:
                    self._frames.put(frame)
        except (RingClosedError, EngineError) as error:
            log.debug("no more frames of a remote rank: %s", error)
        finally:
            self._is_gone = True
            self._frames.put(None)


def frozen(silent_s: float, after_s: float, cause: str = "") -> str | None:
    """What to say of a rank that was silent for this long. None: it is well."""
    if silent_s <= after_s:
        return None
    return f"is frozen: it was silent for {silent_s:.1f} s{cause and f' ({cause})'}"


def free_port(host: str) -> int:
    """A port for the rendezvous of torch.distributed, at which rank 0 will listen."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as sock:
        sock.bind((host, 0))
        return int(sock.getsockname()[1])


def open_remotes(config: RunnerConfig, first: int) -> list[RemoteRank]:
    """Wait until all ranks from other machines have joined. The first of them gets the number
    `first`. A rank that is refused, or a connection that is none, does not end the waiting.
    """
    if not config.shard_listen or not config.shard_token:
        raise ConfigError("shards.remote_ranks needs shards.listen and shards.token_file")
    token = check_token(config.shard_token.encode())
    address = split_address(config.shard_listen)
    check_interface(address[0])
    links: queue.SimpleQueue[TcpLink] = queue.SimpleQueue()
    joined: list[RemoteRank] = []
    deadline = time.monotonic() + JOIN_S
    try:
        doorway = Doorway(address, token, shard_build(), lambda link, _: links.put(link), "ranks")
    except OSError as error:
        reason = error.strerror or error
        raise ConfigError(f"shards.listen: {config.shard_listen} can't be used: {reason}") from None
    try:
        log.warning("waiting for %d ranks at %s", config.remote_ranks, config.shard_listen)
        while len(joined) < config.remote_ranks:
            try:
                link = links.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                raise ConfigError(
                    f"{len(joined)} of {config.remote_ranks} ranks joined at {config.shard_listen} "
                    f"within {JOIN_S:g} s; start the others with engine shard"
                ) from None
            try:
                link.send(encode_frame(["rank", first + len(joined)]))
            except RingClosedError as error:
                log.warning("a rank from %s left at once: %s", link.peer, error)
                link.close()
                continue
            joined.append(RemoteRank(link))
            log.info("rank %d joined from %s", first + len(joined) - 1, link.peer)
    except BaseException:
        for rank in joined:
            rank.kill()
        raise
    finally:
        doorway.close()
    return joined


def check_interface(host: str) -> None:
    """Raise `ConfigError` if a host means all interfaces. What ranks exchange by torch.distributed
    has no authentication, so one interface must be chosen for it.
    """
    try:
        is_all = ipaddress.ip_address(host).is_unspecified
    except ValueError:
        is_all = False  # a name
    if is_all:
        raise ConfigError(
            f"shards.listen: {host} is every interface of this machine; write the address of the"
            " private network that the ranks share",
            param="shards.listen",
        )


def interface_of(host: str) -> str | None:
    """The name of this machine's interface with an address. None if there is none."""
    try:
        found = {info[4][0] for info in socket.getaddrinfo(host, None)}
    except OSError:
        return None
    for name, addresses in psutil.net_if_addrs().items():
        if any(each.address.partition("%")[0] in found for each in addresses):
            return str(name)
    return None


def use_interface(host: str) -> None:
    """Let gloo and NCCL of this process listen only at the interface that has the address `host`,
    unless their own variables say otherwise.
    """
    name = interface_of(host)
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        if name is not None:
            os.environ.setdefault(variable, name)

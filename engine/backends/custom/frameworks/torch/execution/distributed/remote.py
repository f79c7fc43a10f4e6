"""Ranks on other machines, as the engine sees them: they join by `engine shard`."""

import logging
import queue
import socket
import threading
import time

from engine.backends.custom.runtime.model_runner import RunnerConfig
from engine.core.build_name import build_name
from engine.core.errors import ConfigError, EngineError
from engine.core.shards.frames import decode_frame, encode_frame
from engine.core.shards.link import LINK_FILES, TcpLink, check_token, split_address
from engine.core.shards.ring import RingClosedError

log = logging.getLogger(__name__)

JOIN_S = 600.0  # how long the engine waits for ranks to join
_FOLDER = "backends/custom/frameworks/torch/execution/distributed"


def shard_build() -> str:
    """The build, as far as it concerns what ranks are told and how the model is cut."""
    return build_name(
        *LINK_FILES,
        "core/shards/layout.py",
        "backends/custom/runtime/model_runner.py",
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
                if decode_frame(frame)[0][0] != "tick":
                    self._frames.put(frame)
        except (RingClosedError, EngineError) as error:
            log.debug("no more frames of a remote rank: %s", error)
        self._is_gone = True
        self._frames.put(None)


def frozen(silent_s: float, after_s: float, cause: str = "") -> str | None:
    """What to say of a rank that was silent for this long. None: it is well."""
    if silent_s <= after_s:
        return None
    return f"is frozen: it was silent for {silent_s:.1f} s{cause and f' ({cause})'}"


def free_port() -> int:
    """A port for the rendezvous of torch.distributed, on which rank 0 will listen."""
    with socket.socket() as sock:
        sock.bind(("", 0))
        return int(sock.getsockname()[1])


def open_remotes(config: RunnerConfig, first: int) -> list[RemoteRank]:
    """Wait until all ranks from other machines have joined. The first of them gets the number
    `first`. A rank that is refused does not end the waiting.
    """
    if not config.shard_listen or not config.shard_token:
        raise ConfigError("shards.remote_ranks needs shards.listen and shards.token_file")
    token = check_token(config.shard_token.encode())
    joined: list[RemoteRank] = []
    deadline = time.monotonic() + JOIN_S
    with socket.create_server(split_address(config.shard_listen)) as server:
        log.warning("waiting for %d ranks at %s", config.remote_ranks, config.shard_listen)
        while len(joined) < config.remote_ranks:
            server.settimeout(max(0.0, deadline - time.monotonic()))
            try:
                link = TcpLink(server.accept()[0])
            except TimeoutError:
                raise ConfigError(
                    f"{len(joined)} of {config.remote_ranks} ranks joined at {config.shard_listen} "
                    f"within {JOIN_S:g} s; start the others with engine shard"
                ) from None
            try:
                link.greet(token, shard_build())
                link.send(encode_frame(["rank", first + len(joined)]))
            except (EngineError, RingClosedError) as error:
                log.error("%s", error)  # noqa: TRY400 - one line says it
                link.close()
                continue
            joined.append(RemoteRank(link))
            log.info("rank %d joined from %s", first + len(joined) - 1, link.peer)
    return joined

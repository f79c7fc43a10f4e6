"""The bodies of Ray's actors. Each runs one `engine` command as a child process.

If the child fails, its actor ends, and Ray starts the actor again. If the child ends because the
node was asked to leave, the actor removes its placement group, and with it all actors of the node.
If an actor is killed, the kernel kills its child too.
"""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

from engine.core.sandbox.processes import die_with_parent, kill_child

# A command that fails sooner than this will probably fail again. Its actor waits before it ends, so
# that Ray does not start it many times a second, and `failure` can be read.
MIN_LIFE_S = 5.0
PAUSE_S = 3.0
ADDRESS_POLL_S = 1.0


class EngineCommand:
    """Runs `engine` commands, and keeps the last line that each has written."""

    def __init__(self, token: str) -> None:
        self._token_file = _memory_file(token)
        self._child: subprocess.Popen[bytes] | None = None
        self._reader: threading.Thread | None = None
        self._last_line = ""
        self._failure = ""

    def pid(self) -> int:
        """The process of the command; 0 if it has not started."""
        return 0 if self._child is None else self._child.pid

    def failure(self) -> str:
        """Why the command ended, if it has failed soon after its start."""
        return self._failure

    def _start(self, arguments: Sequence[str], **variables: str) -> "subprocess.Popen[bytes]":
        argv = [sys.executable, "-m", __name__, str(os.getpid()), *arguments]
        child = subprocess.Popen(
            argv,
            env=os.environ | variables,
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        self._child = child
        self._reader = threading.Thread(target=self._read, args=(child,), daemon=True)
        self._reader.start()
        return child

    def _read(self, child: "subprocess.Popen[bytes]") -> None:
        assert child.stderr is not None
        for line in child.stderr:
            text = line.decode(errors="replace").rstrip()
            print(text, file=sys.stderr, flush=True)  # into the actor's log
            self._last_line = text or self._last_line

    def _end_failed(self, status: int, lived_s: float) -> None:
        """End this actor's process, so that Ray starts it again."""
        if lived_s < MIN_LIFE_S and status > 0:
            if self._reader is not None:
                self._reader.join(PAUSE_S)  # its last line may be the reason
            self._failure = self._last_line or f"it ended with status {status}"
            time.sleep(PAUSE_S)
        os._exit(1)


class NodeProcess(EngineCommand):
    """Runs `engine node join`. If the node has several ranks, it runs the first, and the others
    join it.
    """

    def __init__(self, token: str, arguments: list[str], name: str, ranks: list[str]) -> None:
        """`ranks` has the names of the actors of the other ranks."""
        super().__init__(token)
        ray = _ray()
        self._actor = ray.get_runtime_context().current_actor
        self._group = ray.util.get_current_placement_group()
        self._ranks = ranks
        self._address, self._is_leaving = "", False
        variables = {}
        if ranks:
            self._address = f"{ray.util.get_node_ip_address()}:{_free_port()}"
            variables = {
                "LLM_ENGINE_SHARDS__REMOTE_RANKS": str(len(ranks)),
                "LLM_ENGINE_SHARDS__LISTEN": self._address,
                "LLM_ENGINE_SHARDS__TOKEN_FILE": self._token_file,
            }
        joined = ["node", "join", *arguments, "--token-file", self._token_file, "--name", name]
        threading.Thread(target=self._run, args=(joined, variables), daemon=True).start()

    def shard_address(self) -> str:
        """Where the other ranks of the node join."""
        return self._address

    def leave(self) -> None:
        """Let open requests finish, then end. May be called again, if the call was lost."""
        if self._child is None or self._is_leaving:
            return
        if self._child.poll() is None:
            self._is_leaving = True
            self._child.send_signal(signal.SIGTERM)
        else:  # it has failed
            self._remove()

    # The child must be started by a thread that lives as long as this process: the kernel kills it
    # when that thread ends.
    def _run(self, arguments: list[str], variables: dict[str, str]) -> None:
        began = time.monotonic()
        status = self._start(arguments, **variables).wait()
        if status != 0 and not self._is_leaving:
            self._end_failed(status, time.monotonic() - began)
        self._remove()

    def _remove(self) -> None:
        """Remove all actors of the node, and with them this one."""
        ray = _ray()
        for name in self._ranks:
            with contextlib.suppress(ValueError):  # it is gone
                ray.kill(ray.get_actor(name), no_restart=True)
        # Either of these calls ends this process. Ray would start an actor again whose group is
        # removed, and leave a group whose actor is killed.
        remove = ray.util.remove_placement_group
        threading.Thread(target=remove, args=(self._group,), daemon=True).start()
        ray.kill(self._actor, no_restart=True)


class ShardProcess(EngineCommand):
    """Runs `engine shard`: a rank of a node, on the same machine or on another. It follows the node
    if Ray moves it.
    """

    def __init__(self, token: str, node: Any, model: list[str]) -> None:
        super().__init__(token)
        self._node = node
        threading.Thread(target=self._run, args=(model,), daemon=True).start()

    def _run(self, model: list[str]) -> None:
        ray = _ray()
        joined, began, child = "", 0.0, None
        while True:
            try:
                address = ray.get(self._node.shard_address.remote())
            except ray.exceptions.RayError:  # it is being started again
                address = joined
            if address != joined:
                if child is not None:
                    kill_child(child)
                joined, began = address, time.monotonic()
                child = self._start(["shard", joined, "--token-file", self._token_file, *model])
            elif child is not None and child.poll() is not None:
                self._end_failed(child.returncode, time.monotonic() - began)
            time.sleep(ADDRESS_POLL_S)


def _ray() -> Any:
    import ray  # here, because other users of this module may lack it

    return ray


def _memory_file(text: str) -> str:
    """The path of a file that is only in memory, ends with this process, and can be read by the
    children of the same user.
    """
    descriptor = os.memfd_create("token")
    os.fchmod(descriptor, 0o600)
    os.write(descriptor, text.encode())
    return f"/proc/{os.getpid()}/fd/{descriptor}"


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("", 0))
        return int(sock.getsockname()[1])


if __name__ == "__main__":
    # A command that ends with its actor. The setting survives `exec`.
    die_with_parent(int(sys.argv[1]))
    os.execv(sys.executable, [sys.executable, "-m", "engine.cli.main", *sys.argv[2:]])

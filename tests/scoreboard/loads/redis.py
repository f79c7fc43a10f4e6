"""A Redis that tests may break: the real program if it is installed, else a stand-in with the
commands that counting needs, and one that sends garbage.
"""

import asyncio
import contextlib
import random
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from tests.support.servers.live_server import free_port

PROGRAM = shutil.which("redis-server")
START_S = 10.0


class RedisProcess:
    """Redis in a separate process, on a port that stays the same across restarts."""

    def __init__(self, folder: Path) -> None:
        self.port = free_port()
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def start(self) -> None:
        argv = [sys.executable, "-m", __name__, str(self.port)]
        if PROGRAM is not None:
            options = ["--bind", "127.0.0.1", "--save", "", "--dir", str(self._folder)]
            argv = [PROGRAM, "--port", str(self.port), *options]
        self._process = subprocess.Popen(argv, stdout=subprocess.DEVNULL)
        until = time.monotonic() + START_S
        while not self._answers():
            assert time.monotonic() < until, "Redis did not start"
            time.sleep(0.02)

    def signal(self, number: int) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def num_names(self) -> int:
        """The number of counters."""
        return int(self._ask(b"*1\r\n$6\r\nDBSIZE\r\n").removeprefix(b":"))

    def command(self, *words: str) -> bytes:
        """Send a command, and return the reply."""
        parts = [f"${len(word)}\r\n{word}\r\n" for word in words]
        return self._ask(f"*{len(words)}\r\n{''.join(parts)}".encode())

    def _answers(self) -> bool:
        try:
            return self._ask(b"*1\r\n$4\r\nPING\r\n").startswith(b"+PONG")
        except OSError:
            return False

    def _ask(self, command: bytes) -> bytes:
        with socket.create_connection(("127.0.0.1", self.port), 2.0) as sock:
            sock.sendall(command)
            return sock.recv(1000)


@contextlib.contextmanager
def redis(folder: Path) -> Iterator[RedisProcess]:
    server = RedisProcess(folder)
    server.start()
    try:
        yield server
    finally:
        server.kill()


@contextlib.contextmanager
def nonsense(port: int, seed: int) -> Iterator[list[int]]:
    """A server on Redis's port that replies with garbage. Yields a list with the number of
    requests.
    """
    chooser = random.Random(seed)
    answers = [
        b"$5\r\nhello\r\n",
        b"+OK\r\n",
        b"-ERR unknown command\r\n",
        b"*2\r\n:1\r\n",
        b"$2147483647\r\n",
        b":999999999999999999999999\r\n",
        b"HTTP/1.1 400 Bad Request\r\n\r\n",
        chooser.randbytes(64),
        b"",
    ]
    asked = [0]
    listener = socket.create_server(("127.0.0.1", port))

    def answer(connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            while connection.recv(65536):
                asked[0] += 1
                connection.sendall(chooser.choice(answers))

    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = listener.accept()
                threading.Thread(target=answer, args=(connection,), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    try:
        yield asked
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()


class _StandIn:
    """Counters, with the commands that use them. Every script increments one."""

    def __init__(self) -> None:
        self._counts: dict[bytes, int] = {}

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                num_words = int((await reader.readuntil(b"\r\n"))[1:])
                words = []
                for _ in range(num_words):
                    length = int((await reader.readuntil(b"\r\n"))[1:])
                    words.append((await reader.readexactly(length + 2))[:-2])
                writer.write(self._answer(words[0].upper(), words[1:]))
        writer.close()

    def _answer(self, command: bytes, words: list[bytes]) -> bytes:
        if command == b"PING":
            return b"+PONG\r\n"
        if command == b"DBSIZE":
            return b":%d\r\n" % len(self._counts)
        if command == b"GET":
            text = b"%d" % self._counts.get(words[0], 0)
            return b"$%d\r\n%s\r\n" % (len(text), text)
        if command in (b"EVAL", b"EVALSHA"):  # script, 1, name, seconds, amount
            self._counts[words[2]] = self._counts.get(words[2], 0) + int(words[4])
            return b":%d\r\n" % self._counts[words[2]]
        if command == b"HELLO":
            return b"%1\r\n+proto\r\n:3\r\n"
        return b"+OK\r\n"


async def _stand_in(port: int) -> None:
    server = await asyncio.start_server(_StandIn().serve, "127.0.0.1", port)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(_stand_in(int(sys.argv[1])))

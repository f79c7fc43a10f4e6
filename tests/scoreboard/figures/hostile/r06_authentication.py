"""R06: no request is served without a key, and only the administrator can change the server,
whatever the method, the spelling of the path, and the headers.
"""

import json
import re
import socket
from collections import Counter
from collections.abc import Iterator

import httpx

from engine.servers.access.auth import PUBLIC_ROUTES
from tests.scoreboard.figure import Run, Values, at_most, figure
from tests.scoreboard.http.target import ADMIN, CLIENT, KEY, Target, held_server
from tests.security.access.test_http_auth import METHODS

HOSTS = ("localhost", "localhost/livez?", "x/v1?", "a/../livez", "localhost/../livez", "", "evil")
NO_KEYS = (
    *("", "Authorization: Bearer wrong\r\n", "X-Api-Key: \r\n", "Authorization: Bearer \r\n"),
    *(f"Authorization: Basic {KEY}\r\n", f"Authorization: Bearer {KEY}x\r\n"),
    *(f"Authorization: Bearer {KEY[:-1]}\r\n", f"Cookie: api_key={KEY}\r\n"),
)
FORWARDED = (
    "X-Forwarded-Prefix: /livez\r\nX-Original-URL: /livez\r\nX-Rewrite-URL: /livez\r\n"
    "X-Forwarded-For: 127.0.0.1\r\nX-Forwarded-Host: localhost\r\nX-HTTP-Method-Override: GET\r\n"
)


@figure(
    "R06",
    "routes x methods without the right key, Host and path tricks",
    minutes=0.5,
    limits={"unauthenticated_successes": at_most(0), "client_as_administrator": at_most(0)},
)
def authentication(run: Run) -> Values:
    with held_server() as target:
        _check_right_keys(target)
        paths = [re.sub(r"\{[^}]+\}", "x", path) for path in target.description()["paths"]]
        if run.quick:
            paths = run.random("paths").sample(paths, 4)
        tries = _Tries(run, target)
        for path in paths:
            tries.without_key(path)
            if path.startswith("/v1/admin/"):
                tries.with_clients_key(path)
        alive = target.is_healthy()
    assert alive, "the server did not survive it"
    run.notes |= {"routes": len(paths), **tries.statuses}
    return {
        "unauthenticated_successes": tries.opened,
        "client_as_administrator": tries.administered,
    }


def _check_right_keys(target: Target) -> None:
    """Check that valid keys work: otherwise a server that refuses everything would pass."""
    for path, headers in (("/v1/models", CLIENT), ("/v1/admin/status", ADMIN)):
        assert httpx.get(target.url + path, headers=headers).status_code == 200, path


def spellings(path: str) -> Iterator[str]:
    yield from (f"/{path}", f"{path}.", f"{path}/", f"{path};/livez", f"{path}?/livez")
    yield from (f"/livez/..{path}", f"/livez/..%2f{path[1:]}", f"/v1/%2e%2e{path}")
    yield from (f"{path}%00/livez", f"http://localhost{path}", f"http://localhost/livez/..{path}")
    yield from (f"/livez%23/..{path}", f"/%2flivez{path}", path.replace("/", "/./"), path.upper())


class _Tries:
    def __init__(self, run: Run, target: Target) -> None:
        self.run = run
        self.port = httpx.URL(target.url).port
        self.statuses: Counter[str] = Counter()
        self.opened = self.administered = 0
        self.connection: socket.socket | None = None

    def without_key(self, path: str) -> None:
        if path in PUBLIC_ROUTES:
            status, answer = self._send("GET", path, "localhost", "")
            assert status == 200 and list(json.loads(answer)) == ["status"], (path, answer)
            return
        for method in METHODS:
            for keys in NO_KEYS:
                self._expect_refusal(method, path, "localhost", keys)
            for host in HOSTS:
                self._expect_refusal(method, path, host, FORWARDED)
        for spelled in spellings(path):
            for host in HOSTS[:4]:
                self._expect_refusal("GET", spelled, host, FORWARDED)

    def with_clients_key(self, path: str) -> None:
        for method in METHODS:
            status, _ = self._send(method, path, "localhost", f"Authorization: Bearer {KEY}\r\n")
            if status < 400:
                self.administered += 1
                self.run.fail(f"a client's key: {method} {path} {status}")

    def _expect_refusal(self, method: str, path: str, host: str, headers: str) -> None:
        status, answer = self._send(method, path, host, headers)
        if status < 400:
            self.opened += 1
            what = f"{method} {path} Host: {host} {headers[:60]!r}"
            self.run.fail(f"{what}: {status} {answer[:80]!r}")

    def _send(self, method: str, path: str, host: str, headers: str) -> tuple[int, bytes]:
        """Send the request byte for byte as given; reuse the connection while it lasts."""
        self.run.cases += 1
        length = "Content-Length: 2\r\nContent-Type: application/json\r\n"
        head = f"{method} {path} HTTP/1.1\r\nHost: {host}\r\n{headers}{length}\r\n{{}}"
        for _ in range(2):
            if self.connection is None:
                self.connection = socket.create_connection(("127.0.0.1", self.port), timeout=20)
            try:
                self.connection.sendall(head.encode())
                status, answer, stays = _answer(self.connection, method)
            except ConnectionError:
                stays, status = False, 0
            if not stays:
                self.connection.close()
                self.connection = None
            if status:
                self.statuses[str(status)] += 1
                return status, answer
        raise AssertionError(f"no answer to {method} {path} Host: {host}")


def _answer(connection: socket.socket, method: str) -> tuple[int, bytes, bool]:
    """Status, body, and whether the connection can be used again."""
    received = b""
    while b"\r\n\r\n" not in received:
        data = connection.recv(65536)
        if not data:
            raise ConnectionError
        received += data
    head, _, body = received.partition(b"\r\n\r\n")
    status = int(head.split(b" ", 2)[1])
    found = re.search(rb"(?i)content-length: (\d+)", head)
    if found is None:
        return status, body, False
    length = 0 if method == "HEAD" else int(found[1])
    while len(body) < length:
        body += connection.recv(65536)
    return status, body, b"connection: close" not in head.lower()

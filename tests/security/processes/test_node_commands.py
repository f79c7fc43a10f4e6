"""`engine node ls` and `leave` prove the node token, and never send it (SEC-60; T5)."""

from pathlib import Path

import httpx
import pytest

from engine.cli.cluster.node import call_nodes
from engine.core.errors import AuthenticationError, InvalidRequestError, UnavailableError
from engine.routing.nodes import proofs
from tests.support.servers.live_server import LiveServer, live_server

TOKEN = "a-token-that-nodes-share"


def token_file(folder: Path, token: str = TOKEN) -> Path:
    path = folder / "token"
    path.write_text(token)
    path.chmod(0o600)
    return path


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The authorizations that were sent by HTTP."""
    found: list[str] = []
    request = httpx.request

    def recorded(*args: object, **kwargs: dict[str, str]) -> httpx.Response:
        found.append(kwargs["headers"]["authorization"])
        return request(*args, **kwargs)

    monkeypatch.setattr(httpx, "request", recorded)
    return found


def status_of(server: LiveServer, method: str, path: str, authorization: str) -> int:
    headers = {"authorization": authorization}
    with httpx.Client(base_url=server.url) as client:
        return client.request(method, f"/v1/admin/{path}", headers=headers).status_code


def test_the_node_token_is_proved_per_request_and_never_sent(
    tmp_path: Path, sent: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = token_file(tmp_path)
    with live_server(server={"node_token": TOKEN, "api_key": "key-0123456789abcdef"}) as server:
        assert call_nodes(server.url, path, None, "GET", "")["nodes"] == []
        with pytest.raises(InvalidRequestError, match="no node a b"):
            call_nodes(server.url, path, None, "DELETE", "/a b")
        assert not any(TOKEN in each for each in sent)
        listed, left = sent
        assert status_of(server, "GET", "nodes", listed) == 200
        assert status_of(server, "DELETE", "nodes/a", listed) == 401, "it is for another request"
        assert status_of(server, "DELETE", "nodes/a", left) == 401, "it is for another node"
        assert status_of(server, "GET", "keys", listed) in (401, 403), "it is for nodes alone"
        for junk in ("Proof", "Proof a b c", "Proof 1-2 a b c d"):
            assert status_of(server, "GET", "nodes", junk) == 401
        monkeypatch.setattr(proofs, "CHALLENGE_S", -1.0)
        assert status_of(server, "GET", "nodes", listed) == 401, "it is too old"


def test_a_wrong_token_and_a_server_without_nodes_are_named(tmp_path: Path) -> None:
    path = token_file(tmp_path, "another-token-than-the-server")
    with_nodes = live_server(server={"node_token": TOKEN})
    with with_nodes as server, pytest.raises(AuthenticationError, match="is not the node token"):
        call_nodes(server.url, path, None, "GET", "")
    with live_server() as server, pytest.raises(UnavailableError, match="takes no nodes"):
        call_nodes(server.url, path, None, "GET", "")
    with pytest.raises(UnavailableError, match="Nothing answers"):
        call_nodes(server.url, path, None, "GET", "")

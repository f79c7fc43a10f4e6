"""Probes on a port of their own: answered whatever the server's loop does, and true."""

import httpx
import pytest

from engine.core.errors import ConfigError
from engine.core.listening import bind_probes
from engine.servers.ops import probes
from tests.support.fakes.fake_backend import FakeBackend
from tests.support.servers.live_server import live_server, make_settings, wait_until

pytestmark = pytest.mark.seconds  # each server runs, and a loop has to seem to hang

OWN_PORT = {"server": {"port": 0, "probe_port": 0}}


def status(url: str) -> tuple[int, str]:
    answer = httpx.get(url, timeout=60)
    return answer.status_code, answer.json()["status"]


def test_a_blocked_event_loop_still_answers_probes_on_their_own_port() -> None:
    with live_server(**OWN_PORT) as server:
        wait_until(lambda: status(server.probe_url + "/readyz") == (200, "ready"))
        with server.held_up():
            with pytest.raises(httpx.TimeoutException):
                httpx.get(server.url + "/livez", timeout=0.3)
            assert status(server.probe_url + "/livez") == (200, "alive")
            assert status(server.probe_url + "/readyz") == (200, "ready")
            assert status(server.probe_url + "/health") == (200, "healthy")


def test_an_event_loop_that_is_stuck_is_reported_by_livez(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probes, "STUCK_AFTER_S", 2.0)
    with live_server(**OWN_PORT) as server:
        wait_until(lambda: status(server.probe_url + "/livez") == (200, "alive"))
        with server.held_up():
            wait_until(lambda: status(server.probe_url + "/livez") == (503, "stuck"))
            assert status(server.probe_url + "/readyz") == (503, "not ready")
            assert status(server.probe_url + "/health") == (503, "unhealthy")
        wait_until(lambda: status(server.probe_url + "/livez") == (200, "alive"))


def test_probes_follow_the_backends_health() -> None:
    backend = FakeBackend()
    with live_server(backend, **OWN_PORT) as server:
        wait_until(lambda: status(server.probe_url + "/health") == (200, "healthy"))
        backend.ready = False
        wait_until(lambda: status(server.probe_url + "/health") == (503, "unhealthy"))
        backend.ready = True
        wait_until(lambda: status(server.probe_url + "/readyz") == (200, "ready"))
        server.services.lifecycle.pause()
        wait_until(lambda: status(server.probe_url + "/readyz") == (503, "not ready"))
        assert status(server.probe_url + "/health") == (200, "healthy")


def test_a_server_whose_engine_can_not_be_restarted_is_not_alive() -> None:
    backend = FakeBackend()
    with live_server(backend, server={"dialects": ["kserve"], **OWN_PORT["server"]}) as server:
        urls = (server.probe_url + "/livez", server.url + "/livez", server.url + "/v2/health/live")
        for backend.alive, expected in ((True, 200), (False, 503), (True, 200)):
            for url in urls:
                wait_until(lambda url=url, expected=expected: status(url)[0] == expected)


def test_the_probe_port_serves_nothing_but_probes() -> None:
    with live_server(**OWN_PORT) as server:
        wait_until(lambda: status(server.probe_url + "/livez") == (200, "alive"))
        for path in ("/v1/models", "/metrics", "/", "/openapi.json"):
            assert httpx.get(server.probe_url + path).status_code == 404
        assert httpx.post(server.probe_url + "/livez").status_code == 405


def test_a_probe_port_in_use_names_its_setting() -> None:
    with bind_probes(make_settings(**OWN_PORT)) as taken:
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match="choose another with server.probe_port"):
            bind_probes(make_settings(server={"port": 0, "probe_port": port}))
    assert bind_probes(make_settings()) is None

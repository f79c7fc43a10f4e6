"""Servers that benchmarks start: how they are found, timed and stopped."""

import sys
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from benchmarks import peers, starts
from benchmarks.process import ServerError, ServerProcess, ServerSpec
from benchmarks.run import free_port

_TINY_SERVER = """
import http.server, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
class Handler(http.server.BaseHTTPRequestHandler):
    def reply(self, body):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(body)
    def do_GET(self):
        self.reply(b'{"data": [{"id": "tiny"}]}')
    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        self.reply(b'data: {"choices": [{"text": "x", "finish_reason": null}]}\\n\\n')
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def runs(process: psutil.Process) -> bool:
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE


@pytest.mark.seconds
async def test_a_benchmark_server_is_awaited_until_ready_and_its_process_tree_stopped(
    tmp_path: Path,
) -> None:
    port = free_port()
    command = (sys.executable, "-c", _TINY_SERVER, str(port))
    process = ServerProcess(ServerSpec("tiny", command, port), tmp_path / "log")
    running = await process.start(timeout=30)
    tree = psutil.Process(running.pid).children()
    process.stop()
    assert running.target.model == "tiny"
    assert 0 < running.ready_s <= running.first_completion_s
    assert len(tree) == 1 and not any(map(runs, tree))


async def test_a_server_that_dies_is_reported_with_its_log(tmp_path: Path) -> None:
    command = (sys.executable, "-c", "raise SystemExit('broken')")
    process = ServerProcess(ServerSpec("dead", command, free_port()), tmp_path / "log")
    with pytest.raises(ServerError, match="log"):
        await process.start(timeout=30)
    assert "broken" in (tmp_path / "log").read_text()


_PACKING_SERVER = (
    """
import os, pathlib
packed = pathlib.Path(os.environ["XDG_CACHE_HOME"]) / "engine" / "packed"
with open(packed.parents[2] / "starts", "a") as record:
    record.write("packed\\n" if packed.exists() else "empty\\n")
packed.mkdir(parents=True, exist_ok=True)
(packed / "model.packed").touch()
"""
    + _TINY_SERVER
)


@pytest.mark.seconds
async def test_the_engines_start_is_timed_with_and_without_packed_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(starts.tempfile, "tempdir", str(tmp_path))
    lines: list[str] = []
    specs = []
    for name, script in (("engine", _PACKING_SERVER), ("peer", _TINY_SERVER)):
        port = free_port()
        specs.append(ServerSpec(name, (sys.executable, "-c", script, str(port)), port))
    slow = replace(specs[1], name="slow", slow_start=True)
    results = await starts.cold_starts([*specs, slow], 1, tmp_path, lines.append)
    assert (tmp_path / "starts").read_text().split() == ["empty", "packed"]
    assert set(results) == {"engine", "peer"}
    assert results["peer"]["cold"] == results["peer"]["cold unpacked"]
    assert all(figures["first_completion_s"] for figures in results["engine"].values())


@pytest.mark.seconds
async def test_a_peer_that_does_not_start_is_skipped_but_the_engine_is_required(
    tmp_path: Path,
) -> None:
    port = free_port()
    good = ServerSpec("engine", (sys.executable, "-c", _TINY_SERVER, str(port)), port)
    dead = ServerSpec("peer", (sys.executable, "-c", "raise SystemExit(1)"), free_port())
    lines: list[str] = []
    async with starts.live_servers([good, dead], tmp_path, lines.append) as running:
        assert list(running) == ["engine"]
    assert any(line.startswith("peer is left out") for line in lines)
    assert not psutil.pid_exists(running["engine"].pid)
    with pytest.raises(ServerError):
        async with starts.live_servers([replace(dead, name="engine")], tmp_path, lines.append):
            pass


@pytest.fixture
def setup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> peers.Setup:
    """A machine that has no peer, but a converted checkpoint."""
    monkeypatch.delenv("LLAMA_BIN", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    (tmp_path / "checkpoints" / "model-bf16-no-eos").mkdir(parents=True)
    return peers.Setup(Path("model.gguf"), tmp_path, threads=2, port=1)


def executable(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch(mode=0o700)
    return path


def test_a_missing_transformers_peer_is_reported_with_pip_install(
    setup: peers.Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers.importlib.util, "find_spec", lambda module: None)
    with pytest.raises(peers.Unavailable, match="pip install"):
        peers.transformers_serve(setup)
    own = executable(setup.cache / "transformers" / "bin" / "python")
    spec = peers.transformers_serve(setup)
    assert spec.command[0] == str(own.with_name("transformers"))
    assert spec.model in spec.command and "ignore_eos" not in spec.extra_body


def test_llama_server_is_found_by_path_or_llama_bin(
    setup: peers.Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(peers.Unavailable, match=r"README.*--llama-bin"):
        peers.llama_server(setup)
    on_path = executable(setup.cache / "llama-server")
    assert peers.llama_server(setup).command[0] == str(on_path)
    named = executable(setup.cache / "named" / "llama-server")
    monkeypatch.setenv("LLAMA_BIN", str(named.parent))
    spec = peers.llama_server(replace(setup, sequences=4, context=100))
    assert spec.command[0] == str(named)
    assert spec.env["LD_LIBRARY_PATH"].split(":")[0] == str(named.parent)
    assert spec.command[spec.command.index("-c") + 1] == "400", "the cache is for all sequences"
    with pytest.raises(peers.Unavailable, match="absent"):
        peers.llama_server(replace(setup, llama_bin=setup.cache / "absent"))


def test_vllm_is_found_in_its_own_virtual_environment(setup: peers.Setup) -> None:
    with pytest.raises(peers.Unavailable, match=r"README.*--vllm-python"):
        peers.vllm_cpu(setup)
    executable(setup.cache / "vllm" / "bin" / "vllm")
    spec = peers.vllm_cpu(setup)
    assert spec.slow_start and spec.extra_body == {"ignore_eos": True}
    assert str(setup.cache / "checkpoints" / "model-bf16-no-eos") in spec.command

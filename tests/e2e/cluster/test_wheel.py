"""The wheel of this machine's processor: built, audited, and served from where no compiler is."""

import os
import platform
import re
import subprocess
import sys
from pathlib import Path
from zipfile import ZipFile

import httpx
import pytest

from tests.support.servers.live_server import free_port, wait_until
from tests.support.servers.ssh_machine import engine_deploy, ssh_machine

ROOT = Path(__file__).parents[3]
BUILD = ROOT / "deploy" / "wheels" / "build.py"

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheels") / "dist"
    machine = platform.machine()
    subprocess.run(["make", "docs"], cwd=ROOT, check=True)
    command = [sys.executable, BUILD, "--machine", machine, "--python", "python3.11"]
    subprocess.run([*command, "--out", folder], check=True)
    return folder


def test_the_wheel_runs_on_any_glibc_since_2_28(dist: Path) -> None:
    (wheel,) = dist.glob("*.whl")
    auditwheel = ROOT / "build" / "wheels" / "python3.11" / "bin" / "auditwheel"
    shown = subprocess.check_output([auditwheel, "show", wheel], text=True)
    tags = re.findall(r"manylinux_2_(\d+)_", wheel.name)
    assert tags and min(map(int, tags)) <= 28, wheel.name
    assert "libstdc++" not in shown  # the wheel carries its own C++ library


def test_the_wheel_has_the_documentation(dist: Path) -> None:
    (wheel,) = dist.glob("*.whl")
    assert {"engine/site/index.html", "engine/site/site.css"} <= set(ZipFile(wheel).namelist())


def test_an_environment_without_a_compiler_serves_from_the_wheel(
    dist: Path, tmp_path: Path
) -> None:
    (wheel,) = dist.glob("*.whl")
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "venv"], check=True)
    bin_folder = tmp_path / "venv" / "bin"
    # PATH has the environment alone, so neither a compiler nor CMake can be found.
    variables = {**os.environ, "PATH": str(bin_folder)}
    pip = [bin_folder / "python", "-m", "pip", "install", "-q", "--only-binary", ":all:", wheel]
    subprocess.run(pip, check=True, env=variables, cwd=tmp_path)
    port = free_port()
    serve = [bin_folder / "engine", "serve", "--port", str(port)]
    server = subprocess.Popen(serve, env=variables, cwd=tmp_path)
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
            wait_until(lambda: _is_ready(client), seconds=300)
            body = {"messages": [{"role": "user", "content": "Say hello."}], "max_tokens": 8}
            answer = client.post("/v1/chat/completions", json=body).json()
            page = client.get("/", headers={"accept": "text/html"})
            script = client.get("/ui/static/vendor/preact/preact.mjs")
    finally:
        server.terminate()
        server.wait(30)
    assert answer["choices"][0]["message"]["content"]
    assert "<html" in page.text and script.status_code == 200


def test_the_wheel_is_deployed_by_ssh(
    dist: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """pip and the environment are real there."""
    (wheel,) = dist.glob("*.whl")
    port = free_port()
    with ssh_machine(tmp_path, monkeypatch, has_pip=True) as home:
        done = engine_deploy("target", "--wheel", str(wheel), "--port", str(port))
        assert done.returncode == 0, done.stderr
        key = (home / ".config/engine/api_key").read_text().strip()
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
            client.headers["authorization"] = f"Bearer {key}"
            answer = client.post("/v1/completions", json={"prompt": "Hello", "max_tokens": 4})
        assert answer.json()["choices"][0]["text"]
        assert engine_deploy("target", "--remove").returncode == 0
        assert not (home / ".local/share/engine/venv").exists()


def _is_ready(client: httpx.Client) -> bool:
    try:
        return client.get("/readyz").status_code == 200
    except httpx.TransportError:
        return False

"""Every step of `steps/*.mjs` passes in Chromium, on a server with two backends."""

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from tests.support.servers.live_server import free_port, wait_until

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[1]
MODULES = ROOT / "build" / "ui"
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
STEPS = [
    f"{path.stem}:{name}"
    for path in sorted((FOLDER / "steps").glob("*.mjs"))
    for name in re.findall(r"^export async function (\w+)", path.read_text(), re.MULTILINE)
]
# The same model twice, so that two backends give the same answers.
CONFIG = """
[backends.first]
kind = "native"
model = "smollm2-135m-instruct"
[backends.second]
kind = "native"
model = "smollm2-135m-instruct"
[performance]
memory_pool_size_mb = 256
[storage]
path = "{storage}"
"""

pytestmark = [
    pytest.mark.seconds,
    pytest.mark.skipif(
        CHROMIUM is None or not (MODULES / "node_modules" / ".package-lock.json").exists(),
        reason="needs Chromium and two packages of npm: make browser",
    ),
]


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("ui")
    config = folder / "engine.toml"
    config.write_text(CONFIG.format(storage=folder / "storage"))
    port = free_port()
    command = [sys.executable, "-m", "engine.cli.main", "serve", "--config", config]
    with (folder / "log").open("w") as log:
        server = subprocess.Popen([*command, "--port", str(port)], stderr=log)
    try:
        url = f"http://127.0.0.1:{port}"
        wait_until(lambda: is_ready(url, server), seconds=120)
        yield url
    finally:
        server.terminate()
        server.wait(30)


def is_ready(url: str, server: subprocess.Popen[bytes]) -> bool:
    assert server.poll() is None, "the server has ended"
    try:
        models = httpx.get(f"{url}/v1/models").json()["data"]
    except httpx.TransportError:
        return False
    return [each["state"] for each in models] == ["loaded", "loaded"]


@pytest.fixture(scope="module")
def run_step(url: str) -> Iterator[Callable[[str], str | None]]:
    assert CHROMIUM is not None
    driver = subprocess.Popen(
        ["node", FOLDER / "driver.mjs", url, MODULES, CHROMIUM],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert driver.stdin is not None and driver.stdout is not None

    def run(step: str) -> str | None:
        assert driver.stdin is not None and driver.stdout is not None
        driver.stdin.write(f"{step}\n")
        driver.stdin.flush()
        answer = driver.stdout.readline()
        assert answer, "the driver has ended"
        failure: str | None = json.loads(answer)["failure"]
        return failure

    yield run
    driver.stdin.close()
    driver.wait(30)


@pytest.mark.parametrize("step", STEPS)
def test_ui_step_passes_in_chromium(run_step: Callable[[str], str | None], step: str) -> None:
    failure = run_step(step)
    assert failure is None, failure

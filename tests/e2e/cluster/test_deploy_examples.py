"""The examples of deployment, as their files and pages say it: only names and ports differ."""

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from tests.conftest import DEFAULT_MODEL
from tests.support.servers.live_server import free_port, wait_until

ROOT = Path(__file__).parents[3]
EXAMPLES = ROOT / "examples/deploy_inference_server"
COMPOSE = ROOT / "deploy/compose.yaml"
BIN = Path(sys.executable).parent
needs_redis = pytest.mark.skipif(shutil.which("redis-server") is None, reason="needs redis-server")


@contextmanager
def running(command: list[str], folder: Path, **variables: str) -> Iterator[None]:
    path = f"{BIN}:{os.environ['PATH']}"
    with (folder / f"{len(os.listdir(folder))}.log").open("wb") as log:
        process = subprocess.Popen(
            command,
            cwd=folder,
            env=os.environ | {"PATH": path, "OMP_NUM_THREADS": "1"} | variables,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    try:
        yield
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(60)


def is_ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/readyz").status_code == 200
    except httpx.TransportError:
        return False


def complete(url: str, prompt: str, **headers: str) -> httpx.Response:
    body = {"model": DEFAULT_MODEL, "prompt": prompt, "max_tokens": 4, "temperature": 0}
    return httpx.post(f"{url}/v1/completions", json=body, headers=headers, timeout=60)


def page_commands(example: str) -> list[str]:
    """The lines of the page's shell blocks, without comments."""
    text = (EXAMPLES / example / "README.md").read_text()
    blocks = re.findall(r"```bash\n(.*?)```", text, re.S)
    lines = "".join(blocks).replace("\\\n", " ").splitlines()
    return [bare for line in lines if (bare := re.sub(r"\s+#.*", "", line).strip())]


def page_command(example: str, beginning: str, **changes: str) -> str:
    """The command of a page that begins like this, with names replaced."""
    (command,) = [each for each in page_commands(example) if beginning in each]
    for old, new in changes.items():
        assert old in command, (old, command)
        command = command.replace(old, new)
    return command


def test_two_machines_share_the_requests_of_one_router(default_model: Path, tmp_path: Path) -> None:
    example, port = "two_machines", free_port()
    url, here = f"http://127.0.0.1:{port}", {"one:8080": f"127.0.0.1:{port}"}
    token = page_command(example, "engine node token", **{"&& scp node.token two:": ""})
    key = page_command(example, "secrets.token_urlsafe")
    path = f"{BIN}:{os.environ['PATH']}"
    for each in (token, key):
        subprocess.run(each, shell=True, cwd=tmp_path, env=os.environ | {"PATH": path}, check=True)
    auth = {"authorization": f"Bearer {(tmp_path / 'api.key').read_text().strip()}"}
    serve = page_command(example, "engine serve smol", **{"0.0.0.0": f"127.0.0.1 --port {port}"})
    join = page_command(example, "engine node join", **here) + " --name two --threads 1"
    listed = page_command(example, "engine node list", **here) + " --json"

    def joined() -> bool:
        told = subprocess.run(
            ["sh", "-c", listed],
            cwd=tmp_path,
            env=os.environ | {"PATH": path},
            capture_output=True,
            text=True,
        )
        return '"name": "two"' in told.stdout

    with ExitStack() as stack:
        stack.enter_context(running(["sh", "-c", f"{serve} --threads 1"], tmp_path))
        wait_until(lambda: is_ready(url), 60)
        stack.enter_context(running(["sh", "-c", join], tmp_path))
        wait_until(joined, 60)
        answers = [complete(url, f"Number {number} is", **auth) for number in range(6)]
        assert {each.status_code for each in answers} == {200}
        assert {each.headers["x-engine-backend"] for each in answers} == {"local", "two"}
        assert complete(url, "Who").status_code == 401


def test_the_router_example_balances_two_servers(default_model: Path, tmp_path: Path) -> None:
    text = (EXAMPLES / "two_machines/engine.toml").read_text()
    routes = page_command("two_machines", "curl").split()[1]
    with ExitStack() as stack:
        for name in ("one", "two"):
            (tmp_path / f"{name}.key").write_text(f"the-key-of-{name}-0123456789")
            (tmp_path / f"{name}.key").chmod(0o600)
            url = f"http://127.0.0.1:{free_port()}"
            text = text.replace(f"http://{name}:8080", url)
            serve = f"engine serve {DEFAULT_MODEL} --threads 1 --api-key-file {name}.key --port"
            stack.enter_context(running([*serve.split(), url.rpartition(":")[2]], tmp_path))
            wait_until(lambda url=url: is_ready(url), 60)
        (tmp_path / "engine.toml").write_text(text)
        port = free_port()
        command = page_command("two_machines", "engine serve --config").split()
        stack.enter_context(running([*command, "--port", str(port)], tmp_path))
        url = f"http://127.0.0.1:{port}"
        wait_until(lambda: is_ready(url), 60)
        told = httpx.get(routes.replace("http://127.0.0.1:8080", url)).text
        assert '"one"' in told and '"two"' in told
        answers = [complete(url, f"Number {number} is") for number in range(8)]
        assert {each.status_code for each in answers} == {200}, answers[0].text
        assert {each.headers["x-engine-backend"] for each in answers} == {"one", "two"}


@needs_redis
def test_compose_services_share_cached_prefixes_through_redis(
    default_model: Path, tmp_path: Path
) -> None:
    """A server that starts again finds the prefixes in Redis."""
    services: dict[str, Any] = yaml.safe_load(COMPOSE.read_text())["services"]
    port, redis_port = free_port(), free_port()
    variables = dict(services["engine"]["environment"])
    assert variables["MODEL"] == f"${{MODEL:-{DEFAULT_MODEL}}}"
    variables["MODEL"] = DEFAULT_MODEL
    redis_url = variables["LLM_ENGINE_TIERS__REDIS_URL"]
    assert redis_url == "redis://redis:6379/0"
    variables["LLM_ENGINE_TIERS__REDIS_URL"] = redis_url.replace(
        "redis:6379", f"127.0.0.1:{redis_port}"
    )
    shell, flag, script = services["engine"]["entrypoint"]
    script = script.replace("$$", "$").replace("0.0.0.0 --port 8000", f"127.0.0.1 --port {port}")
    url, prompt = f"http://127.0.0.1:{port}", "A long prompt that Redis keeps. " * 40
    with running([*services["redis"]["command"], "--port", str(redis_port)], tmp_path):
        cached = []
        for _ in range(2):
            with running([shell, flag, script], tmp_path, **variables):
                wait_until(lambda: is_ready(url), 60)
                # Open WebUI asks by this name.
                answer = complete(url, prompt, host="engine:8000")
                assert answer.status_code == 200, answer.text
                cached.append(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])
        assert cached[0] == 0 and cached[1] > 100
        asked = services["open-webui"]["environment"]["OPENAI_API_BASE_URL"]
        assert asked == "http://engine:8000/v1"

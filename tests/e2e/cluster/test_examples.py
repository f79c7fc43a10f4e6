"""Every example as its user runs it: a script in a process of its own."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from tests.conftest import DEFAULT_MODEL
from tests.support.fakes.fake_backend import FakeBackend
from tests.support.fakes.stand_in_engine import FaultFile
from tests.support.servers.live_server import free_port, live_server, wait_until

EXAMPLES = Path(__file__).parents[3] / "examples"
DEPLOY = EXAMPLES / "deploy_inference_server" / "simple_vllm" / "deploy.py"
DEMO = EXAMPLES / "deploy_inference_server" / "multi_backend" / "demo.py"
EVALUATE = EXAMPLES / "gsm8k_remote" / "evaluate.py"
CHAT = EXAMPLES / "chat_client" / "chat.py"
SECRET = "hf_a-secret"


def run(
    script: Path, *arguments: str, timeout: float = 100, **options
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(script), *arguments],
        capture_output=True,
        text=True,
        timeout=timeout,
        **options,
    )


def script_at(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/bash\n{text}\n")
    path.chmod(0o755)
    return path


def test_chatting_streams_answers_and_keeps_the_conversation():
    with live_server() as server:
        done = run(CHAT, "--base-url", f"{server.url}/v1", input="hello\n\nand again\n")
        assert done.returncode == 0, done.stderr
        assert done.stdout.count("Hello from a fake model.") == 2
        first, second = server.backend.requests
        assert [message["role"] for message in second.messages] == ["user", "assistant", "user"]


def test_the_evaluation_counts_resumes_and_refuses_another_runs_file(tmp_path):
    output = tmp_path / "results.jsonl"
    backend = FakeBackend(["12 trays", " hold 96.", " #### ", "39"])
    env = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    with live_server(backend) as server:
        given = ["--models", f"{server.url}/v1", "--output", str(output), "--json"]
        done = run(EVALUATE, *given, "--limit", "5", env=env)
        assert done.returncode == 0, done.stderr
        (model,) = json.loads(done.stdout)["models"]
        assert model["right"] == 1 and model["answered"] == 5
        assert model["measures"]["after ####"] == 1.0
        with output.open("a") as file:
            file.write('{"half')  # as a crash leaves it
        asked = len(backend.requests)
        again = run(EVALUATE, *given, env=env)
        assert json.loads(again.stdout)["models"][0]["answered"] == 20, again.stderr
        assert len(backend.requests) - asked == 15
        assert len([json.loads(line) for line in output.read_text().splitlines()]) == 20
        other = run(EVALUATE, *given, "--max-tokens", "7", env=env)
        assert other.returncode == 2 and "another run" in other.stderr


def test_deploy_dry_run_prints_every_step_without_secrets(tmp_path, checkpoint):
    env = os.environ | {"HF_TOKEN": SECRET}
    folder = checkpoint.rename(tmp_path / "model; rm -rf")
    model = ["--model", str(folder), "--dry-run"]
    local = run(DEPLOY, *model, env=env)
    assert f"-m vllm.entrypoints.cli.main serve '{folder}'" in local.stdout, local.stderr
    ssh = run(DEPLOY, "--target", "ssh", "--host", "me@box", *model, env=env)
    assert "rsync -az" in ssh.stdout and "-L 127.0.0.1:8000:127.0.0.1:8000 me@box" in ssh.stdout
    assert "export HF_TOKEN=(as it is here)" in ssh.stdout
    assert f"--model '{folder}' --port 8000" in ssh.stdout
    sky = run(DEPLOY, "--target", "sky", "--gpu", "A100:2", *model, env=env, cwd=tmp_path)
    assert "sky launch -c engine-vllm --secret HF_TOKEN sky_task.yaml" in sky.stdout
    assert 'accelerators: "A100:2"' in sky.stdout and "HF_TOKEN: null" in sky.stdout
    for done in (local, ssh, sky):
        assert done.returncode == 0 and "http://127.0.0.1:8000/v1" in done.stdout
        assert SECRET not in done.stdout + done.stderr
    assert list(tmp_path.iterdir()) == [folder]
    assert run(DEPLOY, "--target", "ssh", "--host=-oProxyCommand=x").returncode == 2


@contextmanager
def deployed(*arguments: str, **options) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A deployment that has told its endpoint; Ctrl-C ends it."""
    process = subprocess.Popen(
        [sys.executable, str(DEPLOY), *arguments],
        stdout=subprocess.PIPE,
        text=True,
        # Tests that were started in the background have it ignored, and so would their children.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        **options,
    )
    try:
        line = process.stdout.readline()
        assert line.startswith("endpoint: "), line
        yield process, line.removeprefix("endpoint: ").strip()
        process.send_signal(signal.SIGINT)
        assert process.wait(20) in (0, 1)
    finally:
        process.kill()
        process.wait()


def is_gone(endpoint: str) -> bool:
    try:
        httpx.get(f"{endpoint}/models")
    except httpx.TransportError:
        return True
    return False


def stand_in_python(tmp_path: Path) -> Path:
    """An interpreter in whose environment vLLM is our stand-in."""
    lines = [f"export {name}='{value}'" for name, value in FaultFile(tmp_path).env.items()]
    lines.append(f'exec {sys.executable} "$@"')
    return script_at(tmp_path / "bin" / "python", "\n".join(lines))


@pytest.fixture
def checkpoint(tmp_path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    return folder


def test_vllm_is_deployed_here_and_leaves_nothing_behind(tmp_path, checkpoint):
    python = str(stand_in_python(tmp_path))
    given = ["--model", str(checkpoint), "--python", python, "--port", str(free_port())]
    with deployed(*given) as (_, endpoint):
        assert httpx.get(f"{endpoint}/models").json()["data"][0]["id"] == "model"
    wait_until(lambda: is_gone(endpoint))
    missing = run(DEPLOY, "--model", str(checkpoint), "--python", "/no/python")
    assert missing.returncode == 1 and "/no/python" in missing.stderr


def test_vllm_is_deployed_by_ssh_with_the_token_on_no_command_line(tmp_path, checkpoint):
    """`ssh` and `rsync` are stand-ins: the one runs what it is given here, the other copies."""
    home, tools = tmp_path / "home", tmp_path / "tools"
    log = tmp_path / "commands"
    keep = f'echo "$0 $@" >> {log}'
    script_at(
        tools / "ssh",
        f"{keep}\nwhile [[ $1 == -* ]]; do case $1 in -o|-L) shift;; esac; shift; done\nshift\n"
        f'export HOME={home}\ncd {home}\nexec bash -c "$*"',
    )
    script_at(tools / "rsync", f"{keep}\ncp -r {EXAMPLES} {home}/.engine-deploy/src/")
    python = stand_in_python(tmp_path)
    # Pip has nothing to do; everything else is run, by an environment that has vLLM's stand-in.
    script_at(
        home / ".engine-deploy" / "venv" / "bin" / "python",
        f'[ "$2" = pip ] && exit\necho "$HF_TOKEN" > {tmp_path}/token\n'
        f'exec {sys.executable} "$@" --python {python}',
    )
    env = os.environ | {"HF_TOKEN": SECRET, "PATH": f"{tools}:{os.environ['PATH']}"}
    given = ["--target", "ssh", "--host", "box", "--model", str(checkpoint)]
    with deployed(*given, "--port", str(free_port()), env=env) as (_, endpoint):
        assert httpx.get(f"{endpoint}/models").json()["data"][0]["id"] == "model"
    wait_until(lambda: is_gone(endpoint), 20)
    assert (tmp_path / "token").read_text().strip() == SECRET
    assert SECRET not in log.read_text() and log.read_text().count("ssh") >= 3


def test_several_backends_answer_and_the_shadow_is_compared(tmp_path, default_model):
    config = tmp_path / "engine.toml"
    config.write_text(
        f"""
        [backends.fast]
        kind = "native"
        model = "{DEFAULT_MODEL}"
        [backends.other]
        kind = "native"
        model = "{DEFAULT_MODEL}"
        backend_args = {{ numerics = "fast" }}
        [models.smol]
        aliases = ["gpt-4o-mini"]
        backends = ["fast"]
        shadow = {{ backend = "other", share = 1.0 }}
        """
    )
    done = run(DEMO, "--config", str(config), "--turns", "1")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("answered by fast") == 4
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("shadow of smol")]
    outcomes = json.loads(line.partition(": ")[2].replace("'", '"'))
    assert sum(outcomes.values()) == 4 and set(outcomes) <= {"identical", "different"}


def test_example_engine_toml_is_a_valid_configuration():
    done = subprocess.run(
        [sys.executable, "-m", "engine.cli.main", "config", "show"],
        env=os.environ | {"LLM_ENGINE_CONFIG": str(DEMO.parent / "engine.toml")},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


def test_interp_example_falls_back_to_our_backend_without_vllm_and_reads_an_activation(
    default_model,
):
    script = EXAMPLES / "deploy_inference_server" / "simple_vllm_nnsight" / "deploy.py"
    done = run(script, "--once", "--port", str(free_port()))
    assert done.returncode == 0, done.stderr
    assert "vLLM: vLLM is not installed for" in done.stdout
    assert "The engine's own backend serves the model." in done.stdout
    assert "/v1/interp/run" in done.stdout
    assert "residual stream after layer 0: [" in done.stdout


@pytest.mark.parametrize(
    ("name", "told"),
    [("logit_lens", "layer  29"), ("attention", "head 8"), ("patching", "patched")],
)
def test_interpretability_example_scripts_print_their_result(default_model, name, told):
    done = run(EXAMPLES / "interpretability" / f"{name}.py")
    assert done.returncode == 0, done.stderr
    assert told in done.stdout


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_steering_makes_held_out_continuations_positive(default_model):
    """The layer and the strength are chosen on other prompts, and perplexity rises by < 25 %."""
    done = run(EXAMPLES / "interpretability" / "steering.py", timeout=900)
    assert done.returncode == 0, done.stderr
    before, after = (line for line in done.stdout.splitlines() if line.startswith("held back"))
    shares = [float(re.search(r"(\d+)% positive", line)[1]) for line in (before, after)]
    assert shares[0] <= 30 and shares[1] >= 60, done.stdout
    assert float(re.search(r"perplexity \+?(-?[\d.]+)%", after)[1]) < 25, done.stdout

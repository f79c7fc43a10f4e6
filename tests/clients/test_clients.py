"""Each client's own flow against our server: the default model, or a scripted one for clients that
need certain answers.
"""

import json
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import anthropic
import httpx
import pytest

from engine.core.interfaces.backend import ChatRequest, CompletionRequest
from tests.clients import environments
from tests.clients.environments import RUN_TIMEOUT_S, Environment
from tests.conftest import DEFAULT_MODEL
from tests.support.fakes.fake_backend import (
    MODEL,
    FakeBackend,
    Script,
    call_script,
    reasoning_script,
)
from tests.support.servers.live_server import free_port, live_server, wait_until
from tests.support.servers.served import ServedEngine

pytestmark = pytest.mark.clients

OFFLINE = {
    "HF_HUB_OFFLINE": "1",
    "PROMPTFOO_DISABLE_TELEMETRY": "1",
    "PROMPTFOO_DISABLE_UPDATE": "1",
}
TOLD = "told by the tool"


def run(command: list[str], folder: Path, **variables: str) -> str:
    """Run a client that must succeed. Returns what it printed."""
    done = subprocess.run(
        command,
        cwd=folder,
        env=os.environ | OFFLINE | variables,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=RUN_TIMEOUT_S,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    return done.stdout


def run_in(environment: Environment, program: str, *arguments: str, folder: Path) -> str:
    return run([environment.program(program), *arguments], folder)


def calls_once(name: str, arguments: dict[str, Any]) -> Any:
    """A script that calls a tool, and says "All done." when it has the result."""

    def script(request: ChatRequest | CompletionRequest) -> Script:
        assert isinstance(request, ChatRequest)
        if any(message["role"] == "tool" for message in request.messages):
            return reasoning_script([], ["All", " done."])
        return call_script((name, json.dumps(arguments)))

    return script


def result_of(backend: FakeBackend) -> str:
    """The result of the tool that the client sent back."""
    last = backend.requests[-1]
    assert isinstance(last, ChatRequest)
    return str(next(each["content"] for each in last.messages if each["role"] == "tool"))


def test_codex_runs_a_command_and_reads_its_result(tmp_path: Path) -> None:
    environments.CODEX.build()
    backend = FakeBackend()
    backend.script = calls_once("exec_command", {"cmd": f"echo {TOLD}"})
    with live_server(backend) as server:
        (tmp_path / "config.toml").write_text(
            f'model = "{MODEL}"\nmodel_provider = "local"\n[model_providers.local]\n'
            f'name = "local"\nbase_url = "{server.url}/v1"\nwire_api = "responses"\n'
        )
        codex = environments.CODEX.program("codex")
        options = ["--skip-git-repo-check", "--sandbox", "danger-full-access"]
        said = run([codex, "exec", *options, "Say hello"], tmp_path, CODEX_HOME=str(tmp_path))
    assert "All done." in said
    assert TOLD in result_of(backend)


def test_anthropic_tool_runner_calls_a_tool_and_gets_the_answer() -> None:
    @anthropic.beta_tool
    def get_weather(city: str) -> str:
        """The weather of a city."""
        return f"{TOLD}: sun in {city}"

    backend = FakeBackend()
    backend.script = calls_once("get_weather", {"city": "Rome"})
    with (
        live_server(backend) as server,
        anthropic.Anthropic(base_url=server.url, api_key="unused", max_retries=0) as client,
    ):
        runner = client.beta.messages.tool_runner(
            model=MODEL,
            max_tokens=64,
            tools=[get_weather],
            messages=[{"role": "user", "content": "The weather in Rome?"}],
        )
        message = runner.until_done()
    assert message.content[0].text == "All done."
    assert result_of(backend) == f"{TOLD}: sun in Rome"


def test_continue_fills_in_the_middle(tmp_path: Path) -> None:
    environments.CONTINUE.build()
    backend = FakeBackend()
    with live_server(backend) as server:
        script = environments.CONTINUE.script("fill_in.mjs")
        said = run(["node", script, server.url, MODEL], tmp_path)
    assert json.loads(said) == "Hello from a fake model."
    request = backend.requests[-1]
    assert isinstance(request, CompletionRequest)
    assert (request.prompt, request.suffix) == ("def one():", "return 1")


def test_vercel_ai_sdk_anthropic_provider_generates_and_streams(
    server: ServedEngine, tmp_path: Path
) -> None:
    environments.AI_SDK.build()
    script = environments.AI_SDK.script("generate.mjs")
    said = json.loads(run(["node", script, server.url, server.model], tmp_path))
    assert said["whole"] and said["whole"] == said["streamed"]
    first, second = said["tokens"]
    assert first["inputTokens"] == second["inputTokens"] > 0


def test_promptfoo_evaluates_a_prompt_through_our_server(
    server: ServedEngine, tmp_path: Path
) -> None:
    environments.PROMPTFOO.build()
    provider = {
        "id": f"openai:chat:{server.model}",
        "config": {"apiBaseUrl": f"{server.url}/v1", "apiKey": "unused", "max_tokens": 16},
    }
    asserted = [{"type": "javascript", "value": "output.length > 0"}]
    config = {
        "prompts": ["Say hello to {{name}}."],
        "providers": [provider],
        "tests": [{"vars": {"name": "Ada"}, "assert": asserted}],
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    program = environments.PROMPTFOO.program("promptfoo")
    command = [program, "eval", "-c", "config.json", "--no-cache", "-o", "out.json"]
    run(command, tmp_path, PROMPTFOO_CONFIG_DIR=str(tmp_path / "state"))
    stats = json.loads((tmp_path / "out.json").read_text())["results"]["stats"]
    assert (stats["successes"], stats["failures"], stats["errors"]) == (1, 0, 0)
    assert stats["tokenUsage"]["completion"] > 0


def test_instructor_parses_structured_output_in_every_mode(
    server: ServedEngine, tmp_path: Path
) -> None:
    environments.INSTRUCTOR.build()
    script = environments.INSTRUCTOR.script("colours.py")
    url = (server.url, server.model)
    said = run_in(environments.INSTRUCTOR, "python", script, *url, folder=tmp_path)
    made = dict(line.split(" ", 1) for line in said.splitlines())
    assert made.keys() == {"TOOLS", "JSON_SCHEMA", "RESPONSES_TOOLS"}
    for each in made.values():
        assert json.loads(each)["name"] in ("red", "green")


TASK = """
task: colours
dataset_path: json
dataset_kwargs: {{data_files: {file}}}
test_split: train
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: label
metric_list: [{{metric: acc}}]
"""


def test_lm_eval_scores_a_multiple_choice_task_with_our_tokenizer(
    server: ServedEngine, tmp_path: Path
) -> None:
    environments.LM_EVAL.build()
    row = {"question": "The colour of blood is", "choices": ["red", "qq"], "label": 0}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    (tmp_path / "colours.yaml").write_text(TASK.format(file=tmp_path / "rows.jsonl"))
    model = f"model={server.model},base_url={server.url}/v1/completions,tokenizer_backend=remote"
    arguments = ["--model", "local-completions", "--model_args", f"{model},tokenized_requests=True"]
    arguments += ["--tasks", "colours", "--include_path", str(tmp_path), "--output_path", "out"]
    run_in(environments.LM_EVAL, "lm_eval", *arguments, folder=tmp_path)
    (results,) = (tmp_path / "out").rglob("results_*.json")
    assert json.loads(results.read_text())["results"]["colours"]["acc,none"] == 1.0


def test_guidellm_benchmark_completes(server: ServedEngine, tmp_path: Path) -> None:
    environments.GUIDELLM.build()
    rows = [{"prompt": prompt, "output_tokens_count": 6} for prompt in ("Hello.", "Count.")]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    arguments = ["--backend", f"kind=openai_http,target={server.url}"]
    arguments += ["--profile", "kind=synchronous", "--constraint", "kind=max_requests,count=2"]
    arguments += ["--data", "kind=json_file,path=prompts.jsonl"]
    arguments += ["--output", "kind=json,path=out.json", "--disable-console-interactive"]
    run_in(environments.GUIDELLM, "guidellm", "run", *arguments, folder=tmp_path)
    (benchmark,) = json.loads((tmp_path / "out.json").read_text())["benchmarks"]
    metrics = benchmark["metrics"]
    assert metrics["request_totals"]["successful"] == 2
    assert metrics["output_token_count"]["successful"]["mean"] == 6.0


def test_ollama_python_client_generates_streams_and_embeds(
    server: ServedEngine, tmp_path: Path
) -> None:
    environments.OLLAMA.build()
    script = environments.OLLAMA.script("ollama_flow.py")
    told = (server.url, server.model)
    said = json.loads(run_in(environments.OLLAMA, "python", script, *told, folder=tmp_path))
    assert said["whole"] and said["whole"] == said["streamed"]
    assert said["reason"] == "length" and said["counts"] == [8, 8] and said["text"]
    assert said["formed"]["colour"] in ("red", "green") and said["scored"] == 8
    assert {f"{server.model}:latest", "pirate:latest", "sailor:latest"} <= {*said["names"]}
    assert "You are a pirate." in said["system"] and said["pirate"]
    assert said["running"] and said["embedded"] == [said["old"]] * 2 and said["old"] > 0
    assert said["missing"] == 404 and said["pulled"][-1] == "success"
    assert said["deleted"] == ["success", "success"]
    assert not {"pirate:latest", "sailor:latest"} & {*said["left"]}


def test_ollama_javascript_client_generates_streams_and_embeds(
    server: ServedEngine, tmp_path: Path
) -> None:
    environments.OLLAMA_JS.build()
    script = environments.OLLAMA_JS.script("ollama_stream.mjs")
    said = json.loads(run(["node", script, server.url, server.model], tmp_path))
    assert said["whole"] and said["whole"] == said["streamed"]
    assert said["dimensions"] > 0 and f"{server.model}:latest" in said["names"]
    assert "completion" in said["capabilities"]


def test_k6_load_test_passes_its_checks(server: ServedEngine, tmp_path: Path) -> None:
    environments.K6.build()
    script = environments.K6.script("load.js")
    told = ["-e", f"URL={server.url}", "-e", f"MODEL={server.model}", "--quiet"]
    assert "4 out of 4" in run_in(environments.K6, "k6", "run", *told, script, folder=tmp_path)


def test_vllm_bench_serve_completes_against_our_server(
    server: ServedEngine, tmp_path: Path
) -> None:
    folder = environments.vllm_folder(DEFAULT_MODEL)
    command = [str(folder / "bin/vllm"), "bench", "serve", "--base-url", server.url]
    command += ["--model", server.model, "--tokenizer", str(folder / "smollm2-135m-hf")]
    command += ["--backend", "openai", "--endpoint", "/v1/completions", "--dataset-name", "random"]
    command += ["--random-input-len", "16", "--random-output-len", "8", "--num-prompts", "3"]
    run([*command, "--save-result", "--result-filename", "out.json"], tmp_path)
    result = json.loads((tmp_path / "out.json").read_text())
    assert (result["completed"], result["total_output_tokens"]) == (3, 24)


@contextmanager
def open_webui(folder: Path, **connection: str) -> Iterator[httpx.Client]:
    """A client of Open WebUI with one connection, which the variables `connection` describe."""
    port = free_port()
    variables = connection | {
        "DATA_DIR": str(folder),
        "WEBUI_AUTH": "False",
        "WEBUI_SECRET_KEY": "of a test",
        "OFFLINE_MODE": "true",
        "RAG_EMBEDDING_ENGINE": "openai",
    }
    program = environments.OPEN_WEBUI.program("open-webui")
    command = [program, "serve", "--host", "127.0.0.1", "--port", str(port)]
    with (
        (folder / "log").open("w") as log,
        subprocess.Popen(
            command, cwd=folder, env=os.environ | OFFLINE | variables, stdout=log, stderr=log
        ) as process,
        httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client,
    ):
        try:
            wait_until(lambda: process.poll() is not None or is_up(client), RUN_TIMEOUT_S)
            assert process.poll() is None, (folder / "log").read_text()[-4000:]
            signed = {"email": "admin@localhost", "password": "admin"}
            token = client.post("/api/v1/auths/signin", json=signed).json()["token"]
            client.headers["authorization"] = f"Bearer {token}"
            yield client
        finally:
            process.terminate()


def is_up(client: httpx.Client) -> bool:
    try:
        return client.get("/health").status_code == 200
    except httpx.TransportError:
        return False


def chat_in(client: httpx.Client, model: str) -> None:
    """Find a model in Open WebUI and chat with it."""
    listed = client.get("/api/models").json()["data"]
    assert model in [each["id"] for each in listed]
    messages = [{"role": "user", "content": "Say hello."}]
    body = {"model": model, "messages": messages, "max_tokens": 5}
    whole = client.post("/api/chat/completions", json=body | {"stream": False}).json()
    assert whole["choices"][0]["message"]["content"]
    streamed = client.post("/api/chat/completions", json=body | {"stream": True}).text
    assert '"delta"' in streamed and streamed.rstrip().endswith("[DONE]")


@pytest.mark.timeout(900)
def test_open_webui_chats_through_the_openai_api(server: ServedEngine, tmp_path: Path) -> None:
    environments.OPEN_WEBUI.build()
    connection = {"OPENAI_API_BASE_URL": f"{server.url}/v1", "OPENAI_API_KEY": "unused"}
    with open_webui(tmp_path, ENABLE_OLLAMA_API="False", **connection) as client:
        chat_in(client, server.model)


@pytest.mark.timeout(900)
def test_open_webui_chats_through_the_ollama_api(server: ServedEngine, tmp_path: Path) -> None:
    environments.OPEN_WEBUI.build()
    with open_webui(tmp_path, ENABLE_OPENAI_API="False", OLLAMA_BASE_URL=server.url) as client:
        name = f"{server.model}:latest"
        chat_in(client, name)
        assert client.get("/ollama/api/version").json()["version"]
        assert client.get("/ollama/api/ps").json()
        shown = client.post("/ollama/api/show", json={"model": name}).json()
        assert "completion" in shown["capabilities"]
        body = {"model": name, "input": ["a", "b"]}
        assert len(client.post("/ollama/api/embed", json=body).json()["embeddings"]) == 2
        copy = {"source": name, "destination": "copied"}
        assert client.post("/ollama/api/copy", json=copy).json() is True
        assert client.request("DELETE", "/ollama/api/delete/0", json={"model": "copied"}).json()

"""Our server in front of external engines: the whole way from a client to a child and back, with a
child that stands in for vLLM or SGLang, and behaves as badly as it is told to.
"""

import asyncio
import os
import re
import signal
import sys
import textwrap
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import openai
import psutil
import pytest

from engine.backends.external.served_child import ServedBackend
from engine.backends.sglang import SGLangBackend, SGLangConfig
from engine.backends.vllm import VLLMBackend, VLLMConfig
from tests.support.fakes.stand_in_engine import FaultFile
from tests.support.servers.live_server import LiveServer, make_settings, wait_until

KINDS = {"vllm": (VLLMBackend, VLLMConfig), "sglang": (SGLangBackend, SGLangConfig)}
MODEL = "openai-community/gpt2"
BOTH = pytest.mark.parametrize("kind", KINDS)


@pytest.fixture(autouse=True)
def _own_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))


@pytest.fixture
def faults(tmp_path: Path) -> Iterator[FaultFile]:
    """Whatever the stand-in was made to start is gone in the end."""
    file = FaultFile(tmp_path)
    yield file
    wait_until(lambda: all(map(is_gone, file.pids)), 30)


def is_gone(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


def make(kind: str, faults: FaultFile, **options) -> ServedBackend:
    backend, config = KINDS[kind]
    fields = {"model_name": MODEL, "port": 0, "env": faults.env, "stop_grace_s": 0.5}
    return backend(config(**fields | {"start_timeout_s": 60.0} | options))


@contextmanager
def served(kind: str, faults: FaultFile, **options) -> Iterator[LiveServer]:
    server = LiveServer(make(kind, faults, **options), make_settings())
    try:
        wait_until(lambda: httpx.get(f"{server.url}/readyz").status_code == 200, 60)
        yield server
    finally:
        server.stop()


def client_of(server: LiveServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def ask(client: openai.OpenAI, **extra):
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    return client.chat.completions.create(model=MODEL, messages=messages, temperature=0, **extra)


@BOTH
def test_clients_get_the_same_api_whatever_external_engine_answers(
    kind: str, faults: FaultFile
) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    with served(kind, faults) as server:
        client = client_of(server)
        (listed,) = client.models.list().data
        assert listed.id == MODEL and listed.backend == kind
        whole = ask(client)
        assert whole.choices[0].message.content == "The capital of France is Paris, they say."
        chunks = list(ask(client, stream=True))
        streamed = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        assert streamed == whole.choices[0].message.content
        completed = client.completions.create(model=MODEL, prompt="Hi", max_tokens=3, temperature=0)
        assert completed.choices[0].text == "The capital of"
        assert completed.choices[0].finish_reason == "length"
        assert httpx.get(f"{server.url}/health").json()["memory_usage_mb"] > 10
        with pytest.raises(
            openai.BadRequestError, match="tools"
        ):  # it was given no parser for them
            ask(client, tools=[tool])


def stream_to_the_end(client: openai.OpenAI, endings: list[str]) -> None:
    try:
        chunks = list(ask(client, stream=True))
        endings.append(chunks[-1].choices[0].finish_reason)
    except openai.APIError as error:
        endings.append(str(error))


@BOTH
def test_a_killed_external_engine_ends_its_streams_and_restarts(
    kind: str, faults: FaultFile
) -> None:
    faults.set(stall_after=3)  # so that none ends by itself before the last one has begun
    with served(kind, faults) as server:
        client, endings = client_of(server), []
        threads = [
            threading.Thread(target=stream_to_the_end, args=(client, endings)) for _ in range(8)
        ]
        for thread in threads:
            thread.start()
        wait_until(lambda: server.services.lifecycle.num_admitted == 8)
        os.kill(faults.pids[0], signal.SIGKILL)
        for thread in threads:
            thread.join(60)
        assert len(endings) == 8
        assert not {"stop", "length"} & {*endings}
        faults.set()
        wait_until(lambda: httpx.get(f"{server.url}/readyz").status_code == 200, 60)
        assert ask(client).choices[0].finish_reason == "stop"
        assert server.backend.health().num_restarts == 1


def test_clients_get_503_with_retry_after_while_an_external_engine_restarts(
    faults: FaultFile,
) -> None:
    with served("vllm", faults) as server:
        faults.set(load_s=3.0)
        os.kill(faults.pids[0], signal.SIGKILL)
        wait_until(lambda: httpx.get(f"{server.url}/readyz").status_code == 503)
        with pytest.raises(openai.APIStatusError) as refused:
            ask(client_of(server))
        assert refused.value.status_code == 503
        assert int(refused.value.response.headers["retry-after"]) >= 1
        wait_until(lambda: "loading" in server.backend.health().detail)


def test_a_stream_cut_by_an_engine_crash_ends_with_an_error_and_not_with_stop(
    faults: FaultFile,
) -> None:
    with served("vllm", faults) as server:
        faults.set(crash_after=4)
        endings: list[str] = []
        stream_to_the_end(client_of(server), endings)
        assert endings and "stop" not in endings
        faults.set()
        wait_until(lambda: httpx.get(f"{server.url}/readyz").status_code == 200, 60)


def test_disconnecting_from_a_stalled_engine_frees_the_admission_slot(faults: FaultFile) -> None:
    with served("sglang", faults) as server:
        faults.set(stall_after=3)
        stream = ask(client_of(server), stream=True)
        next(iter(stream))
        stream.close()
        wait_until(lambda: server.services.lifecycle.num_admitted == 0)


QUICK_START = re.compile(r"```python\n(from engine\.backends\.vllm.*?)```", re.DOTALL)


async def test_documented_quick_start_command_runs_unchanged(
    tmp_path: Path, faults: FaultFile, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    """With an interpreter that has the stand-in installed, and a port that is free here."""
    python = tmp_path / "python"
    paths = faults.env["PYTHONPATH"]
    python.write_text(f'#!/bin/sh\nPYTHONPATH={paths} exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    monkeypatch.setenv("STAND_IN_FAULTS", faults.env["STAND_IN_FAULTS"])
    docs = (Path(__file__).parents[3] / "docs/backends.md").read_text()
    (snippet,) = QUICK_START.findall(docs)
    code = snippet.replace("8000", "8973")
    namespace: dict = {}
    run = f"async def main():\n{textwrap.indent(code, '    ')}\n    return backend"
    exec(compile(run, "docs/backends.md", "exec"), namespace)
    backend = await namespace["main"]()
    try:
        assert "ready at http://127.0.0.1:8973\n" in capsys.readouterr().out
        async with httpx.AsyncClient() as client:
            listed = await client.get("http://127.0.0.1:8973/v1/models")
        assert listed.json()["data"][0]["id"] == MODEL
    finally:
        await backend.stop()


async def test_eight_external_engines_at_once_get_eight_ports(faults: FaultFile) -> None:
    backends = [make("sglang", faults) for _ in range(8)]
    try:
        urls = await asyncio.gather(*(backend.start() for backend in backends))
        assert len({*urls}) == 8
    finally:
        await asyncio.gather(*(backend.stop() for backend in backends))

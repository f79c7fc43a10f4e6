"""Nodes as processes of their own: prefill and decode apart, TLS, and what is refused. The model
is tiny, so that a start takes no time.
"""

import re
import ssl
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.files.checkpoint_folders import write_hf
from tests.support.servers.live_server import wait_until
from tests.support.servers.node_processes import READY, Running, Wire, certify, running, token_file

SPARSE = ("--backend", "native", "--threads", "1")
MIN_TOKENS = 128


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    write_hf(folder, "llama", spread=0.2, max_position=2048)
    return str(folder)


class Server:
    """A server without an engine, and what its nodes did."""

    def __init__(self, url: str, token: str, ca_file: str | None = None) -> None:
        self.url, self.token, self.ca_file = url, token, ca_file
        verify: Any = ssl.create_default_context(cafile=ca_file) if ca_file else True
        self.client = httpx.Client(base_url=url, verify=verify, timeout=60)

    def ask(self, prompt: str, **fields: Any) -> dict[str, Any]:
        body = {"model": "tiny", "prompt": prompt, "max_tokens": 24, "temperature": 0.0} | fields
        answer = self.client.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def explained(self, answer: dict[str, Any]) -> dict[str, Any]:
        path = f"/v1/admin/requests/{answer['id']}"
        # A request is kept just after its answer was sent.
        wait_until(lambda: self.client.get(path).status_code == 200)
        return self.client.get(path).json()

    def metric(self, name: str, labels: str = "") -> float:
        text = self.client.get("/metrics").text
        found = re.findall(rf"^{name}\{{.*{labels}.*\}} (\S+)$", text, re.MULTILINE)
        return sum(map(float, found))

    def nodes(self) -> list[dict[str, Any]]:
        headers = {"authorization": f"Bearer {Path(self.token).read_text()}"}
        return self.client.get("/v1/admin/nodes", headers=headers).json()["nodes"]


def start_server(stack: ExitStack, model: str, folder: Path, **variables: str) -> Server:
    token = token_file(folder)
    given = {
        "LLM_ENGINE_SERVER__NODE_TOKEN_FILE": token,
        "LLM_ENGINE_NODES__MIN_PREFILL_TOKENS": str(MIN_TOKENS),
    }
    words = ("serve", model, "--backend", "nodes", "--port", "0", "--name", "tiny")
    process = stack.enter_context(running(*words, **given, **variables))
    ca_file = variables.get("LLM_ENGINE_SERVER__TLS_CERT_FILE") and str(folder / "ca.pem")
    return Server(process.told(READY)[1], token, ca_file)


def join(server: Server, model: str, name: str, *options: str, **variables: str) -> Any:
    words = ("node", "join", server.url, "--token-file", server.token, "--name", name)
    trusted = ("--ca-file", server.ca_file) if server.ca_file else ()
    return running(*words, *trusted, "--model", model, *SPARSE, *options, **variables)


def started(stack: ExitStack, *given: Any, **variables: str) -> Running:
    node: Running = stack.enter_context(join(*given, **variables))
    node.told("Joined")
    return node


PROMPTS = [f"{word} " * 160 for word in ("one", "two", "three")]
SAMPLED = {"temperature": 1.0, "seed": 11, "n": 2, "logprobs": 2}


@pytest.fixture(scope="module")
def alone(model: str) -> list[dict[str, Any]]:
    """What one engine answers."""
    words = ("serve", model, *SPARSE, "--port", "0", "--name", "tiny")
    with running(*words) as process:
        server = Server(process.told(READY)[1], "")
        answers = [server.ask(prompt) for prompt in PROMPTS]
        return [*answers, server.ask("four " * 160, **SAMPLED)]


def same(answer: dict[str, Any], expected: dict[str, Any]) -> bool:
    return all(answer[key] == expected[key] for key in ("choices", "usage"))


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def test_prefill_and_decode_nodes_serve_requests_over_tls(
    model: str, alone: list[dict[str, Any]], stack: ExitStack, tmp_path: Path
) -> None:
    certify(tmp_path, "ca")
    certify(tmp_path, "stranger")
    cert, key = certify(tmp_path, "server", str(tmp_path / "ca"))
    files = {"LLM_ENGINE_SERVER__TLS_CERT_FILE": cert, "LLM_ENGINE_SERVER__TLS_KEY_FILE": key}
    server = start_server(stack, model, tmp_path, **files)
    assert server.url.startswith("https://")
    decode = join(server, model, "d", "--role", "decode")
    prefill = join(server, model, "p", "--role", "prefill", **files)
    refused = [
        join(Server(server.url, server.token, str(tmp_path / "stranger.pem")), model, "x"),
        join(
            Server(server.url, token_file(tmp_path, "another-token-than"), server.ca_file),
            model,
            "y",
        ),
        join(server, model, "z", "--role", "prefill"),
    ]
    nodes = [stack.enter_context(each) for each in (decode, prefill, *refused)]
    for node in nodes[:2]:
        node.told("Joined")

    answers = [server.ask(prompt) for prompt in PROMPTS]
    answers.append(server.ask("four " * 160, **SAMPLED))
    for answer, expected in zip(answers, alone, strict=True):
        assert same(answer, expected)
    told = server.explained(answers[0])
    assert told["backend"] == "d" and told["cache"]["prefill_node"]["outcome"] == "done"
    assert told["cache"]["loaded_tokens"]["peers"] >= 128
    assert "prefill_node" in {each["kind"] for each in told["causes"]}
    assert server.metric("engine_prefill_node_prompts_total", 'outcome="done"') == 4
    again = server.ask(PROMPTS[0])
    assert server.explained(again)["cache"]["prefill_node"] is None, "the decode node has it now"
    short = server.ask("one")
    assert server.explained(short)["cache"]["prefill_node"] is None
    assert {each["name"]: each["role"] for each in server.nodes()} == {
        "d": "decode",
        "p": "prefill",
    }

    lines = [node.ended()[1] for node in nodes[2:]]
    assert re.search(r"the certificate .* --ca-file", lines[0]), lines[0]
    assert "the token is not the server's" in lines[1], lines[1]
    assert "server.tls_cert_file" in lines[2], lines[2]
    assert all(
        node.process.returncode and "Traceback" not in line
        for node, line in zip(nodes[2:], lines, strict=True)
    )


def test_damaged_or_missing_blocks_of_a_prefill_node_are_recomputed(
    model: str, alone: list[dict[str, Any]], stack: ExitStack, tmp_path: Path
) -> None:
    server = start_server(stack, model, tmp_path)
    wire = Wire()
    stack.callback(wire.close)
    started(stack, server, model, "d", "--role", "decode")
    on = {
        "LLM_ENGINE_NODES__BLOCK_LISTEN": f"127.0.0.1:{wire.port}",
        "LLM_ENGINE_NODES__BLOCK_HOST": "127.0.0.2",
    }
    prefill = started(stack, server, model, "p", "--role", "prefill", **on)

    def damage(data: bytes, before: int) -> bytes:
        at = 20_000 - before
        return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :] if 0 <= at < len(data) else data

    wire.change = damage
    answer = server.ask(PROMPTS[0])
    assert same(answer, alone[0])
    assert 0 < server.explained(answer)["cache"]["loaded_tokens"]["peers"] < 600
    wait_until(lambda: server.metric("engine_cache_tier_bad_records_total", 'tier="peers"') == 1)

    began = wire.num_bytes

    def kill(data: bytes, before: int) -> bytes:
        if before - began > 30_000 and prefill.process.poll() is None:
            prefill.kill()
        return data if before - began <= 30_000 else b""

    wire.change = kill
    answer = server.ask(PROMPTS[1])
    assert same(answer, alone[1])
    assert prefill.process.wait(10) and wire.num_bytes - began > 30_000
    wait_until(lambda: server.metric("engine_cache_tier_errors_total", 'tier="peers"') == 1)
    wait_until(lambda: [each["name"] for each in server.nodes()] == ["d"])
    assert same(server.ask(PROMPTS[2]), alone[2])

"""`engine serve --config` with several backends, as a user starts it: replicas that are killed, a
server that is killed, and files that can't be served.
"""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import httpx
import openai
import psutil
import pytest

from tests.support.servers.served import ServedEngine, serve

TWO_REPLICAS = """
[backends.fast]
kind = "native"
model = "smollm2-135m-instruct"
replicas = 2
[models.smol]
aliases = ["gpt-4o-mini"]
backends = ["fast"]
policy = "least_loaded"
"""
NUM_STREAMS = 32


@pytest.fixture(scope="module")
def routed(default_model: Path, tmp_path_factory: pytest.TempPathFactory):
    path = tmp_path_factory.mktemp("routing") / "engine.toml"
    path.write_text(TWO_REPLICAS, encoding="utf-8")
    with serve("--config", str(path)) as served:
        yield served


def routes(server: ServedEngine) -> list[dict]:
    return httpx.get(f"{server.url}/v1/admin/routes", timeout=60).json()["models"][0]["backends"]


def stream(url: str, number: int, outcomes: dict[int, str]) -> None:
    """Read a stream to its end; note how it ended."""
    body = {
        "model": "smol",
        "prompt": f"Story number {number}:",
        "max_tokens": 150,
        "ignore_eos": True,
        "stream": True,
    }
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as reply:
        text = "".join(reply.iter_text())
    last = text.strip().split("\n\n")[-1].removeprefix("data: ") if reply.is_success else text
    outcomes[number] = last


def test_both_replicas_answer_and_the_response_header_names_the_replica(
    routed: ServedEngine,
) -> None:
    client = openai.OpenAI(base_url=f"{routed.url}/v1", api_key="none")
    names = set()
    for _ in range(2):
        raw = client.chat.completions.with_raw_response.create(
            model="gpt-4o-mini", messages=[{"role": "user", "content": "Hi"}], max_tokens=4
        )
        names.add(raw.headers["x-engine-backend"])
        explained = httpx.get(f"{routed.url}/v1/admin/routes/{raw.parse().id}").json()
        assert "was chosen: 0 in flight" in explained["decisions"][0]["explanation"]
    assert names == {"fast#1", "fast#2"}


def test_a_killed_replica_returns_and_its_streams_continue(routed: ServedEngine) -> None:
    before = {each["name"]: each for each in routes(routed)}
    outcomes: dict[int, str] = {}
    threads = [
        threading.Thread(target=stream, args=(routed.url, number, outcomes))
        for number in range(NUM_STREAMS)
    ]
    for thread in threads:
        thread.start()
    routed.wait_until(lambda: all(each["in_flight"] >= 10 for each in routes(routed)))
    children = psutil.Process(routed.process.pid).children()
    victim = next(each for each in children if "engine.worker" in " ".join(each.cmdline()))
    victim.kill()
    for thread in threads:
        thread.join(60)
    assert len(outcomes) == NUM_STREAMS
    assert set(outcomes.values()) == {"[DONE]"}
    routed.wait_until(lambda: all(each["state"] == "ready" for each in routes(routed)), 60)
    after = {each["name"]: each for each in routes(routed)}
    assert sum(each["restarts"] for each in after.values()) == 1
    for _ in range(4):  # the one that was killed answers again
        reply = httpx.post(
            f"{routed.url}/v1/completions", json={"model": "smol", "prompt": "x", "max_tokens": 1}
        )
        assert reply.status_code == 200
    last = {each["name"]: each for each in routes(routed)}
    assert all(last[name]["requests"] > after[name]["requests"] for name in before)


def test_a_killed_server_leaves_no_child(routed: ServedEngine) -> None:
    """The last test of this server."""
    children = psutil.Process(routed.process.pid).children(recursive=True)
    assert len(children) >= 2
    routed.process.send_signal(signal.SIGKILL)
    routed.process.wait()
    _, alive = psutil.wait_procs(children, timeout=30)
    assert not alive


GOOD = "[backends.good]\nkind = 'native'\nmodel = 'smollm2-135m-instruct'\n"


@pytest.mark.parametrize(
    ("toml", "arguments", "words"),
    [
        (GOOD + "[backends.bad]\nkind = 'native'\nmodel = 'no-such'\n", [], "backend bad: "),
        (GOOD, ["some-model"], "leave one of the two out"),
    ],
)
def test_an_invalid_routing_config_fails_with_one_line_and_leaves_no_process(
    default_model: Path, tmp_path: Path, toml: str, arguments: list[str], words: str
) -> None:
    path = tmp_path / "engine.toml"
    path.write_text(toml, encoding="utf-8")
    mark = {"ROUTING_TEST_MARK": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-m", "engine.cli.main", "serve", *arguments]
        + ["--config", str(path), "--port", "0"],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, **mark},
    )
    assert done.returncode != 0
    errors = [line for line in done.stderr.splitlines() if line.startswith("error:")]
    assert len(errors) == 1 and words in errors[0], done.stderr
    assert "Traceback" not in done.stderr
    for process in psutil.process_iter():
        try:
            assert process.environ().get("ROUTING_TEST_MARK") != str(tmp_path)
        except psutil.Error:
            continue

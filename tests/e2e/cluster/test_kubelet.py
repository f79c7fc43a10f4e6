"""The container of the Kubernetes manifests, started and probed here as a kubelet would do it. Only
its ports differ, because others may be in use.
"""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import yaml

from tests.support.servers.live_server import free_port, wait_until

MANIFESTS = Path(__file__).parents[3] / "deploy/kubernetes/base/engine.yaml"
NUM_STREAMS = 8


@dataclass
class Pod:
    process: "subprocess.Popen[bytes]"
    spec: dict[str, Any]  # of the container
    ports: dict[str, int]  # by name

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.ports['http']}"

    def probe(self, kind: str) -> bool:
        """Whether a probe succeeds."""
        asked = self.spec[f"{kind}Probe"]
        url = f"http://127.0.0.1:{self.ports[asked['httpGet']['port']]}{asked['httpGet']['path']}"
        try:
            status = httpx.get(url, timeout=asked["timeoutSeconds"]).status_code
        except httpx.TransportError:
            return False
        return 200 <= status < 400


@contextmanager
def started() -> Iterator[Pod]:
    found = [each for each in yaml.safe_load_all(MANIFESTS.read_text()) if each]
    (workload,) = [each for each in found if each["kind"] == "Deployment"]
    (spec,) = workload["spec"]["template"]["spec"]["containers"]
    ports = {each["name"]: free_port() for each in spec["ports"]}
    renamed = {str(each["containerPort"]): str(ports[each["name"]]) for each in spec["ports"]}
    assert spec["command"][0] == "engine"
    command = [sys.executable, "-m", "engine.cli.main", *spec["command"][1:]]
    for argument in spec["args"]:
        name, _, value = argument.partition("=")
        command.append(f"{name}={renamed.get(value, value)}")
    variables = {each["name"]: renamed.get(each["value"], each["value"]) for each in spec["env"]}
    process = subprocess.Popen(command, env=os.environ | variables, stderr=subprocess.DEVNULL)
    try:
        yield Pod(process, spec, ports)
    finally:
        process.kill()
        process.wait()


def test_pod_becomes_ready_and_loses_no_request_on_termination(default_model: Path) -> None:
    with started() as pod:
        limit = pod.spec["startupProbe"]["failureThreshold"]
        wait_until(lambda: pod.probe("startup"), limit * pod.spec["startupProbe"]["periodSeconds"])
        assert pod.probe("readiness") and pod.probe("liveness")
        texts = asyncio.run(stop_under_load(pod))
        assert len(texts) == NUM_STREAMS and all(texts)
        assert pod.process.wait(60) == 0


async def stop_under_load(pod: Pod) -> list[str]:
    """The texts of requests that run while the process gets SIGTERM."""
    begun = [asyncio.Event() for _ in range(NUM_STREAMS)]
    async with httpx.AsyncClient(base_url=pod.url, timeout=60) as client:

        async def read(index: int) -> str:
            body = {
                "prompt": f"Story {index}:",
                "max_tokens": 48,
                "stream": True,
                "ignore_eos": True,
            }
            text, ended = "", False
            async with client.stream("POST", "/v1/completions", json=body) as response:
                assert response.status_code == 200
                async for line in response.aiter_lines():
                    begun[index].set()
                    if line.startswith("data: {"):
                        event = json.loads(line.removeprefix("data: "))
                        assert "error" not in event, event
                        text += event["choices"][0]["text"]
                    ended = ended or line == "data: [DONE]"
            assert ended
            return text

        tasks = [asyncio.create_task(read(index)) for index in range(NUM_STREAMS)]
        for each in begun:
            await each.wait()
        pod.process.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + 60
        while await asyncio.to_thread(pod.probe, "readiness"):
            assert time.monotonic() < deadline
        # It still lives while it drains, if it has not ended by then.
        assert await asyncio.to_thread(pod.probe, "liveness") or all(t.done() for t in tasks)
        return list(await asyncio.gather(*tasks))

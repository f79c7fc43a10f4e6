"""A real `engine serve` for figures to load: its process, its metrics, its clients' answers.

    with served_engine("--batch-size", "8") as served:
        reply = asyncio.run(ask(served, completion("Once", max_tokens=8, stream=True)))
        assert reply.is_whole, reply.problem
        served.wait_until_idle()

The clients are in `streams.py`; they check that every answer is well-formed.
"""

import math
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import psutil

from tests.support.servers.served import ServedEngine, serve

MODEL = "smollm2-135m-instruct"
IDLE_WITHIN_S = 30.0
OWN_FOLDERS = {"XDG_DATA_HOME": "data", "XDG_RUNTIME_DIR": "run", "TMPDIR": "tmp"}


@dataclass
class Served(ServedEngine):
    """A running server. Besides its caches, it writes only to `folder`. `headers` are for its own
    queries to the server, such as an administrator's key.
    """

    folder: Path = field(default_factory=Path)
    headers: dict[str, str] = field(default_factory=dict)

    @property
    def address(self) -> tuple[str, int]:
        host, _, port = self.url.removeprefix("http://").partition(":")
        return host, int(port)

    def samples(self) -> dict[str, float]:
        """The samples of /metrics now."""
        return read_samples(self.get("/metrics").text)

    def admitted(self) -> int:
        """The number of admitted requests."""
        return int(self.get("/v1/admin/status").json()["in_flight"])

    def wait_until_idle(self, seconds: float = IDLE_WITHIN_S) -> None:
        self.wait_until(self.is_idle, seconds)

    def is_idle(self) -> bool:
        """Whether no request is admitted, queued or computed, and none holds a block."""
        seen = self.samples()
        held = ("engine_sequences_running", "engine_sequences_waiting", "used_blocks")
        return self.admitted() == 0 and not any(seen[name] for name in held)

    def health(self) -> int:
        """The status of /health."""
        return self.get("/health").status_code

    def get(self, path: str) -> httpx.Response:
        return httpx.get(self.url + path, headers=self.headers, timeout=30)

    def processes(self) -> list[psutil.Process]:
        """The server, its engine, and all other child processes."""
        server = psutil.Process(self.process.pid)
        return [server, *server.children(recursive=True)]

    def rss_bytes(self) -> int:
        return sum(each.memory_info().rss for each in self.processes())


# Requests with drafts have fewer rows, and a row that is not finite is repeated without its draft.
# So a fault that is planned for one row needs requests without drafts.
WITHOUT_DRAFTS = {"LLM_ENGINE_PERFORMANCE__SPECULATION": "off"}


@contextmanager
def served_engine(
    *arguments: str,
    model: str | None = MODEL,
    env: dict[str, str] | None = None,
    module: str = "engine.cli.main",
) -> Iterator[Served]:
    """Run `engine serve MODEL ARGUMENTS` on a free port, with its own storage folder.

    It is ended with SIGTERM if it still runs. `module` is run instead of `engine`.
    """
    with tempfile.TemporaryDirectory(prefix="scoreboard-") as name:
        folder = Path(name)
        own: dict[str, str] = {}
        for variable, part in OWN_FOLDERS.items():
            own[variable] = str(folder / part)
            os.mkdir(folder / part, mode=0o700)
        words = arguments if model is None else (model, *arguments)
        with serve(*words, env=own | (env or {}), module=module) as started:
            yield Served(started.process, started.url, started.log, folder)


def read_samples(text: str) -> dict[str, float]:
    """Parse a metrics page: each metric summed over its labels, and blocks by state."""
    found: dict[str, float] = {}
    for line in text.splitlines():
        if line.startswith("#"):
            continue
        name, value = line.rsplit(" ", 1)
        plain, _, labels = name.partition("{")
        if plain == "engine_kv_blocks":
            state = labels.partition('state="')[2].partition('"')[0]
            plain = f"{state}_blocks"
        found[plain] = found.get(plain, 0.0) + float(value)
    return found


def percentile(values: list[float], share: float) -> float:
    """Nearest-rank percentile; NaN for an empty list, which no limit accepts."""
    ordered = sorted(values)
    if not ordered:
        return float("nan")
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def seconds_until(condition, within_s: float, poll_s: float = 0.01) -> float:
    """Seconds until the condition held; infinite if it did not within `within_s`."""
    began = time.monotonic()
    while time.monotonic() - began < within_s:
        if condition():
            return time.monotonic() - began
        time.sleep(poll_s)
    return float("inf")

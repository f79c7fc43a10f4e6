"""Runs llama.cpp's own tools on the same file and text."""

import os
import re
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import aiohttp

from benchmarks.accuracy.text import TEXT, WINDOW, WINDOWS
from benchmarks.client import new_session
from benchmarks.process import ServerProcess, ServerSpec
from benchmarks.run import free_port

_ESTIMATE = re.compile(r"Final estimate: PPL = ([0-9.]+)")
_VERSION = re.compile(r"version: (.+)")
_SERVER_TIMEOUT = 3600.0


class LlamaError(Exception):
    """A llama.cpp tool failed; the message has its output."""


@dataclass(frozen=True, slots=True)
class Llama:
    """Runs the tools in `binaries`: llama-perplexity, llama-server and their libraries."""

    binaries: Path
    model: Path
    threads: int

    @property
    def present(self) -> bool:
        return all((self.binaries / name).exists() for name in ("llama-perplexity", "llama-server"))

    def version(self) -> str:
        found = _VERSION.search(self._run("llama-perplexity", "--version"))
        return found[1] if found else "unknown"

    def perplexity(self) -> float:
        settings = f"-c {WINDOW} --chunks {WINDOWS} -t {self.threads}".split()
        said = self._run("llama-perplexity", "-m", str(self.model), "-f", str(TEXT), *settings)
        found = _ESTIMATE.search(said)
        if found is None:
            raise LlamaError(f"llama-perplexity gave no estimate: {said[-400:]}")
        return float(found[1])

    async def continuations(
        self, text: str, text_ids: list[int], prompts: Sequence[list[int]], counts: Sequence[int]
    ) -> list[list[int]]:
        """`counts[i]` greedy tokens after each prompt. First checks that both tokenizers agree."""
        with tempfile.TemporaryDirectory() as folder:
            server = ServerProcess(self._server(), Path(folder) / "llama-server.log")
            try:
                running = await server.start()
                async with new_session(_SERVER_TIMEOUT) as session:
                    url = running.spec.base_url
                    theirs = await _post(session, url + "/tokenize", {"content": text})
                    if theirs["tokens"] != text_ids:
                        raise LlamaError("llama.cpp cuts the text into other tokens")
                    return [
                        await _continuation(session, url, prompt, count)
                        for prompt, count in zip(prompts, counts, strict=True)
                    ]
            finally:
                server.stop()

    def _server(self) -> ServerSpec:
        port = free_port()
        settings = f"--host 127.0.0.1 --port {port} -t {self.threads} -c 2048 -np 1".split()
        return ServerSpec(
            name="llama.cpp",
            command=(str(self.binaries / "llama-server"), "-m", str(self.model), *settings),
            port=port,
            ready_path="/health",
            env=self._environment(),
        )

    def _run(self, name: str, *arguments: str) -> str:
        done = subprocess.run(
            [str(self.binaries / name), *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={**os.environ, **self._environment()},
            text=True,
        )
        if done.returncode:
            raise LlamaError(f"{name} ended with {done.returncode}: {done.stdout[-400:]}")
        return done.stdout

    def _environment(self) -> dict[str, str]:
        # Spinning OpenMP threads are very slow if other processes share the cores.
        return {"LD_LIBRARY_PATH": str(self.binaries), "OMP_WAIT_POLICY": "PASSIVE"}


async def _continuation(
    session: aiohttp.ClientSession, url: str, prompt: list[int], count: int
) -> list[int]:
    asked = {
        "prompt": prompt,
        "n_predict": count,
        "temperature": 0,
        "cache_prompt": False,
        "return_tokens": True,
        "ignore_eos": True,
    }
    tokens: list[int] = (await _post(session, url + "/completion", asked))["tokens"]
    return tokens


async def _post(session: aiohttp.ClientSession, url: str, body: dict[str, object]) -> dict:
    # A connection for each request: the server closes an idle one after a few seconds, which may
    # pass between two requests if this process is held up.
    async with session.post(url, json=body, headers={"Connection": "close"}) as reply:
        reply.raise_for_status()
        found: dict = await reply.json()
        return found

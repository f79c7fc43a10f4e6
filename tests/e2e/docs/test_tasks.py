"""The pages of `docs/tasks`, as a reader follows them: in order, in an empty folder.

Each shell command and each Python snippet runs. A block `text` shows what the block before it
prints; `...` stands for anything. A comment `<!-- not run: REASON -->` before a block says why the
test leaves it out.
"""

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.conftest import DEFAULT_MODEL
from tests.support.servers.served import ServedEngine, serve

ROOT = Path(__file__).parents[3]
PAGES = sorted((ROOT / "docs/tasks").glob("*.md"))
BLOCK = re.compile(r"^(?:<!-- not run: ([^\n]+) -->\n)?```(\w*)\n(.*?)^```$", re.S | re.M)
# What a page says that its server's address is.
ADDRESS = "http://127.0.0.1:8080"
# What a reader writes into a file of another program.
FILES = {"nginx", "toml"}
TIMEOUT_S = 280


@dataclass(frozen=True)
class Block:
    kind: str
    code: str
    reason: str | None
    """Why it is not run."""


def blocks(text: str) -> Iterator[Block]:
    for reason, kind, code in BLOCK.findall(text):
        yield Block(kind, code, reason or None)


class Reader:
    """Does what a page says. Its servers run until the page ends."""

    def __init__(self, folder: Path, shared: ServedEngine, stack: ExitStack) -> None:
        self.folder = folder
        self.shared = shared
        self.stack = stack
        self.url = shared.url
        self.printed = ""

    def do(self, block: Block) -> None:
        if block.kind == "text":
            self.compare(block.code)
        elif block.kind == "bash" and re.search(r"^(\w+=\S* )*engine serve\b", block.code):
            self.serve(block.code)
        elif block.kind == "bash":
            self.run("bash", "-euo", "pipefail", "-c", block.code)
        elif block.kind == "python":
            self.run(sys.executable, "-c", block.code)
        else:
            assert block.kind in FILES, f"what is a block {block.kind!r}?"

    def serve(self, command: str) -> None:
        """One server of the default model is shared by all pages."""
        words = shlex.split(command)
        start = words.index("engine")
        arguments = words[start + 2 :]
        if words == ["engine", "serve", DEFAULT_MODEL]:
            self.url = self.shared.url
            return
        env = dict(each.split("=", 1) for each in words[:start])
        self.url = self.stack.enter_context(serve(*arguments, env=env)).url

    def run(self, *command: str) -> None:
        here = [each.replace(ADDRESS, self.url) for each in command]
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        done = subprocess.run(
            here,
            cwd=self.folder,
            env={**os.environ, "PATH": path},
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
        )
        assert done.returncode == 0, f"{command[-1]}\n{done.stdout}\n{done.stderr}"
        self.printed = done.stdout

    def compare(self, expected: str) -> None:
        for line in expected.splitlines():
            pattern = ".*".join(map(re.escape, line.split("...")))
            assert re.search(pattern, self.printed), f"{line}\nis not in\n{self.printed}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_works_as_written(
    page: Path, server: ServedEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with ExitStack() as stack:
        reader = Reader(tmp_path, server, stack)
        for block in blocks(page.read_text(encoding="utf-8")):
            if block.reason is None:
                reader.do(block)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_block_of_a_page_is_seen(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert 2 * len(list(blocks(text))) == len(re.findall(r"^ *```", text, re.MULTILINE))
    assert text.count("<!--") == sum(each.reason is not None for each in blocks(text))


def test_a_page_that_is_wrong_is_noticed(tmp_path: Path) -> None:
    def follow(text: str) -> None:
        reader = Reader(tmp_path, ServedEngine(None, "http://127.0.0.1:1"), ExitStack())
        for block in blocks(text):
            reader.do(block)

    follow("```bash\necho one two\n```\n\n```text\none...two\n```\n")
    follow(f"```bash\necho {ADDRESS}/v1\n```\n\n```text\nhttp://127.0.0.1:1/v1\n```\n")
    for wrong in ("```bash\nfalse | cat\n```\n", "```python\n1 / 0\n```\n", "```ruby\n1\n```\n"):
        with pytest.raises(AssertionError):
            follow(wrong)
    with pytest.raises(AssertionError):
        follow("```bash\necho one\n```\n\n```text\ntwo\n```\n")

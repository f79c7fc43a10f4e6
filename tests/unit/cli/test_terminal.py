"""Commands in a real terminal: conversations, their commands, removal, help and completion."""

import json
import shutil
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from engine.core.store.model_store import ModelStore, StoredModel, StoredModelFile
from tests.support.servers.terminal import Terminal, engine_command

pytestmark = pytest.mark.seconds  # each test starts processes


class Server(ThreadingHTTPServer):
    """Answers a chat with what it was asked, or with `answer`."""

    asked: list[dict[str, Any]]
    answer: str = ""
    hangs = False


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        found = {"data": [{"id": "first-model"}, {"id": "second-model"}]}
        if self.path == "/v1/admin/models":
            row = {"id": "first-model", "state": "loaded", "backend": "native", "default": True}
            found = {"models": [row | {"in_flight": 2, "memory_mb": 300, "idle_s": 1.0}]}
        self._send(json.dumps(found).encode())

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.server.asked.append(body)
        if self.path.endswith("/unload"):
            self._send(b'{"was_loaded": true}')
            return
        last = body["messages"][-1]["content"]
        words = (self.server.answer or f"{len(body['messages'])} <{last}>").split(" ")
        pieces = [word + " " for word in words[:-1]] + words[-1:]
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.end_headers()
        for piece in pieces:
            self._event({"choices": [{"delta": {"content": piece}}]})
        while self.server.hangs:
            time.sleep(0.01)
        usage = {"prompt_tokens": 5, "completion_tokens": 3}
        self._event({"choices": [], "usage": usage})
        self.wfile.write(b"data: [DONE]\n\n")

    def _event(self, chunk: Any) -> None:
        self.wfile.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")
        self.wfile.flush()

    def _send(self, content: bytes) -> None:
        self.send_response(200)
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server(("127.0.0.1", 0), Handler)
    made.asked = []
    threading.Thread(target=made.serve_forever, args=(0.01,), daemon=True).start()
    yield made
    made.hangs = False
    made.shutdown()
    made.server_close()


@pytest.fixture
def env(server: Server, tmp_path: Path) -> dict[str, str]:
    return {"LLM_ENGINE_PORT": str(server.server_port), "XDG_CACHE_HOME": str(tmp_path)}


def conversation(server: Server, env: dict[str, str]) -> Terminal:
    url = f"http://127.0.0.1:{server.server_port}"
    return Terminal(engine_command("chat", "--url", url), env=env)


def test_chat_commands_work_in_a_terminal(
    server: Server, env: dict[str, str], tmp_path: Path
) -> None:
    saved = tmp_path / "saved.json"
    with conversation(server, env) as terminal:
        terminal.wait_for("first-model is ready")
        for line, shown in [
            ("hello", "1 <hello>"),
            ("/sett temperature 0", "did you mean /set?"),
            ("//sett", "3 </sett>"),
            ("/set temperature 0.25", "temperature = 0.25"),
            ("/set temperature hot", "error:"),
            ("/set wrong 1", "unknown sampling parameter 'wrong'"),
            ("/system Be brief.", "system message: Be brief."),
            ("/retry", "4 </sett>"),
            (f"/save {saved}", "4 messages are in"),
            ("/undo", "2 messages are left."),
            ("again", "4 <again>"),
            ("/clear", "forgotten"),
            ("once more", "2 <once more>"),
            (f"/load {saved}", "4 messages are loaded."),
            ("after loading", "6 <after loading>"),
            ("/model second-model", "second-model answers"),
            ("/help", "/retry"),
            ('"""two', "...>"),
            ('lines"""', "<two\nlines>"),
            ("one \\", "...>"),
            ("two", "<one\ntwo>"),
        ]:
            if line not in ("two", 'lines"""'):
                terminal.wait_for("you>")
            terminal.say(line)
            terminal.wait_for(shown)
        terminal.wait_for("you>")
        terminal.say("/bye")
        assert terminal.wait_for_end() == 0
    assert all("sett temp" not in str(body["messages"]) for body in server.asked)
    assert [body["model"] for body in server.asked[-2:]] == ["second-model"] * 2
    assert "temperature" not in server.asked[0], "the server has a default of its own"
    assert server.asked[2]["temperature"] == 0.25
    assert json.loads(saved.read_text())["messages"][0]["content"] == "Be brief."


def test_ctrl_c_keeps_the_input_draft_and_the_partial_answer(
    server: Server, env: dict[str, str]
) -> None:
    with conversation(server, env) as terminal:
        terminal.wait_for("you>")
        terminal.type("half a thou")
        terminal.wait_for("half a thou")
        terminal.interrupt("you> half a thou")
        server.hangs = True
        terminal.say("ght")
        terminal.wait_for("1 <half a")
        terminal.type("\x03")
        terminal.wait_for("cut short")
        server.hangs = False
        terminal.wait_for("you>")
        terminal.say("go on")
        terminal.wait_for("3 <go on>")
        terminal.wait_for("you>")
        terminal.interrupt("/bye or Ctrl-D")
        terminal.wait_for("you>")
        terminal.type("\x04")
        assert terminal.wait_for_end() == 0
    question, answer, last = (each["content"] for each in server.asked[-1]["messages"])
    assert (question, last) == ("half a thought", "go on")
    # The last word may have been on its way.
    assert answer.startswith("1 <half a") and "1 <half a thought>".startswith(answer)


def test_markdown_answers_are_styled_and_wrapped_between_words(
    server: Server, env: dict[str, str]
) -> None:
    server.answer = (
        "# Title\nSome **bold words** and `code` that are so many that the line must be"
        " wrapped somewhere between them\n- an item\n```python\nx = '**'\n```\nend"
    )
    command = engine_command("run", "first-model", "tell", "me")
    with Terminal(command, env=env, columns=40) as terminal:
        assert terminal.wait_for_end() == 0
    assert server.asked[0]["messages"] == [{"role": "user", "content": "tell me"}]
    lines = [line.rstrip() for line in terminal.text.splitlines()]
    assert max(map(len, lines)) <= 40
    assert {"Title", "• an item", "```python", "x = '**'", "end"} <= set(lines)
    wrapped = " ".join(lines[lines.index("Title") + 1 : lines.index("• an item")])
    assert wrapped == server.answer.split("\n")[1].replace("**", "").replace("`", "")
    assert "\x1b[1mbold words" in terminal.raw.replace("\x1b[0m\x1b[1m", "\x1b[1m")


def test_run_ps_and_stop_use_a_running_local_server(server: Server, env: dict[str, str]) -> None:
    with Terminal(engine_command("ps"), env=env) as terminal:
        assert terminal.wait_for_end() == 0
        assert "first-model" in terminal.text and "300 MB" in terminal.text
    with Terminal(engine_command("stop"), env=env) as terminal:
        assert terminal.wait_for_end() == 0 and "first-model is unloaded." in terminal.text
    assert server.asked == [{"id": "first-model"}]
    with Terminal(engine_command("run", "second-model"), env=env) as terminal:
        terminal.wait_for("second-model is ready (http://127.0.0.1:")
        terminal.wait_for("you>")
        terminal.type("\x04")
        assert terminal.wait_for_end() == 0


def test_bench_measures_any_server(server: Server, env: dict[str, str]) -> None:
    url = f"http://127.0.0.1:{server.server_port}/v1"
    with Terminal(engine_command("bench", url, "--requests", "5", "--json"), env=env) as terminal:
        assert terminal.wait_for_end() == 0
    report = json.loads(terminal.text[terminal.text.index("{") :])
    assert (report["model"], report["requests"], report["failed"]) == ("first-model", 5, 0)
    assert (report["prompt_tokens"], report["output_tokens"]) == (25, 15), "as the usage says"
    assert len(server.asked) == 5 and all(body["stream"] for body in server.asked)
    assert report["time_to_first_token_ms"]["p50"] > 0


def test_rm_shows_sizes_and_asks_for_confirmation(env: dict[str, str], tmp_path: Path) -> None:
    store = ModelStore(tmp_path / "engine" / "models")
    file = store.staging("small") / "small-q8.gguf"
    file.write_bytes(b"GGUF" + bytes(996))
    record = StoredModel(
        "small", "hf:o/r/f.gguf", "2026-01-01", (StoredModelFile(file.name, 1000, "0"),), file.name
    )
    path = store.publish(file.parent, record)
    copy = tmp_path / "engine" / "packed" / "small-q8-0123.packed"
    copy.parent.mkdir()
    copy.write_bytes(bytes(2000))
    for answer, is_gone in (("n", False), ("y", True)):
        with Terminal(engine_command("rm", "small"), env=env) as terminal:
            terminal.wait_for("small: 1.0 kB, packed copies 2.0 kB")
            terminal.wait_for("[y/N]")
            terminal.say(answer)
            assert terminal.wait_for_end() == (0 if is_gone else 2)
        assert (not path.exists(), not copy.exists()) == (is_gone, is_gone)
    with Terminal(engine_command("rm", "small", "--yes"), env=env) as terminal:
        assert terminal.wait_for_end() == 2 and "no model called 'small'" in terminal.text


def test_help_is_grouped_and_coloured(env: dict[str, str]) -> None:
    with Terminal(engine_command("serve", "-h"), env=env) as terminal:
        assert terminal.wait_for_end() == 0
    assert "\x1b[1mMemory and speed\x1b[0m:" in terminal.raw
    assert "auto, native, tinygrad" in " ".join(terminal.text.split())
    with Terminal(engine_command(), env=env) as terminal:
        terminal.wait_for_end()
    assert "\x1b[1mA running server\x1b[0m:" in terminal.raw


# How each shell starts without its user's files, and how it reads the script. The last word is put
# together by the shell, so that it does not appear while it is typed.
SHELLS = {
    "bash": (["--norc", "-i"], 'eval "$(engine completion bash)"; printf "is-%s" set'),
    "zsh": (
        ["-f", "-i"],
        'autoload -U compinit; compinit -u; eval "$(engine completion zsh)"; printf "is-%s" set',
    ),
    "fish": (["--no-config", "-i"], 'engine completion fish | source; printf "is-%s" set'),
}


@pytest.mark.parametrize("shell", SHELLS)
def test_shell_completion_offers_commands_flags_and_models(
    shell: str, env: dict[str, str], tmp_path: Path
) -> None:
    program = shutil.which(shell)
    if program is None:
        pytest.skip(f"{shell} is not installed")
    script = tmp_path / "engine"
    script.write_text(f'#!/bin/sh\nexec {sys.executable} -m engine.cli.main "$@"\n')
    script.chmod(0o755)
    env |= {"PATH": f"{tmp_path}:/usr/bin:/bin", "HOME": str(tmp_path), "PS1": "$ "}
    arguments, setup = SHELLS[shell]
    with Terminal([program, *arguments], env=env) as terminal:
        terminal.say(setup)
        terminal.wait_for("is-set")
        terminal.type("engine sea\t")
        terminal.wait_for("search")
        terminal.type(" \x15engine serve --max-mod\t")
        terminal.wait_for("--max-model-len")
        terminal.type(" \x15engine run smollm2-135m\t")
        terminal.wait_for("smollm2-135m-instruct")

"""The stand-in's process: options, faults at the start, and an HTTP server of the standard library
(it starts in a tenth of a second).
"""

import json
import os
import signal
import socket
import socketserver
import subprocess
import sys
import tempfile
import threading
import time
from argparse import Namespace
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from tests.support.fakes.stand_in_engine.faults import Faults, note_pid, read_faults
from tests.support.fakes.tiny_openai.checks import MODEL, parse
from tests.support.fakes.tiny_openai.model import CONTEXT_LENGTH, Mistake, token_id
from tests.support.fakes.tiny_openai.openai_api import Chat, Completion

LEFT_FILES = "left-"  # in the folder for temporary files, as both engines leave some


class Engine:
    """What the two engines differ in, and what is asked of either."""

    def __init__(self, kind: str, options: Namespace) -> None:
        self.kind = kind
        self.model_id = options.served_model_name
        self.model_path = options.model
        self.max_model_len = options.max_model_len or CONTEXT_LENGTH
        self._seen: set[str] = set()

    def get(self, path: str) -> Any:
        """Raises `KeyError` where there is nothing."""
        card = {"object": "model", "created": 1_700_000_000, "owned_by": self.kind}
        card |= {"id": self.model_id, "root": self.model_path, "max_model_len": self.max_model_len}
        if read_faults().lies:
            card["id"] = "another-model"
        found: dict[str, Any] = {"/v1/models": {"object": "list", "data": [card]}, "/health": None}
        if self.kind == "vllm":
            found |= {"/version": {"version": "0.0.0+stand.in"}, "/ping": None}
        else:
            info = {"model_path": self.model_path, "is_generation": True}
            server = {"served_model_name": self.model_id, "version": "0.0.0+stand.in"}
            found |= {"/get_model_info": info, "/model_info": info, "/get_server_info": server}
            found |= {"/health_generate": None}
        return found[path]

    def post(self, path: str, body: dict[str, Any]) -> Any:
        """JSON, or a list of events. Raises `KeyError` or `Mistake`."""
        if path == "/tokenize":
            return self._tokenize(body)
        if path == "/generate" and self.kind == "sglang":
            return self._generate(body)
        work = {
            "/v1/chat/completions": lambda asked: Chat(asked, self._seen),
            "/v1/completions": Completion,
        }[path]
        if body.get("model") != self.model_id:
            raise Mistake(f"The model `{body.get('model')}` does not exist.", "model", 404)
        made = work(body | {"model": MODEL})
        made.head["model"] = self.model_id
        return made.chunks() if body.get("stream") else made.whole()

    def refusal(self, mistake: Mistake) -> dict[str, Any]:
        """vLLM wraps it and numbers it, SGLang sends it flat."""
        error = {"message": mistake.message, "type": "BadRequestError", "param": mistake.param}
        error["code"] = mistake.status
        return {"error": error} if self.kind == "vllm" else {"object": "error"} | error

    def _tokenize(self, body: dict[str, Any]) -> dict[str, Any]:
        text = body.get("prompt") or json.dumps(body.get("messages"))
        ids = [token_id(word) for word in text.split()]
        return {"tokens": ids, "count": len(ids), "max_model_len": self.max_model_len}

    def _generate(self, body: dict[str, Any]) -> dict[str, Any]:
        made = Completion({"model": MODEL, "prompt": body["text"]}).whole()
        reason = {"type": made["choices"][0]["finish_reason"]}
        counts = {"prompt_tokens": made["usage"]["prompt_tokens"], "finish_reason": reason}
        return {"text": made["choices"][0]["text"], "meta_info": counts}


def handler_of(engine: Engine) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self._answer(lambda: engine.get(self.path))

        def do_POST(self) -> None:
            raw = self.rfile.read(int(self.headers.get("content-length", 0)))
            self._answer(lambda: engine.post(self.path, parse(raw)))

        def _answer(self, work: Callable[[], Any]) -> None:
            faults = read_faults()
            if faults.hangs:
                threading.Event().wait()
            if faults.is_never_ready:
                return self._send(503, {})
            try:
                made = work()
            except KeyError:
                return self._send(404, {"detail": "Not Found"})
            except Mistake as mistake:
                return self._send(mistake.status, engine.refusal(mistake))
            return self._stream(made, faults) if isinstance(made, list) else self._send(200, made)

        def _send(self, status: int, body: Any) -> None:
            content = b"" if body is None else json.dumps(body).encode()
            self.send_response(status)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def _stream(self, events: list[Any], faults: Faults) -> None:
            self.send_response(200)
            self.send_header("content-type", "text/event-stream; charset=utf-8")
            self.send_header("transfer-encoding", "chunked")
            self.end_headers()
            for number, event in enumerate(events):
                if number == faults.crash_after:
                    os._exit(3)
                if number == faults.stall_after:
                    threading.Event().wait()
                data = event if isinstance(event, str) else json.dumps(event)
                content = f"data: {data}\n\n".encode()
                self.wfile.write(b"%x\r\n%s\r\n" % (len(content), content))
                self.wfile.flush()
                time.sleep(faults.token_s)
            self.wfile.write(b"0\r\n\r\n")

        def log_message(self, *_: Any) -> None:
            pass

        def address_string(self) -> str:
            return "client"

    return Handler


class UnixServer(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    daemon_threads = True


class TcpServer(ThreadingHTTPServer):
    daemon_threads = True
    allow_reuse_address = True


def begin_badly(faults: Faults) -> None:
    if faults.said:
        print(faults.said, file=sys.stderr, flush=True)
    for number in range(faults.num_noise_lines):
        print(f"INFO noise {number}", flush=True)
    if faults.ignores_sigterm:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if faults.grandchild:
        child = subprocess.Popen(
            ["sleep", "1000"], start_new_session=faults.grandchild == "session"
        )
        note_pid(child.pid)
    if faults.exit_at_start is not None:
        print("Traceback (most recent call last):\nValueError: no such layer", file=sys.stderr)
        sys.exit(faults.exit_at_start)


def run(kind: str, options: Namespace) -> None:
    note_pid(os.getpid())
    tempfile.mkstemp(prefix=LEFT_FILES)
    faults = read_faults()
    begin_badly(faults)
    print(f"INFO 01-01 00:00:00 [loader.py:1] Loading {options.model}", flush=True)
    if options.model.startswith("/") and not os.path.exists(options.model):
        sys.exit(f"OSError: {options.model} does not exist")
    time.sleep(faults.load_s)
    handler = handler_of(Engine(kind, options))
    if options.uds:
        server: socketserver.BaseServer = UnixServer(options.uds, handler)
    else:
        TcpServer.address_family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
        server = TcpServer((options.host, options.port), handler)
    signal_ends(faults)
    server.serve_forever(poll_interval=0.01)


def signal_ends(faults: Faults) -> None:
    if not faults.ignores_sigterm:
        signal.signal(signal.SIGTERM, lambda *_: os._exit(0))

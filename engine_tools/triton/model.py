"""A model of Triton's Python backend that passes requests to an engine server.

`engine triton export` copies this file into a model repository. It runs in Triton's process for
this model and imports nothing but the standard library and numpy, which the Python backend needs.
The address of the server and its model's name are parameters in config.pbtxt. An API key is read
from the environment variable LLM_ENGINE_API_KEY.
"""

import http.client
import json
import os
import threading
import urllib.parse
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import triton_python_backend_utils as pb_utils

TIMEOUT_S = 600.0
# Max requests at a time. Further ones wait in Triton.
NUM_THREADS = 256
LISTS = ("text_input", "stop")
OUTPUTS = {
    "text_output": np.object_,
    "finish_reason": np.object_,
    "num_input_tokens": np.uint32,
    "num_output_tokens": np.uint32,
}
ALL_OUTPUTS = {f"return_{name}": True for name in OUTPUTS if name != "text_output"}


class ServerError(Exception):
    """The engine server refused a request, or failed."""


def check_numpy():
    """Refuse numpy 2. Python backends that were built for numpy 1 read the wrong elements of
    integer tensors under numpy 2, without an error.
    """
    if int(np.__version__.split(".")[0]) >= 2:
        raise pb_utils.TritonModelException(
            f"numpy {np.__version__} is installed, and this model needs numpy < 2: Triton's Python"
            " backend reads integer tensors wrongly under numpy 2. Install it in the environment"
            " of the model: pip install 'numpy<2'"
        )


class TritonTarget:
    """The engine server. Each thread keeps a connection."""

    def __init__(self, url, model):
        parts = urllib.parse.urlsplit(url)
        is_tls = parts.scheme == "https"
        self._kind = http.client.HTTPSConnection if is_tls else http.client.HTTPConnection
        self._address = parts.netloc
        self._path = f"{parts.path.rstrip('/')}/v2/models/{urllib.parse.quote(model)}"
        self._headers = {"content-type": "application/json"}
        if key := os.environ.get("LLM_ENGINE_API_KEY"):
            self._headers["authorization"] = f"Bearer {key}"
        self._local = threading.local()

    def answer(self, body):
        """The whole answer to a request."""
        return json.loads(self._post("generate", body).read())

    def stream(self, body):
        """The answer to a request, piece by piece."""
        response = self._post("generate_stream", body)
        try:
            while line := response.readline():
                if line.startswith(b"data: "):
                    event = json.loads(line[len(b"data: ") :])
                    if "error" in event:
                        raise ServerError(event["error"])
                    yield event
        finally:
            if not response.isclosed():
                self._drop()  # the answer is not read to its end, so the server ends the request

    def _post(self, operation, body):
        raw = json.dumps(body).encode()
        try:
            response = self._request(operation, raw)
        except (ConnectionError, http.client.HTTPException):
            # The server closed the connection while it was idle.
            self._drop()
            response = self._request(operation, raw)
        if response.status != 200:
            told = json.loads(response.read() or b"{}")
            raise ServerError(told.get("error") or f"The server answered {response.status}.")
        return response

    def _request(self, operation, raw):
        connection = getattr(self._local, "connection", None)
        if connection is None:
            connection = self._local.connection = self._kind(self._address, timeout=TIMEOUT_S)
        connection.request("POST", f"{self._path}/{operation}", raw, self._headers)
        return connection.getresponse()

    def _drop(self):
        connection = getattr(self._local, "connection", None)
        if connection is not None:
            connection.close()
        self._local.connection = None


class TritonPythonModel:
    def initialize(self, args):
        check_numpy()
        config = json.loads(args["model_config"])
        self._inputs = [each["name"] for each in config["input"]]
        settings = {name: each["string_value"] for name, each in config["parameters"].items()}
        self._server = TritonTarget(settings["url"], settings["model"])
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="engine")

    def execute(self, requests):
        for request in requests:
            self._threads.submit(self._run, request, request.get_response_sender())

    def finalize(self):
        self._threads.shutdown(cancel_futures=True)

    def _run(self, request, sender):
        try:
            self._answer(request, sender)
        except ServerError as error:
            _fail(sender, str(error))
        except Exception as error:
            _fail(sender, f"The engine server can't be reached: {error!r}")

    def _answer(self, request, sender):
        body, shape = self._body(request)
        if not body.pop("stream", False):
            sender.send(_response(self._server.answer(body), shape), _FINAL)
            return
        body["text_input"] = body["text_input"][0] if len(body["text_input"]) == 1 else None
        for event in self._server.stream(body):
            if request.is_cancelled():
                break
            sender.send(_response(event, (1,)))
        sender.send(flags=_FINAL)

    def _body(self, request):
        """The request as a body of `generate`, and the shape of its texts."""
        body: dict[str, object] = dict(ALL_OUTPUTS)
        told = json.loads(request.parameters() or "{}")
        body.update((name, value) for name, value in told.items() if not name.startswith("triton"))
        shape = (1,)
        for name in self._inputs:
            tensor = pb_utils.get_input_tensor_by_name(request, name)
            if tensor is None:
                continue
            values = tensor.as_numpy()
            if name == "text_input":
                shape = values.shape
            flat = [
                each.decode() if isinstance(each, bytes) else each
                for each in values.ravel().tolist()
            ]
            body[name] = flat if name in LISTS else flat[0]
        return body, shape


def _text(value):
    return value.decode() if isinstance(value, bytes) else value


_FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL


def _response(answer, shape):
    tensors = []
    for name, kind in OUTPUTS.items():
        values = answer.get(name)
        values = values if isinstance(values, list) else [values]
        if kind is np.object_:
            values = [(each or "").encode() for each in values]
        array = np.array(values, dtype=kind).reshape(shape)
        tensors.append(pb_utils.Tensor(name, array))
    return pb_utils.InferenceResponse(tensors)


def _fail(sender, message):
    response = pb_utils.InferenceResponse([], pb_utils.TritonError(message))
    sender.send(response, _FINAL)

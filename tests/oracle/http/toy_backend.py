"""The real backend of the frontend over the engines of a history. Nothing runs in a thread, and
time passes only in steps, so histories are reproducible.
"""

from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from unittest import mock

from engine.adapters import served
from engine.adapters.served import ServedAdapter, ServedAdapters
from engine.backends.custom.base_custom import CustomBackend
from engine.core.interfaces.request import (
    AdapterRef,
    Deltas,
    FromEngine,
    GenerateRequest,
    ToEngine,
)
from engine.frontend import prompts
from engine.frontend.engine_link import EngineLink
from engine.ipc.child_process import RestartPolicy
from engine.ipc.options import EngineOptions
from engine.runtime.model_runner import RunnerSpec
from engine.runtime.requests.images import ImageStore
from tests.oracle.clock import Clock
from tests.oracle.engines import Engine, GivenGrammars, Parts
from tests.oracle.histories import Shape
from tests.oracle.http.toy_model import (
    MAX_SEQ_LEN,
    VOCAB,
    TextToyRunner,
    compile_now,
    toy_text,
)
from tests.oracle.server import MAX_REVIVALS, DrivenClient
from tests.oracle.toy_model import ToyEncoder, read_adapter
from tests.support.files.lora_files import InlinePlaces

ADAPTERS = ("red", "blue")
# The engine of a request alone
ALONE: Shape = {
    **{"block_size": 4, "depth": 0, "num_blocks": 512, "max_slots": 4, "budget": 256},
    **{"sharing": False, "speculates": False, "num_adapters": 2, "grammar_delay": 0},
}


@contextmanager
def without_threads_and_files() -> Iterator[None]:
    """An adapter of the toy model is only a path, and no prompt is too long for this thread."""
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(prompts, "is_long", return_value=False))
        for name in ("check_is_adapter", "validate", "tenant_of"):
            stack.enter_context(mock.patch.object(served, name, return_value=None))
        yield


class InlineExecutor(ThreadPoolExecutor):
    """Does all work at once, in the caller's thread."""

    def submit(self, work: Any, /, *args: Any, **kwargs: Any) -> "Future[Any]":
        done: Future[Any] = Future()
        try:
            done.set_result(work(*args, **kwargs))
        except BaseException as error:
            done.set_exception(error)
        return done


class _NoChecker:
    """The grammars of histories are known to compile."""

    async def check(self, grammar: str, param: str) -> None:
        pass

    async def close(self) -> None:
        pass


def new_engine(shape: Shape, clock: Clock) -> Engine:
    spec = RunnerSpec(
        shape["block_size"],
        shape["num_blocks"] + 1,
        8,
        MAX_SEQ_LEN,
        VOCAB,
        shape["depth"],
    )
    runner = TextToyRunner(spec, clock)
    parts = Parts(
        runner,
        GivenGrammars(compile_now, shape["grammar_delay"]),
        num_blocks=shape["num_blocks"],
        speculates=shape["speculates"],
        images=ImageStore(ToyEncoder(), embed_bytes=8),
        adapters=partial(InlinePlaces, runner, read_adapter, shape["num_adapters"], 1),
    )
    return Engine(parts, shape)


@dataclass
class Seen:
    """What an engine was asked and what it told, by the id of the request."""

    prompts: dict[str, tuple[int, ...]] = field(default_factory=dict)
    tokens: dict[tuple[str, int], list[int]] = field(default_factory=dict)  # by id and choice

    def take(self, message: FromEngine) -> None:
        for delta in message.deltas if isinstance(message, Deltas) else ():
            self.tokens.setdefault((delta.request_id, delta.choice), []).extend(delta.token_ids)


class WatchedClient(DrivenClient):
    """Notes the messages of its engine."""

    def __init__(self, new_engine: Any, on_message: Any, on_exit: Any, seen: Seen) -> None:
        def noted(message: FromEngine) -> None:
            seen.take(message)
            on_message(message)

        super().__init__(new_engine, noted, on_exit)
        self._seen = seen

    def send(self, message: ToEngine) -> None:
        if isinstance(message, GenerateRequest):
            self._seen.prompts[message.request_id] = message.prompt
        super().send(message)


class ToyTextBackend(CustomBackend):
    """Serves the toy model with text. A history steps its engines."""

    framework = "native"  # which reads images and takes taps, as the toy model does

    def __init__(self, shape: Shape, clock: Clock) -> None:
        options = EngineOptions(model_path="toy", framework="toy", block_size=shape["block_size"])
        super().__init__("toy", options=options)
        self.clients: list[DrivenClient] = []
        self.engines: list[Engine] = []
        self.seen = Seen()

        def make_engine() -> Engine:
            self.engines.append(new_engine(shape, clock))
            return self.engines[-1]

        def make_client(on_message: Any, on_exit: Any) -> DrivenClient:
            self.clients.append(WatchedClient(make_engine, on_message, on_exit, self.seen))
            return self.clients[-1]

        policy = RestartPolicy(max_deaths=MAX_REVIVALS, clock=clock)
        self._link = EngineLink(make_client, policy, max_revivals=MAX_REVIVALS, move=self._move)
        self._adapters = ServedAdapters(self._link)
        self._preparer._encoders = InlineExecutor()
        self._preparer._checker = _NoChecker()  # type: ignore[assignment]

    async def start(self) -> str:
        self._files = "toy"
        await self._link.start()
        self._text = toy_text()
        refs = {name: AdapterRef(name, f"/toy/{name}", False) for name in ADAPTERS}
        self.serve({name: ServedAdapter(ref, 1, 8, 0, None) for name, ref in refs.items()})
        return "toy://"

    @property
    def adapters(self) -> Mapping[str, ServedAdapter]:
        return self._adapters.served

    def serve(self, adapters: Mapping[str, ServedAdapter]) -> None:
        self._adapters.served = dict(adapters)

    @property
    def client(self) -> DrivenClient:
        return self.clients[-1]

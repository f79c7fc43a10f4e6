"""The adapters of an engine process.

A thread reads and packs them. Packed adapters are kept in host memory, up to a size. A few of them
have a place on the device, which is a number that the rows of a step refer to. The place of an
adapter that no sequence uses may be given to another one. In both, the least recently used goes.
"""

import logging
import os
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import msgspec
import numpy as np

from engine.core.errors import EngineError, InferenceError, InvalidRequestError
from engine.core.interfaces.request import AdapterFacts, AdapterRef, Control, ControlReply
from engine.core.sandbox.checkpoint_validation import identity_of
from engine.runtime.model_runner import AdapterRunner, BatchInputs
from engine.runtime.sequence import Extension, Row, Sequence

log = logging.getLogger(__name__)

# The nice value of the thread that loads. On a busy core it gets a third of the time, a step the
# rest.
_NICE = 3


class ReadAdapter(Protocol):
    """An adapter that was read from its files."""

    @property
    def key(self) -> str: ...

    @property
    def max_rank(self) -> int: ...

    @property
    def changes_head(self) -> bool: ...


class PackedAdapter(Protocol):
    """An adapter in the form that a runner needs."""

    @property
    def num_bytes(self) -> int: ...


@dataclass(frozen=True, slots=True)
class _Loaded:
    facts: AdapterFacts
    packed: PackedAdapter


class AdapterSlots(Extension):
    """Gives places to the adapters of requests. Only the engine loop's thread calls it. `read`
    opens the files of an adapter.
    """

    def __init__(
        self,
        runner: AdapterRunner,
        read: Callable[[Path], ReadAdapter],
        num_places: int,
        max_host_bytes: int,
    ) -> None:
        self._runner = runner
        self._read = read
        self.used: dict[Sequence, int] = {}  # the places of sequences that have not ended
        self._max_host_bytes = max_host_bytes
        self._thread: ThreadPoolExecutor | None = None  # made for the first adapter
        self._loading: dict[str, Future[_Loaded]] = {}  # by path
        # Of each path: the identity of its files when they were read, and the adapter's key.
        self._known: dict[str, tuple[bytes, str]] = {}
        self._asked: list[tuple[int, str, Future[_Loaded]]] = []
        self._host: OrderedDict[str, _Loaded] = OrderedDict()  # by key, oldest first
        # The key of the adapter in each place, the least recently used first.
        self._placed: OrderedDict[int, str] = OrderedDict.fromkeys(range(1, num_places + 1), "")
        self._reserved: int | None = None  # the place that an earlier request waits for

    @property
    def is_loading(self) -> bool:
        """Whether an adapter is being loaded, or somebody waits to hear of one."""
        return bool(self._asked) or any(not job.done() for job in self._loading.values())

    def begin_pass(self) -> None:
        """Begin to ask for the places of all waiting requests, the oldest request first."""
        self._reserved = None

    def place(self, ref: AdapterRef) -> int | None:
        """The place of an adapter, now in use. None: the request must wait. Raises `EngineError` if
        the adapter can't be loaded.
        """
        for number, key in self._placed.items():
            if key == ref.key:
                if number == self._reserved:
                    return None
                self._placed.move_to_end(number)
                return number
        loaded = self._loaded(ref)
        if loaded is None:
            return None
        used = set(self.used.values())
        free = next((each for each in self._placed if each not in used), None)
        if free is None:
            # Requests for the adapter in the oldest place wait, too, so that it becomes free.
            self._reserved = next(iter(self._placed)) if self._reserved is None else self._reserved
            return None
        self._placed[free] = ""  # if the runner fails, the place has no whole adapter
        self._runner.set_adapter(free, loaded.packed)
        self._placed[free] = ref.key
        self._placed.move_to_end(free)
        return free

    def use(self, seq: Sequence, place: int) -> None:
        """A new sequence uses an adapter, until it ends."""
        self.used[seq] = place

    def ended(self, seq: Sequence) -> None:
        self.used.pop(seq, None)

    def plan(self, rows: list[Row], budget: int) -> None:
        """Rows with the same adapter are computed together."""
        if self.used:
            rows.sort(key=lambda row: self.used.get(row.seq, 0))

    def add_inputs(self, inputs: BatchInputs, rows: tuple[Row, ...]) -> BatchInputs:
        places = np.array([self.used.get(row.seq, 0) for row in rows], np.int32)
        return replace(inputs, adapter_ids=places)

    def control(self, message: Control) -> None:
        """Begin to load the adapter at a path. `reply` answers later."""
        self._asked.append((message.control_id, message.value, self._load(message.value)))

    def reply(self, send: Callable[[ControlReply], None]) -> None:
        """Answer those `control` messages whose adapters are loaded, or can't be."""
        done = [each for each in self._asked if each[2].done()]
        self._asked = [each for each in self._asked if not each[2].done()]
        for control_id, path, job in done:
            try:
                facts = self._keep(path, job).facts
                text = msgspec.json.encode(facts).decode()
                send(ControlReply(control_id, True, text))
            except EngineError as error:
                send(ControlReply(control_id, False, error.message))

    def _loaded(self, ref: AdapterRef) -> _Loaded | None:
        if (found := self._host.get(ref.key)) is not None:
            self._host.move_to_end(ref.key)
            return found
        job = self._load(ref.path)
        if not job.done():
            return None
        loaded = self._keep(ref.path, job)
        if loaded.facts.key != ref.key:
            raise InvalidRequestError(
                "The files of this adapter were changed after it was loaded; load it again."
            )
        return loaded

    def _load(self, path: str) -> "Future[_Loaded]":
        if path not in self._loading:
            self._keep_left()
            if self._thread is None:
                self._thread = ThreadPoolExecutor(1, "adapters", _stand_back)
            self._loading[path] = self._thread.submit(self._read_and_pack, path)
        return self._loading[path]

    def _keep_left(self) -> None:
        """Count adapters whose requests ended before they were loaded."""
        for path, job in list(self._loading.items()):
            if job.done():
                with suppress(EngineError):
                    self._keep(path, job)

    def _read_and_pack(self, path: str) -> _Loaded:
        before = identity_of(Path(path))
        adapter = self._read(Path(path))
        packed = self._runner.pack_adapter(adapter)
        key = self._key(adapter, path, before)
        facts = AdapterFacts(key, adapter.max_rank, packed.num_bytes, adapter.changes_head)
        return _Loaded(facts, packed)

    def _key(self, adapter: ReadAdapter, path: str, before: bytes | None) -> str:
        """The key of an adapter that was just read. It takes as long as reading, so it is computed
        only if the files are others than those of the last time.
        """
        if before is None or before != identity_of(Path(path)):
            return adapter.key
        if path not in self._known or self._known[path][0] != before:
            self._known[path] = (before, adapter.key)
        return self._known[path][1]

    def _keep(self, path: str, job: "Future[_Loaded]") -> _Loaded:
        """Keep the adapter that a finished load has read in host memory, and return it."""
        self._loading.pop(path, None)
        try:
            loaded = job.result()
        except EngineError:
            raise
        except Exception as error:
            log.exception("the adapter at %s could not be loaded", path)
            raise InferenceError("The engine could not load this adapter; see its log.") from error
        self._host[loaded.facts.key] = loaded
        self._host.move_to_end(loaded.facts.key)
        while len(self._host) > 1 and self._host_bytes > self._max_host_bytes:
            self._host.popitem(last=False)
        return loaded

    @property
    def _host_bytes(self) -> int:
        return sum(each.facts.num_bytes for each in self._host.values())


def _stand_back() -> None:
    """Lower the priority of this thread. On other systems than Linux, only processes have one."""
    if sys.platform == "linux":
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)

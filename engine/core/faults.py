"""Fault injection for tests: at named points in the code, a test can raise an error, sleep or end
the process.

`PLACES` maps each point to functions and methods. While a plan of faults is armed, the functions
and methods of its points are replaced by wrappers. A wrapper first carries out the faults that are
due, then calls the original. The wrapped modules contain no code for this. A test arms a plan in
its own process with `planned`. For another process, an environment variable contains the plan, and
the process reads it once when it starts. This variable is refused unless a second variable confirms
that the server may be broken on purpose.
"""

import errno
import functools
import inspect
import os
import sys
import threading
import time
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.machinery import ModuleSpec
from operator import attrgetter
from types import ModuleType, SimpleNamespace
from typing import Any, Literal

from engine.core.errors import ConfigError

PLAN_VARIABLE = "ENGINE_FAULTS"
GUARD_VARIABLE = "ENGINE_FAULTS_GUARD"
GUARD = "this server is here to be broken"
EXIT_STATUS = 70

Action = Literal["raise", "memory", "disk", "sleep", "exit", "mark"]
Subject = Container[Any] | None
Strike = Callable[[Subject], bool]


@dataclass(frozen=True)
class FaultTarget:
    """A function or method where faults can be injected. `where` is "module:function" or
    "module:Class.method". If a module imports a function by name, `where` has to name that module,
    because the module keeps its own reference to the function.

    `subject` is the argument that `Fault.within` is searched in, for example "request.prompt" for
    an attribute of the argument `request`. If `mark` is set, it is called instead: it applies
    faults to parts of the arguments, such as single rows of a batch.
    """

    where: str
    subject: str | None = None
    mark: Callable[[Strike, dict[str, Any]], None] | None = None

    @property
    def module(self) -> str:
        return self.where.partition(":")[0]

    def find(self, module: ModuleType) -> tuple[Any, str]:
        """The object that has the function (a module or class), and the function's name."""
        *owners, name = self.where.partition(":")[2].split(".")
        return functools.reduce(getattr, owners, module), name

    def strike(self, strike: Strike, arguments: dict[str, Any]) -> None:
        if self.mark is not None:
            self.mark(strike, arguments)
        elif self.subject is None:
            strike(None)
        else:
            strike(attrgetter(self.subject)(SimpleNamespace(**arguments)))


def _mark_rows(strike: Strike, arguments: dict[str, Any]) -> None:
    """Mark the rows for which a fault is due as not finite, as if the model had computed NaN logits
    for them.
    """
    output = arguments["output"]
    finite = output.finite.copy()
    for index, row in enumerate(arguments["batch"].rows):
        if finite[index] and row.seq.finish_reason is None:
            finite[index] = not strike(row.seq.tokens)
    arguments["output"] = replace(output, finite=finite)


_RUNTIME = "engine.runtime"
_SERVERS = "engine.servers"

# Point -> the functions and methods that belong to it. The points are in the order in which a
# request reaches them.
PLACES = {
    "validate": (FaultTarget(f"{_SERVERS}.serving.services:parse_body"),),
    "template": (FaultTarget("engine.core.text.chat_template:ChatTemplate.render"),),
    "tokenize": (
        FaultTarget("engine.core.text.tokenizer:Tokenizer.encode_prompt", "text"),
        FaultTarget("engine.core.text.tokenizer:Tokenizer.encode_rendered"),
    ),
    "check_grammar": (FaultTarget("engine.core.grammar.checker:GrammarChecker.check", "grammar"),),
    "submit": (FaultTarget("engine.frontend.engine_link:EngineLink.submit", "request.prompt"),),
    "load": (FaultTarget("engine.worker.main:open_model"),),
    "intake": (
        FaultTarget(f"{_RUNTIME}.requests.admission:RequestAdmission.submit", "request.prompt"),
    ),
    "compile": (FaultTarget(f"{_RUNTIME}.requests.grammar:Grammars._new_matcher", "grammar"),),
    "schedule": (FaultTarget(f"{_RUNTIME}.scheduler:Scheduler.schedule"),),
    "allocate": (
        FaultTarget(f"{_RUNTIME}.kv_cache:KVCache.admit", "seq.tokens"),
        FaultTarget(f"{_RUNTIME}.kv_cache:KVCache.extend", "seq.tokens"),
    ),
    "forward": (
        FaultTarget(f"{_RUNTIME}.loop:StepRunner._run_forward", "inputs.token_ids"),
        FaultTarget("engine.worker.encoder_loop:EncoderLoop._encode"),
    ),
    "sample": (FaultTarget(f"{_RUNTIME}.loop:StepRunner._run_sample"),),
    "wait": (FaultTarget(f"{_RUNTIME}.loop:StepRunner.wait"),),
    "update": (
        FaultTarget(f"{_RUNTIME}.scheduler:Scheduler._confirm_prompt", "seq.tokens"),
        FaultTarget(f"{_RUNTIME}.scheduler:Scheduler._take", "seq.tokens"),
    ),
    "nonfinite": (FaultTarget(f"{_RUNTIME}.scheduler:Scheduler.update", mark=_mark_rows),),
    "publish": (FaultTarget(f"{_RUNTIME}.radix_cache:RadixCache.insert", "tokens"),),
    "detokenize": (FaultTarget("engine.core.text.tokenizer:Detokenizer.push"),),
    "parse": (FaultTarget("engine.core.parsing.parser:OutputParser.push"),),
    "format": (
        FaultTarget(f"{_SERVERS}.openai.format:ChatStream.chunk"),
        FaultTarget(f"{_SERVERS}.openai.format:CompletionStream.chunk"),
        FaultTarget(f"{_SERVERS}.generate:GenerateStream.chunk"),
        FaultTarget(f"{_SERVERS}.responses.format:ResponseStream.chunk"),
        FaultTarget(f"{_SERVERS}.anthropic.format:MessageStream.chunk"),
    ),
    "database": (FaultTarget(f"{_SERVERS}.storage.database:Database._transact"),),
    "upload": (FaultTarget(f"{_SERVERS}.files.draft:Draft._write_buffer"),),
    "keep_file": (FaultTarget("engine.core.sandbox.private_files:_open_part"),),
}
POINTS = tuple(PLACES)


class FaultError(RuntimeError):
    """The exception of action "raise". It stands for any error that the code does not expect."""


@dataclass(frozen=True)
class Fault:
    """A fault at one point. Each call of the point's functions is a hit. The fault happens at
    `times` hits in a row, of which the first has the number `at`, counted from 1. If `within` is
    set, only hits whose subject contains `within` are counted.
    """

    point: str
    action: Action = "raise"
    at: int = 1
    times: int = 1
    within: str | int | None = None
    seconds: float = 0.0  # duration of action "sleep"


class _Plan:
    """The armed faults, with the number of hits of each. Thread-safe."""

    def __init__(self, faults: Sequence[Fault]) -> None:
        for fault in faults:
            if fault.point not in POINTS:
                raise ConfigError(f"{PLAN_VARIABLE}: there is no point {fault.point!r}")
        self.points = {fault.point for fault in faults}
        self.is_over = False
        self._counts = [(fault, [0]) for fault in faults]
        self._lock = threading.Lock()
        self.num_strikes = 0

    def strike(self, point: str, subject: Subject) -> bool:
        """Count a hit of the point, and carry out the faults that are due. Returns whether a fault
        was due. For action "mark", the result is the only effect.
        """
        if self.is_over:
            return False  # a caller may have kept a wrapped method after the end of the plan
        due: list[Fault] = []
        with self._lock:
            for fault, count in self._counts:
                if fault.point != point:
                    continue
                if fault.within is not None and (subject is None or fault.within not in subject):
                    continue
                count[0] += 1
                if fault.at <= count[0] < fault.at + fault.times:
                    due.append(fault)
            self.num_strikes += len(due)
        for fault in due:
            _act(fault)
        return bool(due)


class _Wrapping:
    """Installs and removes the wrappers of a plan. Modules that are already loaded are wrapped at
    once. Other modules are wrapped when they are imported: for this, the object is the first finder
    in `sys.meta_path`.
    """

    def __init__(self, plan: _Plan) -> None:
        self._plan = plan
        self._originals: dict[tuple[Any, str], Callable[..., Any]] = {}
        self._places: dict[str, list[tuple[str, FaultTarget]]] = {}
        for point in plan.points:
            for place in PLACES[point]:
                self._places.setdefault(place.module, []).append((point, place))

    def begin(self) -> None:
        sys.meta_path.insert(0, self)
        main = sys.modules["__main__"]
        loaded = {name: sys.modules[name] for name in self._places if name in sys.modules}
        for name, module in loaded.items():
            self._wrap(name, module)
        if main.__spec__ is not None and main.__spec__.name in self._places:
            self._wrap(main.__spec__.name, main)  # run with `python -m`, it is called __main__

    def end(self) -> None:
        sys.meta_path.remove(self)
        for (owner, name), original in self._originals.items():
            setattr(owner, name, original)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in self._places:
            return None
        others = sys.meta_path[sys.meta_path.index(self) + 1 :]
        found = (finder.find_spec(fullname, path, target) for finder in others)
        spec = next(filter(None, found), None)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def execute_and_wrap(module: ModuleType) -> None:
            execute(module)
            self._wrap(fullname, module)

        spec.loader.exec_module = execute_and_wrap  # type: ignore[method-assign]
        return spec

    def _wrap(self, name: str, module: ModuleType) -> None:
        for point, place in self._places[name]:
            key = owner, attribute = place.find(module)
            if key not in self._originals:
                original = self._originals[key] = getattr(owner, attribute)
                setattr(owner, attribute, self._wrapped(point, place, original))

    def _wrapped(
        self, point: str, place: FaultTarget, original: Callable[..., Any]
    ) -> Callable[..., Any]:
        signature = inspect.signature(original)
        strike = functools.partial(self._plan.strike, point)

        def struck(*args: Any, **kwargs: Any) -> inspect.BoundArguments:
            call = signature.bind(*args, **kwargs)
            place.strike(strike, call.arguments)
            return call

        @functools.wraps(original)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            call = struck(*args, **kwargs)
            return original(*call.args, **call.kwargs)

        @functools.wraps(original)
        async def async_wrapper(*args: Any, **kwargs: Any) -> Any:
            call = struck(*args, **kwargs)
            return await original(*call.args, **call.kwargs)

        return async_wrapper if inspect.iscoroutinefunction(original) else wrapper


@contextmanager
def planned(*faults: Fault) -> Iterator[_Plan]:
    """Arm the faults in this process until the block ends."""
    plan = _Plan(faults)
    wrapping = _Wrapping(plan)
    wrapping.begin()
    try:
        yield plan
    finally:
        plan.is_over = True
        wrapping.end()


def arm(environ: Mapping[str, str] = os.environ) -> None:
    """Arm the faults that the environment variable `ENGINE_FAULTS` contains, until this process
    ends. Does nothing if the variable is not set. A process calls this once, when it starts.
    """
    text = environ.get(PLAN_VARIABLE)
    if text is None:
        return
    if environ.get(GUARD_VARIABLE) != GUARD:
        raise ConfigError(
            f"{PLAN_VARIABLE} makes a server fail on purpose and is for its tests alone;"
            " unset it to start"
        )
    import msgspec

    try:
        plan = _Plan(msgspec.json.decode(text, type=list[Fault]))
    except msgspec.DecodeError as error:
        raise ConfigError(f"{PLAN_VARIABLE}: {error}") from error
    _Wrapping(plan).begin()


def environment(*faults: Fault) -> dict[str, str]:
    """Environment variables that arm these faults in a child process."""
    import msgspec

    return {PLAN_VARIABLE: msgspec.json.encode(faults).decode(), GUARD_VARIABLE: GUARD}


def _act(fault: Fault) -> None:
    if fault.action == "raise":
        raise FaultError(f"a fault was planned at {fault.point}")
    if fault.action == "memory":
        raise MemoryError(f"a fault was planned at {fault.point}")
    if fault.action == "disk":
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    if fault.action == "sleep":
        time.sleep(fault.seconds)
    if fault.action == "exit":
        os._exit(EXIT_STATUS)

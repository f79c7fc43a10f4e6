"""A model file is read by a limited process first: what it does to a parser ends there
(SEC-40, SEC-41, SEC-43, FLT-18; T4).
"""

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.backends.custom.engine_settings import VALIDATOR, engine_options
from engine.core.config_schema import Settings
from engine.core.errors import ModelError, ModelFormatError
from engine.core.interfaces.request import FromEngine, Ready
from engine.core.sandbox import checkpoint_validation as validation
from engine.core.sandbox.checkpoint_validation import (
    Reading,
    Spawned,
    StartReading,
    Validation,
    validate,
)
from engine.ipc.engine_process import EngineProcess
from engine.ipc.transport import ConnectionClosedError, SocketChannel
from tests.support.fakes.quick_engine import begun_file


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(validation, "_marks_directory", lambda: tmp_path / "examined")
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF" + bytes(100))
    return path


@pytest.fixture
def process() -> Iterator[EngineProcess]:
    process = EngineProcess()
    yield process
    process.discard()


@pytest.fixture(params=["a process of its own", "a fork of the engine's process"])
def start(request: pytest.FixtureRequest, process: EngineProcess) -> StartReading:
    return Spawned if request.param == "a process of its own" else process.validate


@pytest.mark.parametrize(
    ("deed", "words"),
    [
        ("fill_memory", "more memory"),
        ("spin", "memory and time"),
        ("crash", "memory and time"),
        ("connect", "socket."),
        ("run_program", "subprocess.Popen"),
        ("write_file", "open for writing"),
        ("open_many", "Too many open files"),
    ],
)
def test_a_parser_that_fills_memory_spins_or_crashes_ends_only_the_sandbox(
    model: Path, start: StartReading, deed: str, words: str
) -> None:
    with pytest.raises(ModelFormatError, match=words):
        validate(
            model, f"tests.support.fakes.hostile_parsers:{deed}", start, max_seconds=60, max_cpu_s=1
        )
    assert not (model.parent / "canary").exists()
    assert not (model.parent / "examined").exists()


def test_a_validation_that_does_not_end_is_killed_at_its_time_limit(
    model: Path, start: StartReading
) -> None:
    with pytest.raises(ModelFormatError, match="within 1 s"):
        validate(model, "tests.support.fakes.hostile_parsers:sleep", start, max_seconds=1)


def test_the_validators_error_message_reaches_the_user(model: Path, start: StartReading) -> None:
    with pytest.raises(ModelError, match="there is no model in it") as raised:
        validate(model, "tests.support.fakes.hostile_parsers:refuse", start)
    assert type(raised.value) is ModelError
    with pytest.raises(ModelFormatError, match="version"):
        validate(model, VALIDATOR, start)


def test_the_validators_result_is_returned_unless_it_is_too_large(
    model: Path, start: StartReading
) -> None:
    assert validate(model, "tests.support.fakes.hostile_parsers:find", start) == b"found" * 100_000
    assert validate(model, "tests.support.fakes.hostile_parsers:find_too_much", start) == b""


def test_the_forked_validator_inherits_no_open_files(model: Path, process: EngineProcess) -> None:
    validate(model, "tests.support.fakes.hostile_parsers:hold_three_files", process.validate)


@pytest.mark.parametrize("reads_it", [False, True])
def test_an_engine_that_is_stopped_validates_nothing(
    model: Path, process: EngineProcess, reads_it: bool
) -> None:
    if not reads_it:
        process.process.send_signal(signal.SIGSTOP)
    validation = Validation(model, "tests.support.fakes.hostile_parsers:sleep", process.validate)
    if reads_it:
        time.sleep(1)
    process.process.kill()
    process.process.wait()
    with pytest.raises(ConnectionClosedError):
        validation.finish()
    assert not (model.parent / "examined").exists()


@pytest.fixture
def quick() -> Iterator[EngineProcess]:
    process = EngineProcess("tests.support.fakes.quick_engine")
    yield process
    process.discard()


def test_the_engine_starts_loading_once_the_weights_have_passed_validation(
    model: Path, quick: EngineProcess
) -> None:
    """And its first message comes behind the end of the validation, and is not lost."""
    begun = Validation(model, "tests.support.fakes.hostile_parsers:pass_and_wait", quick.validate)
    quick.begin(engine_options(Settings(), "native", model))
    assert begun.finish() == b"found"
    channel: SocketChannel[FromEngine] = SocketChannel(quick.socket, FromEngine)
    assert [type(message) for message in channel.poll(30)] == [Ready]


@pytest.mark.parametrize("deed", ["refuse", "crash", "fill_memory"])
def test_the_engine_never_loads_a_refused_file(
    model: Path, quick: EngineProcess, deed: str
) -> None:
    begun = Validation(model, f"tests.support.fakes.hostile_parsers:{deed}", quick.validate)
    quick.begin(engine_options(Settings(), "native", model))
    with pytest.raises(ModelError):
        begun.finish()
    assert quick.process.wait(30) == 0
    assert not begun_file(model).exists()


def test_a_tokenizer_refused_after_loading_began_still_ends_the_start(
    model: Path, quick: EngineProcess
) -> None:
    begun = Validation(model, "tests.support.fakes.hostile_parsers:refuse_late", quick.validate)
    quick.begin(engine_options(Settings(), "native", model))
    with pytest.raises(ModelError, match="its text is bad"):
        begun.finish()
    assert not (model.parent / "examined").exists()


def test_a_file_is_validated_once_until_it_changes(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = []

    def start(validator: str, path: Path, max_cpu_s: int) -> Reading:
        runs.append(validator)
        return Spawned("tests.support.fakes.hostile_parsers:nothing", path, max_cpu_s)

    monkeypatch.setattr(validation, "_SETTLED_SECONDS", 0.0)
    for _ in range(3):
        validate(model, "tests.support.fakes.hostile_parsers:nothing", start)
    assert len(runs) == 1
    model.write_bytes(b"GGUF" + bytes(101))
    validate(model, "tests.support.fakes.hostile_parsers:nothing", start)
    assert len(runs) == 2
    validate(model, "tests.support.fakes.hostile_parsers:refuse", start)
    assert len(runs) == 3
    (mark, _) = (model.parent / "examined").iterdir()
    mark.chmod(0o666)
    os.utime(mark)
    validate(model, "tests.support.fakes.hostile_parsers:nothing", start)
    validate(model, "tests.support.fakes.hostile_parsers:refuse", start)
    assert len(runs) == 4, "a mark that others may have made counts for nothing"


def test_validation_runs_concurrently_with_its_caller(model: Path) -> None:
    begun = Validation(model, "tests.support.fakes.hostile_parsers:refuse")
    assert begun.is_under_way
    with pytest.raises(ModelError, match="there is no model in it"):
        begun.finish()


def test_the_default_model_passes_validation(
    default_model: Path, model: Path, start: StartReading
) -> None:
    validate(default_model, VALIDATOR, start)

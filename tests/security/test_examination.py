"""A model file is read by a limited process first: what it does to a parser ends there
(SEC-40, SEC-41, SEC-43, FLT-18; T4).
"""

import os
import subprocess
from pathlib import Path

import pytest

from engine.backends.custom.engine_settings import EXAMINER
from engine.core.errors import ModelError, ModelFormatError
from engine.core.utils import examination
from engine.core.utils.examination import Examination, examine


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(examination, "_marks_directory", lambda: tmp_path / "examined")
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF" + bytes(100))
    return path


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
def test_a_parser_that_was_led_astray_harms_nobody(model: Path, deed: str, words: str) -> None:
    with pytest.raises(ModelFormatError, match=words):
        examine(model, f"tests.examiners:{deed}", max_seconds=60, max_cpu_s=1)
    assert not (model.parent / "canary").exists()
    assert not (model.parent / "examined").exists()


def test_one_that_never_ends_is_ended(model: Path) -> None:
    with pytest.raises(ModelFormatError, match="within 1 s"):
        examine(model, "tests.examiners:sleep", max_seconds=1)


def test_what_the_examiner_says_is_what_the_user_reads(model: Path) -> None:
    with pytest.raises(ModelError, match="there is no model in it") as raised:
        examine(model, "tests.examiners:refuse")
    assert type(raised.value) is ModelError
    with pytest.raises(ModelFormatError, match="version"):
        examine(model, EXAMINER)


def test_a_file_is_examined_once_until_it_changes(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = []

    def start(*asked: object) -> "subprocess.Popen[bytes]":
        runs.append(asked)
        return subprocess.Popen(["true"], stdout=subprocess.PIPE)

    monkeypatch.setattr(examination, "_start", start)
    monkeypatch.setattr(examination, "_SETTLED_SECONDS", 0.0)
    for _ in range(3):
        examine(model, "tests.examiners:nothing")
    assert len(runs) == 1
    model.write_bytes(b"GGUF" + bytes(101))
    examine(model, "tests.examiners:nothing")
    assert len(runs) == 2
    examine(model, "tests.examiners:refuse")
    assert len(runs) == 3
    (mark, _) = (model.parent / "examined").iterdir()
    mark.chmod(0o666)
    os.utime(mark)
    examine(model, "tests.examiners:nothing")
    examine(model, "tests.examiners:refuse")
    assert len(runs) == 4, "a mark that others may have made counts for nothing"


def test_an_examination_goes_on_beside_its_caller(model: Path) -> None:
    begun = Examination(model, "tests.examiners:refuse")
    assert begun.is_under_way
    with pytest.raises(ModelError, match="there is no model in it"):
        begun.finish()


def test_the_default_model_passes(default_model: Path, model: Path) -> None:
    examine(default_model, EXAMINER)

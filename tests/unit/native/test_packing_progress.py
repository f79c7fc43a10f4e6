"""Progress of packing: a log where nobody watches, a bar where somebody does and it takes long."""

import io
import logging
import sys

import pytest

from engine.native.weights import progress
from engine.native.weights.progress import PackingProgress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_without_a_terminal_packing_progress_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        PackingProgress("model.gguf")(32 << 20, 96 << 20)
    assert "packing model.gguf: 32 of 96 MiB" in caplog.text
    assert {each.levelname for each in caplog.records} == {"DEBUG"}


@pytest.mark.parametrize(("patience_s", "shown"), [(60.0, False), (0.0, True)])
def test_a_progress_bar_is_shown_only_for_long_packing(
    monkeypatch: pytest.MonkeyPatch, patience_s: float, shown: bool
) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr(progress, "PATIENCE_S", patience_s)
    tell = PackingProgress("model.gguf")
    for done in (32, 64, 96):
        tell(done << 20, 96 << 20)
    assert ("model.gguf" in terminal.getvalue()) == shown

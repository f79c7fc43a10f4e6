"""Other engines older than what is known to be sound are warned of."""

import logging
import os
import sys
from pathlib import Path

import pytest

from engine.backends.external.served_config import MINIMUM, warn_if_old
from engine.backends.sglang import SGLangBackend
from engine.backends.vllm import VLLMBackend


@pytest.mark.parametrize(
    ("version", "is_old"),
    [
        ("0.22.9", True),
        ("0.9", True),
        ("0.23", True),
        ("0.23.1rc2", False),
        ("0.23.1", False),
        ("0.100.0+cu130", False),
        ("1", False),
        ("unknown", True),
    ],
)
async def test_an_outdated_vllm_is_warned_about(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, version: str, is_old: bool
) -> None:
    metadata = tmp_path / "vllm-0.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")
    with caplog.at_level(logging.WARNING):
        await warn_if_old("vllm", sys.executable, os.environ | {"PYTHONPATH": str(tmp_path)})
    assert (MINIMUM["vllm"] in caplog.text) == is_old


async def test_a_missing_engine_or_interpreter_gives_no_version_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    await warn_if_old("sglang", sys.executable, os.environ)
    await warn_if_old("vllm", "/nowhere/python", os.environ)
    assert not caplog.text


def test_every_external_engine_has_a_minimum_version() -> None:
    assert {VLLMBackend.module, SGLangBackend.module} == set(MINIMUM)

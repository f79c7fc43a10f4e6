"""The measurement that `engine doctor` shows: quick, and in the range of real machines."""

import platform
import sys
import time
from pathlib import Path

import pytest

from engine.backends.custom.frameworks.native.machine import measure


def test_speeds_are_plausible(native):
    start = time.process_time()
    speed = measure(native, 2)
    assert time.process_time() - start < 10  # of both threads; well below 2 s
    isa = native.instruction_sets()[-1]
    assert (speed.instruction_sets[-1], speed.threads) == (isa, 2)
    assert 1e8 < speed.read_bytes_per_s < 1e12
    assert 1e9 < speed.int8_ops_per_s < 1e14
    assert (speed.bf16_ops_per_s is not None) == native.has_bf16(isa)


@pytest.mark.skipif(
    sys.platform != "linux" or platform.machine() != "aarch64", reason="for ARM processors"
)
def test_neon_is_used_where_the_cpu_has_its_instructions(native):
    words = set(Path("/proc/cpuinfo").read_text(encoding="utf-8").split())
    has_neon = {"asimddp", "asimdhp"} <= words
    assert native.instruction_sets() == ["generic", *(["neon"] if has_neon else [])]

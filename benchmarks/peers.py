"""The servers that a comparison can start. A peer is one function and one entry in `PEERS`.

A builder prepares whatever its server needs (a converted checkpoint, say) and says how to start it,
or raises `Unavailable` with the line that tells how to make it available.
"""

import importlib.util
import subprocess
import sys
import venv
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from benchmarks.process import ServerSpec
from engine.core.utils.model_store import store_directory

TRANSFORMERS_PACKAGES = ("transformers[serving]>=5.3,<6", "gguf", "accelerate", "torch")
_TRANSFORMERS_MODULES = ("transformers", "accelerate", "gguf", "uvicorn", "fastapi", "openai")
_CONVERTER = Path(__file__).with_name("hf_checkpoint.py")


@dataclass(frozen=True, slots=True)
class Setup:
    """What every builder may need."""

    model: Path  # the GGUF that all servers run
    cache: Path  # for converted checkpoints and virtual environments
    threads: int
    port: int


class Unavailable(Exception):
    """This peer cannot run here; the message says what to do about it."""


def ours(setup: Setup, serve_args: tuple[str, ...] = ()) -> ServerSpec:
    command = (sys.executable, "-m", "engine.cli.main", "serve", str(setup.model))
    address = ("--host", "127.0.0.1", "--port", str(setup.port))
    return ServerSpec(
        name="engine",
        command=(*command, *address, *serve_args),
        port=setup.port,
        ready_path="/readyz",
        extra_body={"ignore_eos": True},
        note=" ".join(serve_args),
    )


def transformers_serve(setup: Setup) -> ServerSpec:
    """Hugging Face's own server with continuous batching, in bf16."""
    python = _transformers_python(setup.cache)
    checkpoint = setup.cache / "checkpoints" / f"{setup.model.stem}-bf16-no-eos"
    if not checkpoint.exists():
        checkpoint.parent.mkdir(parents=True, exist_ok=True)
        print(f"converting {setup.model.name} to {checkpoint}", file=sys.stderr)
        converting = [str(python), str(_CONVERTER), str(setup.model), str(checkpoint)]
        subprocess.run(converting, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    settings = "--device cpu --dtype bfloat16 --log-level error --continuous-batching"
    # Without a bound the cache takes more than 13 GB; this one holds 32 sequences of 1,024 tokens.
    cache = "--cb-block-size 32 --cb-num-blocks 1024 --cb-max-batch-tokens 2048"
    address = ("--host", "127.0.0.1", "--port", str(setup.port))
    server = (str(python.with_name("transformers")), "serve", str(checkpoint), *address)
    return ServerSpec(
        name="transformers",
        command=(*server, *settings.split(), *cache.split()),
        port=setup.port,
        ready_path="/health",
        model=str(checkpoint),
        env={"OMP_NUM_THREADS": str(setup.threads), "HF_HUB_OFFLINE": "1"},
        note="bf16 weights, continuous batching",
    )


PEERS: dict[str, Callable[[Setup], ServerSpec]] = {"transformers": transformers_serve}


def peers_cache() -> Path:
    return store_directory().parent / "peers"


def install(name: str, cache: Path) -> None:
    """Make the peer's own virtual environment, apart from the engine's."""
    folder = cache / name
    packages = {"transformers": TRANSFORMERS_PACKAGES}[name]
    venv.create(folder, with_pip=True)
    subprocess.run([str(folder / "bin" / "pip"), "install", *packages], check=True)


def _transformers_python(cache: Path) -> Path:
    """The peer's own environment if there is one, else this one if it can serve."""
    own = cache / "transformers" / "bin" / "python"
    if own.exists():
        return own
    here = Path(sys.executable)
    importable = all(importlib.util.find_spec(module) for module in _TRANSFORMERS_MODULES)
    if importable and here.with_name("transformers").exists():
        return here
    raise Unavailable(
        "transformers is left out: add --install-peers, or run "
        f"`{here} -m pip install {' '.join(repr(each) for each in TRANSFORMERS_PACKAGES)}`"
    )

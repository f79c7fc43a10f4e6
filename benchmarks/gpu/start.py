"""Time from process start to first token, with an empty and with a filled kernel cache.

Run as a module, it is the process that is timed: it loads a model with random weights, answers one
request and prints its times as JSON.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from typing import Any

from benchmarks.gpu.workloads import SHAPES, workloads

CACHES = ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "TORCH_EXTENSIONS_DIR", "CUDA_CACHE_PATH")
TIMEOUT_S = 300


def measure_starts(model: str, options: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Two starts that share a kernel cache folder, which is empty for the first."""
    with tempfile.TemporaryDirectory(prefix="engine-kernels-") as folder:
        caches = {name: os.path.join(folder, name.lower()) for name in CACHES}
        env = {**os.environ, **caches, "XDG_CACHE_HOME": folder}
        return {name: _start(model, options, env) for name in ("cold", "warm")}


def _start(model: str, options: dict[str, Any], env: dict[str, str]) -> dict[str, float]:
    command = [sys.executable, "-m", "benchmarks.gpu.start", model]
    command += [json.dumps(options), str(time.time())]
    done = subprocess.run(
        command, env=env, stdout=subprocess.PIPE, timeout=TIMEOUT_S, check=True, text=True
    )
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", choices=SHAPES)
    parser.add_argument("options", type=json.loads)
    parser.add_argument("started_at", type=float)
    given = parser.parse_args()
    from benchmarks.gpu.engine import BenchEngine
    from engine.ipc.options import EngineOptions

    imported_at = time.time()
    engine = BenchEngine(given.model, EngineOptions(**given.options))
    loaded_at = time.time()
    engine.run(workloads(SHAPES[given.model])["single"], max_tokens=1)
    done_at = time.time()
    print(
        json.dumps(
            {
                "seconds": done_at - given.started_at,
                "python_s": imported_at - given.started_at,
                "load_s": loaded_at - imported_at,
                "first_request_s": done_at - loaded_at,
            }
        )
    )


if __name__ == "__main__":
    main()

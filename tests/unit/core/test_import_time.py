"""What starting costs: the package, `engine --help` and each command's help load no framework.

The assertions are on loaded modules, which do not depend on how busy the machine is.
"""

import json
import subprocess
import sys
from typing import Any

import pytest

import engine

pytestmark = pytest.mark.seconds  # each start is a process

FRAMEWORKS = {"torch", "jax", "tinygrad", "transformers", "tensorflow", "vllm", "sglang"}
HEAVY = FRAMEWORKS | {"fastapi", "numpy", "openai", "starlette", "uvicorn"}

RUN_HELP = """
import contextlib, io, json, sys
from engine.cli.commands import app
failed = []
for arguments in json.loads(sys.argv[1]):
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            app(arguments, prog_name="engine")
    except SystemExit as stop:
        if stop.code:
            failed.append(arguments)
print(json.dumps([failed, sorted({name.split(".")[0] for name in sys.modules})]))
"""


def run(code: str, *arguments: str) -> Any:
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def loaded_by(code: str) -> set[str]:
    report = "import json, sys; print(json.dumps([name.split('.')[0] for name in sys.modules]))"
    return set(run(f"{code}\n{report}"))


def test_importing_the_package_loads_almost_nothing() -> None:
    assert not loaded_by("import engine; engine.__version__") & (HEAVY | {"msgspec", "pydantic"})


def test_importing_sampling_params_loads_no_framework() -> None:
    assert not loaded_by("from engine import SamplingParams; SamplingParams()") & FRAMEWORKS


def test_help_loads_neither_server_nor_framework() -> None:
    failed, loaded = run(RUN_HELP, json.dumps([["--help"], ["--version"]]))
    assert not failed
    assert not set(loaded) & HEAVY


def test_help_of_every_command_works_and_loads_no_framework() -> None:
    from engine.cli.commands import COMMANDS

    commands = [*([name, "--help"] for name in COMMANDS), ["config", "show", "--help"]]
    failed, loaded = run(RUN_HELP, json.dumps(commands))
    assert not failed
    assert not set(loaded) & FRAMEWORKS


def test_an_engine_process_loads_nothing_of_its_frontend() -> None:
    frontend = (HEAVY - {"numpy"}) | {"asyncio", "jinja2", "psutil", "pydantic", "tokenizers"}
    frontend |= {"opentelemetry"}
    modules = "engine.worker.main, engine.native.execution.build"
    assert not loaded_by(f"import {modules}") & frontend


def test_an_engine_process_does_not_import_numpy_random() -> None:
    """Only examples of ops need numpy's, whose import takes 10 ms."""
    build = "engine.native.execution.build"
    code = f"import json, sys, {build}; print(json.dumps('numpy.random' in sys.modules))"
    assert run(code) is False


def test_an_engine_process_is_started_before_anything_heavy_is_loaded() -> None:
    """And once: the command takes the one that was started before its line was read."""
    code = """
import json, sys
from engine.cli import main

class Process:
    def __init__(self):
        print(json.dumps([name.split(".")[0] for name in sys.modules]))

    def discard(self):
        pass

main.EngineProcess = Process
sys.argv = ["engine", "serve", "no-model-of-this-name"]
try:
    main.main()
except SystemExit as ended:
    sys.exit(ended.code != 2)
"""
    assert not set(run(code)) & (HEAVY | {"asyncio", "msgspec", "pydantic", "typer"})


def test_a_frontend_starts_without_numpy_or_jinja2() -> None:
    from engine.servers.app import EARLY

    routes = [f"engine.servers.{target.partition(':')[0]}" for target in EARLY]
    modules = ["engine.cli.serve", "engine.backends.custom.app", "engine.servers.run", *routes]
    backends = "engine.backends.custom.frameworks"
    loaded = loaded_by(f"import {', '.join([*modules, backends])}")
    assert not loaded & {"numpy", "jinja2"}


def test_a_frontend_with_one_backend_loads_no_more_than_that_needs() -> None:
    code = """
import json, sys
import engine.cli.serve, engine.servers.run, engine.servers.app
from engine.backends.custom.app import build_server
from engine.cli.console import load_cli_settings
build_server(load_cli_settings(None, {"model.model_path": "m"}).settings)
print(json.dumps(list(sys.modules)))
"""
    loaded = run(code)
    assert "engine.servers.openai.completions" in loaded
    unwanted = ("engine.plugins", "engine.routing", "engine.core.config_tables", "psutil")
    unwanted += ("httpx", "rich", "engine.core.store.hub")
    # FastAPI imports OpenTelemetry's API. What records and sends is its SDK.
    unwanted += ("pydantic.v1", "opentelemetry.sdk", "opentelemetry.exporter")
    assert not [name for name in loaded if name.startswith(unwanted)]


def test_the_package_exports_exactly_its_public_names() -> None:
    assert {"LLM", "AsyncLLM", "SamplingParams"} < set(dir(engine)) == set(engine.__all__)
    assert all(getattr(engine, name) for name in dir(engine))
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        _ = engine.Nothing

"""Starts our server from the command line of llama.cpp's server.

Most flags have the same names here. Those that name a model name one on the hub, which the suite
replaces. Flags without an effect on an answer, such as batch sizes, are dropped. In llama.cpp, all
slots share the context. Here each sequence has its own, so the context is divided by the number of
slots, unless the flags say that a slot may use all of it.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from tests.llamacpp_suite.models import DRAFT_FILE, FOLDER, SPLIT_FILE, STORIES_FILE

# Flags that `engine serve` has under the same names: with a value, and without one.
WITH_VALUE = (
    *("host", "port", "temp", "seed", "n-predict", "alias", "chat-template-file"),
    "sleep-idle-seconds",
)
WITHOUT_VALUE = ("no-ui",)


def arguments(given: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    for name in (*WITH_VALUE, "hf-repo", "hf-file", "model-draft", "api-key"):
        parser.add_argument(f"--{name}")
    for name in ("chat-template", "cors-origins", "reasoning"):
        parser.add_argument(f"--{name}")
    for name in ("ctx-size", "parallel"):
        parser.add_argument(f"--{name}", type=int)
    for name in (*WITHOUT_VALUE, "metrics", "kv-unified", "verbose"):
        parser.add_argument(f"--{name}", action="store_true")
    known, _ = parser.parse_known_args(given)
    return known


def model_path(repo: str) -> Path:
    if "bert" in repo:
        return FOLDER / "bge"
    if "reranker" in repo:
        return FOLDER / "reranker"
    return SPLIT_FILE if "split" in repo else STORIES_FILE


def configuration(flags: argparse.Namespace, name: str) -> str:
    """The TOML file for what has no flag of `engine serve`."""
    # llama.cpp sets these options for every template, the first one unless reasoning is off.
    options = {
        "enable_thinking": flags.reasoning != "off",
        "date_string": time.strftime("%d %b %Y"),
    }
    origins = flags.cors_origins.split(",") if flags.cors_origins else []
    pairs = ", ".join(f"{key} = {json.dumps(value)}" for key, value in options.items())
    lines = [
        "[server]",
        f"enable_cors = {json.dumps(bool(flags.api_key or origins))}",
        f"cors_origins = {json.dumps(origins)}",
        "accept_any_model = true",
        'dialects = ["llamacpp"]',
        f"[presets.{json.dumps(name)}]",
        f"template_options = {{ {pairs} }}",
    ]
    return "\n".join(lines) + "\n"


def command_line(flags: argparse.Namespace, path: Path) -> list[str]:
    """The flags of `engine serve`."""
    values = vars(flags)
    line: list[str] = []
    for name in WITH_VALUE:
        if (value := values[name.replace("-", "_")]) is not None:
            line += [f"--{name}", value]
    line += [f"--{name}" for name in WITHOUT_VALUE if values[name.replace("-", "_")]]
    line += ["--metrics" if flags.metrics else "--no-metrics"]
    if path.suffix == ".gguf" and flags.chat_template_file is None:
        # llama.cpp's template for a model without one
        line += ["--chat-template", flags.chat_template or "chatml"]
    if flags.model_draft is not None:
        line += ["--model-draft", str(DRAFT_FILE)]
    slots = flags.parallel or 4
    if flags.ctx_size is not None:
        line += ["--ctx-size", str(flags.ctx_size // (1 if flags.kv_unified else slots))]
    return [*line, "--parallel", str(slots), *(["--log-level", "debug"] if flags.verbose else [])]


def main() -> None:
    flags = arguments(sys.argv[1:])
    path = model_path(f"{flags.hf_repo} {flags.hf_file} {flags.alias}")
    with tempfile.NamedTemporaryFile("w", suffix=".toml", delete=False) as file:
        file.write(configuration(flags, flags.alias or path.stem))
    engine = str(Path(sys.executable).with_name("engine"))
    command = [engine, "serve", str(path), "--config", file.name, *command_line(flags, path)]
    if flags.api_key is not None:
        os.environ["LLM_ENGINE_API_KEY"] = flags.api_key
    os.execv(command[0], command)


if __name__ == "__main__":
    main()

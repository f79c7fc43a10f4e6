"""Starts our server from the command line of llama.cpp's server.

Flags without an effect on an answer, such as batch sizes, are dropped. In llama.cpp, all slots
share the context. Here each sequence has its own, so the context is divided by the number of slots,
unless the flags say that a slot may use all of it.
"""

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.llamacpp_suite.models import FOLDER

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
COMMAND_R = (
    "{% for message in messages %}<|START_OF_TURN_TOKEN|>"
    "<|{{ 'CHATBOT' if message.role == 'assistant' else message.role | upper }}_TOKEN|>"
    "{{ message.content }}<|END_OF_TURN_TOKEN|>{% endfor %}"
    "{% if add_generation_prompt %}<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>{% endif %}"
)
TEMPLATES = {"chatml": CHATML, "llama3": CHATML, "command-r": COMMAND_R}


def arguments(given: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    for name in ("port", "host", "hf-repo", "hf-file", "model", "alias", "api-key"):
        parser.add_argument(f"--{name}")
    for name in ("chat-template", "chat-template-file", "reasoning"):
        parser.add_argument(f"--{name}")
    for name in ("seed", "ctx-size", "parallel", "n-predict", "sleep-idle-seconds"):
        parser.add_argument(f"--{name}", type=int)
    parser.add_argument("--temp", type=float)
    for name in ("metrics", "kv-unified"):
        parser.add_argument(f"--{name}", action="store_true")
    known, _ = parser.parse_known_args(given)
    return known


def model_path(repo: str) -> Path:
    if "bert" in repo:
        return FOLDER / "bge"
    return FOLDER / ("reranker" if "reranker" in repo else "stories15M.gguf")


def configuration(flags: argparse.Namespace) -> str:
    """The TOML file for these flags."""
    path = model_path(f"{flags.hf_repo} {flags.hf_file} {flags.alias}")
    name = flags.alias or path.stem
    parameters = {"temperature": flags.temp, "seed": flags.seed}
    if flags.n_predict is not None and flags.n_predict > 0:
        parameters["max_tokens"] = flags.n_predict
    lines = [
        "[server]",
        f'host = "{flags.host}"',
        f"port = {flags.port}",
        f"enable_cors = {str(flags.api_key is not None).lower()}",
        "accept_any_model = true",
        *([f"idle_unload_s = {idle_s}"] if (idle_s := flags.sleep_idle_seconds) else []),
        "[model]",
        f'model_path = "{path}"',
        f"name = {json.dumps(name)}",
        f"[presets.{json.dumps(name)}]",
    ]
    if path.suffix == ".gguf":
        # llama.cpp sets this option for every template, unless reasoning is turned off.
        thinks = str(flags.reasoning != "off").lower()
        lines += [
            f"template = {json.dumps(chat_template(flags))}",
            f"template_options = {{ enable_thinking = {thinks} }}",
        ]
    lines += [f"[presets.{json.dumps(name)}.parameters]"]
    lines += [f"{key} = {value}" for key, value in parameters.items()]
    lines += ["[metrics]", f"enabled = {str(flags.metrics).lower()}"]
    return "\n".join(lines) + "\n"


def chat_template(flags: argparse.Namespace) -> str:
    if flags.chat_template_file is not None:
        return Path(flags.chat_template_file).read_text()
    return TEMPLATES.get(flags.chat_template or "chatml", flags.chat_template)


def main() -> None:
    flags = arguments(sys.argv[1:])
    with tempfile.NamedTemporaryFile("w", suffix=".toml", delete=False) as file:
        file.write(configuration(flags))
    command = [str(Path(sys.executable).with_name("engine")), "serve", "--config", file.name]
    slots = flags.parallel or 4
    if flags.ctx_size is not None:
        parts = 1 if flags.kv_unified else slots
        command += ["--ctx-size", str(flags.ctx_size // parts)]
    command += ["--parallel", str(slots)]
    if flags.api_key is not None:
        os.environ["LLM_ENGINE_API_KEY"] = flags.api_key
    os.execv(command[0], command)


if __name__ == "__main__":
    main()

"""The help texts of commands: options in groups, with colours on a terminal. Also tab completion,
and the advice for flags of other engines that do not exist here.
"""

import os
import sys
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import typer
from typer.core import TyperCommand

from engine.core.errors import ConfigError

_HEADING, _NAME, _RESET = "\x1b[1m", "\x1b[36m", "\x1b[0m"
# Flags of vLLM, SGLang and llama.cpp that `serve` does not have, and what to do.
FOREIGN = {
    ("--tensor-split", "-ts"): "all ranks get equal parts: --tensor-parallel-size N",
    ("--n-gpu-layers", "--gpu-layers", "-ngl"): (
        "all layers run on one device: --device cuda or --device cpu"
    ),
    ("--trust-remote-code",): "no code of a model is ever run; leave it out",
    ("--enforce-eager", "--disable-cuda-graph"): "steps choose CUDA graphs by size; leave it out",
    ("--enable-chunked-prefill",): "prefill is always chunked; leave it out",
    ("--cont-batching", "-cb"): "requests are always batched continuously; leave it out",
    ("--jinja",): "the model's chat template is always used; leave it out",
    ("--flash-attn", "-fa", "--attention-backend"): (
        "set performance.attention in engine.toml instead"
    ),
    ("--enable-auto-tool-choice", "--tool-call-parser", "--reasoning-parser"): (
        "tool calls and reasoning are recognized by the model's template; leave it out"
    ),
    ("--embedding", "--embeddings"): "every model serves embeddings; leave it out",
    ("--enable-lora",): "adapters are always served, by --lora NAME=PATH; leave it out",
    ("--max-lora-rank", "--max-loras", "--max-cpu-loras"): (
        "set performance.max_adapter_rank, max_adapters or adapter_memory_mb in engine.toml instead"
    ),
    ("--speculative-config",): "name a draft model with --draft-model; guesses adapt by themselves",
    ("--draft-max", "--draft", "--draft-min", "--draft-p-min", "--num-speculative-tokens"): (
        "the number of guessed tokens adapts to how often they are right; leave it out"
    ),
    ("--ctx-size-draft", "-cd", "--n-gpu-layers-draft", "-ngld", "--device-draft", "-devd"): (
        "the draft model runs where the model runs, with a small KV cache; leave it out"
    ),
    ("--mlock", "--no-mmap"): "set performance.use_mmap in engine.toml instead",
    ("--tokenizer", "--tokenizer-mode"): "a model is used with its own tokenizer; leave it out",
    ("--chat-template", "--chat-template-file"): (
        "set template in the table [presets.MODEL] of engine.toml instead"
    ),
}

COMPLETE_VARIABLE = "_ENGINE_COMPLETE"
# How to use the script of a shell, shown as its first line.
_USE = {
    "bash": 'eval "$(engine completion bash)"    # in ~/.bashrc',
    "zsh": 'eval "$(engine completion zsh)"     # in ~/.zshrc, after compinit',
    "fish": "engine completion fish | source     # in ~/.config/fish/config.fish",
}


def refuse_foreign(command: str | None, arguments: Sequence[str]) -> None:
    """Refuse a flag of another engine with advice. Without this, the parser would only say that
    there is no such option.
    """
    if command != "serve":
        return
    for argument in arguments:
        flag = argument.partition("=")[0]
        for flags, advice in FOREIGN.items():
            if flag in flags:
                raise ConfigError(f"{flag}: {advice}", param=flag)


class GroupedCommand(TyperCommand):
    """A command whose help shows the options under the headings of `rich_help_panel`."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        sections: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record is not None:
                panel = getattr(param, "rich_help_panel", None)  # --help is not made by Typer
                usual = "Arguments" if param.param_type_name == "argument" else "Options"
                sections.setdefault(panel or usual, []).append(record)
        for heading in sorted(sections, key=["Arguments", *sections].index):
            if heading != "Options":
                write_section(formatter, heading, sections[heading])
        write_section(formatter, "Options", sections.get("Options", []))


def write_section(formatter: Any, heading: str, rows: Sequence[tuple[str, str]]) -> None:
    """Write rows of names and descriptions under a heading."""
    if not rows:
        return
    with formatter.section(_styled(heading, _HEADING)):
        formatter.write_dl([(_styled(name, _NAME), text) for name, text in rows])


def _styled(text: str, style: str) -> str:
    has_color = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    return f"{style}{text}{_RESET}" if has_color else text


def completion(
    shell: Annotated[Literal["bash", "zsh", "fish"], typer.Argument(help="The shell.")],
) -> None:
    """Print a script for tab completion of commands, flags and model names. Run it at the start of
    the shell; the script's first line says how.
    """
    from typer.completion import get_completion_script  # type: ignore[attr-defined]

    script = get_completion_script(prog_name="engine", complete_var=COMPLETE_VARIABLE, shell=shell)
    print(f"# {_USE[shell]}\n{script}")

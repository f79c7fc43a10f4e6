"""The help texts of commands: options in groups, with colours on a terminal, and examples. Also tab
completion, and the advice for flags of other engines that do not exist here.
"""

import os
import sys
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import typer
from typer.core import TyperCommand, TyperGroup

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
}

# Two examples of each command, which its `--help` shows at the end.
EXAMPLES = {
    "run": ('run qwen3-0.6b "Why is the sky blue?"', "run --url https://host:8000 --temperature 0"),
    "serve": ("serve smollm2-135m-instruct", "serve ./model.gguf --port 9000 --ctx-size 8192"),
    "chat": ("chat qwen3-0.6b", 'chat --system "Answer in one sentence." --seed 1'),
    "generate": ('generate "Once upon a time"', "generate - --max-tokens 50 --temperature 0.8"),
    "pull": ("pull qwen3-0.6b --quant Q8_0", "pull bartowski/SmolLM2-1.7B-Instruct-GGUF:Q4_K_M"),
    "list": ("list", "list --json"),
    "search": ("search coder", "search qwen --fits"),
    "show": ("show smollm2-135m-instruct", "show ./model.gguf --json"),
    "rm": ("rm qwen3-0.6b", "rm qwen3-0.6b --packed --yes"),
    "inspect": ("inspect ./model.gguf --tensors", "inspect smollm2-135m-instruct --graph --time"),
    "convert": (
        "convert ./checkpoint model.gguf --type Q4_K_M",
        "convert model.gguf small.gguf --type Q4_0 --check text.txt",
    ),
    "finetune": (
        "finetune examples.jsonl --base smollm2-135m-instruct",
        "finetune pairs.jsonl --base ./model --method dpo --device cuda",
    ),
    "imatrix": ("imatrix ./model.gguf text.txt", "imatrix ./model.gguf text.txt -o imatrix.gguf"),
    "adapters": ("adapters list", "adapters add tone ./adapter --base smollm2-135m-instruct"),
    "vectors": ("vectors list", "vectors import calm ./control.gguf"),
    "ps": ("ps", "ps --url https://host:8000 --admin-key-file key"),
    "stop": ("stop", "stop qwen3-0.6b --url http://127.0.0.1:9000"),
    "top": ("top", "top --url http://127.0.0.1:9000 --once"),
    "cache": ("cache stat", "cache list"),
    "bench": ("bench", "bench --url http://127.0.0.1:9000 --requests 64 --concurrency 16"),
    "admin": ("admin status", "admin --url http://127.0.0.1:9000 log-level debug"),
    "replay": ("replay chatcmpl-123", "replay chatcmpl-123 --url http://127.0.0.1:9000 --json"),
    "triton": (
        "triton export ./repository",
        "triton export ./repository --url http://127.0.0.1:9000",
    ),
    "conformance": ("conformance", "conformance --url https://host:8000 --only chat"),
    "compare": (
        "compare --backends native,torch --prompts prompts.txt",
        "compare --backends native,http://127.0.0.1:8081 --prompts prompts.jsonl --limit 20",
    ),
    "eval": (
        "eval questions.jsonl --models smollm2-135m-instruct",
        "eval questions.jsonl --url http://127.0.0.1:8080 --limit 50",
    ),
    "node": (
        "node token node-token",
        "node join http://host:8080 --token-file node-token",
    ),
    "cluster": (
        "cluster up http://host:8080 --ray auto --token-file node-token",
        "cluster status --ray auto",
    ),
    "shard": (
        "shard host:9001 --token-file token",
        "shard host:9001 --token-file token --device cpu",
    ),
    "deploy": ("deploy user@host", "deploy user@host --model qwen3-0.6b --port 9000"),
    "config": ("config show", "config show --config engine.toml --json"),
    "keys": ("keys new alice", "keys list --file keys.json"),
    "backends": ("backends argv", "backends argv --config engine.toml"),
    "plugins": ("plugins list", "plugins list --json"),
    "completion": ("completion bash", "completion zsh"),
    "doctor": ("doctor", "doctor --json"),
    "docs": ("docs", "docs --port 9000 --no-browser"),
    "profile": ("profile smollm2-135m-instruct", "profile ./model.gguf --trace trace.json"),
    "dev": ("dev module_map runtime", "dev single_file_gpt2"),
}
# Other words for a verb -> the verb that groups have.
VERBS = {
    **{"ls": "list", "remove": "rm", "delete": "rm", "create": "new"},
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
    """A command whose help shows the options under the headings of `rich_help_panel`, and ends with
    examples.
    """

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        write_examples(ctx, formatter)

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


class VerbGroup(TyperGroup):
    """A group of subcommands. The same verbs work in all groups, and no description is cut."""

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        found = super().get_command(ctx, cmd_name)
        return found or super().get_command(ctx, VERBS.get(cmd_name, cmd_name))

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        rows = []
        for name in self.list_commands(ctx):
            lines = (self.get_command(ctx, name).help or "").split("\n\n")[0]
            rows.append((name, " ".join(lines.split())))
        write_section(formatter, "Commands", rows)

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        write_examples(ctx, formatter)


def write_examples(ctx: Any, formatter: Any) -> None:
    """The examples of a command, or those of its group that call it. Without any: nothing."""
    name, *inner = ctx.command_path.removeprefix("engine ").split()
    given = [each for each in EXAMPLES.get(name, ()) if each.split()[1 : 1 + len(inner)] == inner]
    if given:
        with formatter.section(_styled("Examples", _HEADING)):
            for each in given:
                formatter.write(f"  engine {each}\n")


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

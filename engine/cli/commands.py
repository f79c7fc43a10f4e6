"""The commands of `engine`. A subcommand's module is imported only when that command is used.

`engine --help` prints the one-line descriptions in this module, so it imports neither the server
nor an ML framework.
"""

import os
import sys
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from engine import __version__
from engine.cli.console import exit_code, print_error
from engine.cli.help import COMPLETE_VARIABLE, GroupedCommand, refuse_foreign, write_section
from engine.core.errors import EngineError, ResourceError
from engine.core.sandbox.exhaustion import what_ran_out

# Heading of `engine --help` -> its commands. Command name -> the target that implements it, and its
# line in the help. A target is a function with Typer parameters, or a Typer app with subcommands.
GROUPS = {
    "Use a model": {
        "run": ("engine.cli.talk.commands:run", "Answer a message, or talk with a model."),
        "serve": ("engine.cli.serve:serve", "Serve a model over an OpenAI-compatible API."),
        "chat": ("engine.cli.talk.commands:chat", "Talk with a model in the terminal."),
        "generate": (
            "engine.cli.talk.commands:generate",
            "Continue a prompt and print the result.",
        ),
    },
    "Models": {
        "pull": ("engine.cli.models:pull", "Download a model."),
        "list": ("engine.cli.models:list_models", "List downloaded and known models."),
        "search": ("engine.cli.models:search", "Search the catalogue of models."),
        "show": ("engine.cli.models:show", "Show what a model is, and whether it fits here."),
        "rm": ("engine.cli.removal:rm", "Remove downloaded models and their packed copies."),
        "inspect": ("engine.cli.models:inspect", "Show what is in a model file."),
        "convert": ("engine.cli.convert:convert", "Convert a model to another file format."),
        "finetune": (
            "engine.cli.ops.finetune:finetune",
            "Train a LoRA adapter on the examples of a file.",
        ),
        "imatrix": ("engine.cli.convert:imatrix", "Measure which weights matter most."),
        "adapters": ("engine.cli.ops.adapters:app", "List, add, remove and merge LoRA adapters."),
        "vectors": ("engine.cli.ops.vectors:app", "Train, list and convert steering vectors."),
    },
    "A running server": {
        "ps": ("engine.cli.ops.running:ps", "List the models of a running server."),
        "stop": ("engine.cli.ops.running:stop", "Unload a model of a running server."),
        "top": ("engine.cli.ops.top:top", "Watch a server's models and backends."),
        "cache": ("engine.cli.ops.cache:app", "Look at, fill or clear the tiers of the cache."),
        "bench": ("engine.cli.ops.bench:bench", "Measure any server under load."),
        "admin": ("engine.cli.ops.admin:app", "Look at and change a running server."),
        "replay": ("engine.cli.ops.replay:replay", "Run a recorded request again and compare it."),
        "triton": ("engine_tools.triton.export:app", "Make it a model of a Triton server."),
        "conformance": (
            "engine.cli.ops.conformance:conformance",
            "Check any server against what clients rely on.",
        ),
        "compare": (
            "engine.cli.compare:compare",
            "Run the same prompts through several backends.",
        ),
        "eval": ("engine.cli.ops.evaluate:evaluate", "Count a model's right answers to a file."),
    },
    "Several machines": {
        "node": (
            "engine.cli.cluster.node:app",
            "Let this machine's engine work for a server elsewhere.",
        ),
        "cluster": ("engine.cli.cluster.ray:app", "Run nodes in a Ray cluster."),
        "shard": ("engine.cli.ops.shard:shard", "Join a model that several machines share."),
        "deploy": ("engine.cli.ops.deploy:deploy", "Serve a model on another machine, by SSH."),
    },
    "Set up": {
        "config": ("engine.cli.config:app", "Show the settings and where each comes from."),
        "keys": ("engine.cli.ops.keys:app", "Make, list and remove API keys."),
        "backends": ("engine.cli.backends:app", "Show the programs that backends run."),
        "plugins": (
            "engine.cli.ops.plugins:app",
            "Show the plugins that are installed and in use.",
        ),
        "completion": ("engine.cli.help:completion", "Print a script for tab completion."),
        "doctor": ("engine.cli.doctor:doctor", "Tell what this machine can run, and why."),
        "docs": ("engine.cli.ops.docs:docs", "Show the documentation, without a network."),
    },
    "Develop": {
        "profile": ("engine.cli.profile:profile", "Show where a model's time goes."),
        "dev": ("engine.cli.dev:app", "Scripts for working on the engine."),
    },
}
COMMANDS = {name: each for group in GROUPS.values() for name, each in group.items()}
# Other programs' names of our commands. They work too, but the help does not list them.
SYNONYMS = {
    "ls": "list",
    "models": "list",
    "download": "pull",
    "get": "pull",
    "remove": "rm",
    "delete": "rm",
    "start": "serve",
    "server": "serve",
    "info": "show",
    "benchmark": "bench",
    "complete": "generate",
    "quantize": "convert",
    "unload": "stop",
}


class LazyCommand(TyperCommand):
    """A command of which only the name and the help text are known. Its code is imported when its
    arguments are parsed.
    """

    def __init__(self, name: str, target: str, help_text: str) -> None:
        super().__init__(name, help=help_text, short_help=help_text)
        self._target = target

    def make_context(self, info_name: Any, args: Any, parent: Any = None, **extra: Any) -> Any:
        refuse_foreign(self.name, args)
        return self.resolve().make_context(self.name, args, parent=parent, **extra)

    def resolve(self) -> Any:
        """Import the module and return the real command."""
        module_name, attribute = self._target.split(":")
        target = getattr(import_module(module_name), attribute)
        if isinstance(target, typer.Typer):
            return typer.main.get_command(target)
        app = typer.Typer(add_completion=False, rich_markup_mode=None)
        app.command(self.name, cls=GroupedCommand)(target)
        return typer.main.get_command(app)


class LazyGroup(TyperGroup):
    """The group of all commands. It prints an `EngineError` of any command as one line and sets the
    exit code.
    """

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        for name, (target, help_text) in COMMANDS.items():
            self.add_command(LazyCommand(name, target, help_text))

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        return super().get_command(ctx, SYNONYMS.get(cmd_name, cmd_name))

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        longest = max(map(len, COMMANDS))
        for heading, commands in GROUPS.items():
            rows = [(name.ljust(longest), help_text) for name, (_, help_text) in commands.items()]
            write_section(formatter, heading, rows)

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except EngineError as error:
            if ctx.params["debug"]:
                raise
            print_error(error)
            raise typer.Exit(exit_code(error)) from None
        except (OSError, MemoryError, RuntimeError) as error:
            cause = what_ran_out(error)
            if ctx.params["debug"] or cause is None:
                raise
            print_error(ResourceError(cause))
            raise typer.Exit(1) from None


app = typer.Typer(
    cls=LazyGroup,
    name="engine",
    help="Serve language models on this machine.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # help is plain text: brackets are shown, and rich is not imported
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"engine {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", "-V", help="Print the version.", callback=_print_version, is_eager=True
        ),
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show where an error comes from.")] = False,
) -> None:
    pass


def run_command() -> None:
    if sys.argv[1:2] in (["help"], ["version"]):
        sys.argv[1] = f"--{sys.argv[1]}"
    if COMPLETE_VARIABLE in os.environ:  # a shell asks for completions
        from typer.completion import completion_init  # type: ignore[attr-defined]

        completion_init()
    app(prog_name="engine")

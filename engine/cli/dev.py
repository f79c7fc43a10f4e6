"""`engine dev NAME`: runs a script of `engine_tools/dev` and passes on its arguments."""

import sys
from importlib import import_module

import typer

from engine.cli.help import VerbGroup

SCRIPTS = {
    "single_file_gpt2": "A complete GPT-2 in one file.",
    "single_file_llama": "A complete Llama in one file; tells stories15M's stories.",
    "test_gpt2_equivalence": "Every layer in every framework beside Transformers.",
    "benchmark_layers": "How long each layer takes in each framework.",
    "profile_inference": "Where a request's time and memory go, as a page and a trace.",
    "finetune_tiny": "A gradient, a fine-tune on the CPU, and the result served.",
    "trace_request": "Which files and functions one streamed chat touches.",
    "module_map": "The package as a tree, one sentence per folder and module.",
    "measure_structure": "Counts of long imports, cycles, small modules and duplicated code.",
    "option_files": "How many files name an option or a request parameter.",
    "reference_pages": "Write the generated pages of docs from the code.",
}
_PASSED_ON = {
    "allow_extra_args": True,
    "ignore_unknown_options": True,
    "help_option_names": [],
}

app = typer.Typer(
    cls=VerbGroup,
    help="Scripts for working on the engine.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
)


def _add(name: str, description: str) -> None:
    @app.command(name, help=description, context_settings=_PASSED_ON)
    def run(context: typer.Context) -> None:
        sys.argv[0] = f"engine dev {name}"
        import_module(f"engine_tools.dev.{name}").main(context.args)


for _name, _description in SCRIPTS.items():
    _add(_name, _description)

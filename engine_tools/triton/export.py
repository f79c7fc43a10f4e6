"""`engine triton export`: writes a model repository for a Triton server.

Its model is of Triton's Python backend and passes requests to an engine server. So Triton serves
the model, and our scheduler batches it.
"""

import shutil
from pathlib import Path
from typing import Annotated
from urllib.parse import urlsplit

import typer

from engine.cli.console import messages, read_api_key
from engine.cli.help import VerbGroup
from engine.core.errors import ConfigError, UnavailableError

app = typer.Typer(cls=VerbGroup, add_completion=False, rich_markup_mode=None, no_args_is_help=True)

# Input tensors besides the prompt, which are all optional: name → data type and dimension.
OPTIONAL_INPUTS = {
    "stream": ("BOOL", 1),
    "sampling_parameters": ("STRING", 1),
    "exclude_input_in_output": ("BOOL", 1),
    "max_tokens": ("INT32", 1),
    "min_tokens": ("INT32", 1),
    "temperature": ("FP32", 1),
    "top_p": ("FP32", 1),
    "top_k": ("INT32", 1),
    "min_p": ("FP32", 1),
    "repetition_penalty": ("FP32", 1),
    "presence_penalty": ("FP32", 1),
    "frequency_penalty": ("FP32", 1),
    "seed": ("UINT64", 1),
    "stop": ("STRING", -1),
}
OUTPUTS = {
    "text_output": "STRING",
    "finish_reason": "STRING",
    "num_input_tokens": "UINT32",
    "num_output_tokens": "UINT32",
}


@app.callback()
def _group() -> None:
    """This server as a model of a Triton server."""


@app.command()
def export(
    directory: Annotated[
        Path, typer.Argument(metavar="DIR", help="The model repository; it is created if needed.")
    ],
    url: Annotated[
        str, typer.Option(help="The engine server, as Triton reaches it.")
    ] = "http://127.0.0.1:8080",
    model: Annotated[
        str | None, typer.Option(help="A model of that server. Default: its only model.")
    ] = None,
    name: Annotated[
        str | None, typer.Option(help="What Triton calls the model. Default: as the server does.")
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Replace a model of this name in DIR.")
    ] = False,
) -> None:
    """Write a Triton model repository whose model passes requests to an engine server."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise ConfigError(f"--url must be like http://HOST:PORT, got {url}", param="--url")
    served = _served(url, model)
    called = name or served.replace("/", "--")
    if not all(each.isalnum() or each in "._-" for each in called):
        raise ConfigError(
            f"--name may have letters, digits, dots, dashes and underscores, got {called}",
            param="--name",
        )
    target = directory / called
    if target.exists() and not force:
        raise ConfigError(f"{target} exists; --force replaces it", param="DIR")
    try:
        (target / "1").mkdir(parents=True, exist_ok=True)
        (target / "config.pbtxt").write_text(config_text(called, url, served))
        shutil.copyfile(Path(__file__).with_name("model.py"), target / "1" / "model.py")
    except OSError as error:
        raise ConfigError(f"{target} can't be written: {error.strerror}", param="DIR") from None
    messages().print(
        f"Wrote {target}. Its Python environment needs numpy < 2. Serve it with:\n"
        f"  tritonserver --model-repository {directory}\n"
        "If the engine server has keys, set LLM_ENGINE_API_KEY for Triton.",
        soft_wrap=True,
        highlight=False,
    )


def _served(url: str, model: str | None) -> str:
    """The id of the model, or of the server's only one. A server that does not answer yet is
    trusted to have the model.
    """
    import httpx

    from engine.cli.talk.chat_clients import model_ids

    key = read_api_key(None)
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    try:
        ids = model_ids(httpx.get(f"{url.rstrip('/')}/v1/models", headers=headers, timeout=10))
    except httpx.HTTPError as error:
        if model is not None:
            return model
        raise UnavailableError(
            f"Nothing answers at {url} ({error}). Start the server, or name its model with --model."
        ) from None
    if model is not None and (model in ids or not ids):  # a server with keys may list none
        return model
    if model is None and len(ids) == 1:
        return ids[0]
    known = ", ".join(ids) or "none"
    raise ConfigError(f"name a model of {url} with --model; it has: {known}", param="--model")


def config_text(name: str, url: str, model: str) -> str:
    """The text of config.pbtxt."""
    inputs = [_tensor("text_input", "STRING", -1)]
    inputs += [
        _tensor(each, kind, size, optional=True) for each, (kind, size) in OPTIONAL_INPUTS.items()
    ]
    outputs = [_tensor(each, kind, -1) for each, kind in OUTPUTS.items()]
    return (
        f'name: "{name}"\n'
        'backend: "python"\n'
        "max_batch_size: 0\n"
        "model_transaction_policy { decoupled: true }\n"
        f"input [\n{_joined(inputs)}]\n"
        f"output [\n{_joined(outputs)}]\n"
        "instance_group [ { kind: KIND_CPU count: 1 } ]\n"
        f"{_parameter('url', url)}"
        f"{_parameter('model', model)}"
    )


def _tensor(name: str, kind: str, size: int, optional: bool = False) -> str:
    ending = " optional: true" if optional else ""
    return f'  {{ name: "{name}" data_type: TYPE_{kind} dims: [ {size} ]{ending} }}'


def _joined(entries: list[str]) -> str:
    return ",\n".join(entries) + "\n"


def _parameter(key: str, value: str) -> str:
    escaped = value.replace("\\", "\\\\").replace('"', '\\"')
    return f'parameters {{ key: "{key}" value: {{ string_value: "{escaped}" }} }}\n'

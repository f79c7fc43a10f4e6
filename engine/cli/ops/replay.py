"""`engine replay`: runs a recorded request again and compares its tokens."""

import json
from pathlib import Path
from typing import Annotated

import typer

from engine.cli.console import JsonOption, output
from engine.cli.ops.admin_client import call_admin


def replay(
    request_id: Annotated[
        str, typer.Argument(help="The id of the answer, or the X-Request-Id of its response.")
    ],
    url: Annotated[
        str, typer.Option(help="The server that recorded the request.")
    ] = "http://127.0.0.1:8080",
    admin_key_file: Annotated[
        Path | None, typer.Option(help="File with the administrator's key.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Run a recorded request again and compare its tokens with the recorded ones.

    The server records requests if requests.record is true. Exits with 1 if a token differs.
    """
    found = call_admin(url, admin_key_file, "POST", f"requests/{request_id}/replay", {})
    if as_json:
        print(json.dumps(found, indent=2))
    else:
        for each in found["choices"]:
            at = each["differs_at"]
            result = "the same" if at is None else f"differs from token {at + 1} on"
            output().print(f"choice {each['choice']}: {each['tokens']} tokens, {result}")
        if not found["same_fingerprint"]:
            output().print("The model, its file or its arithmetic is not the recorded one.")
    if not found["same"]:
        raise typer.Exit(1)

"""A chat in the terminal with any OpenAI-compatible server, as the answer comes.

    python chat.py                                   # http://127.0.0.1:8080/v1, its first model
    python chat.py --base-url http://host:8000/v1 --model my-model

The key is read from OPENAI_API_KEY. Ctrl-C cuts an answer short, Ctrl-D leaves.
"""

import argparse
import os
import sys

from openai import APIConnectionError, OpenAI, OpenAIError

Message = dict[str, str]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--base-url", default="http://127.0.0.1:8080/v1")
    parser.add_argument("--model", help="default: the first that the server lists")
    parser.add_argument("--system", help="what the model is told before all else")
    parser.add_argument("--temperature", type=float, default=0.7)
    args = parser.parse_args()
    client = OpenAI(base_url=args.base_url, api_key=os.environ.get("OPENAI_API_KEY", "none"))
    try:
        model = args.model or client.models.list().data[0].id
    except APIConnectionError:
        sys.exit(f"error: nothing answers at {args.base_url}; start a server with `engine serve`")
    except OpenAIError as error:
        sys.exit(f"error: {error}")
    print(f"{model} at {args.base_url}. Ctrl-D leaves.", file=sys.stderr)
    talk(client, model, args.system, args.temperature)


def talk(client: OpenAI, model: str, system: str | None, temperature: float) -> None:
    conversation: list[Message] = [{"role": "system", "content": system}] if system else []
    while (line := ask_user()) is not None:
        if not line:
            continue
        asked: Message = {"role": "user", "content": line}
        answer = stream_answer(client, model, [*conversation, asked], temperature)
        if answer is not None:
            conversation += [asked, {"role": "assistant", "content": answer}]


def ask_user() -> str | None:
    try:
        return input("you> ").strip()
    except (EOFError, KeyboardInterrupt):
        print()
        return None


def stream_answer(
    client: OpenAI, model: str, conversation: list[Message], temperature: float
) -> str | None:
    """Print the answer piece by piece; None if there is none, which has been explained."""
    pieces: list[str] = []
    try:
        stream = client.chat.completions.create(
            model=model, messages=conversation, temperature=temperature, stream=True
        )
        with stream:  # leaving it early closes the connection, which ends the work over there
            for chunk in stream:
                text = chunk.choices[0].delta.content if chunk.choices else None
                pieces.append(text or "")
                print(text or "", end="", flush=True)
    except KeyboardInterrupt:
        print(" (cut short)", end="")
    except OpenAIError as error:
        print(f"error: {error}", file=sys.stderr)
        return None
    print()
    return "".join(pieces)


if __name__ == "__main__":
    main()

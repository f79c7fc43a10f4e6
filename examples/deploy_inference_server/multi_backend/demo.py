"""Start the server of engine.toml, talk to it, show who answered, why, and what the shadow says.

python demo.py
"""

import argparse
import contextlib
import json
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from openai import OpenAI

CONFIG = Path(__file__).parent / "engine.toml"
READY = re.compile(r"Ready in .* at (http://\S+)/v1")
TOPICS = ("the sea", "bread", "a small village", "the moon")
SHADOW_WAIT_S = 60.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", type=Path, default=CONFIG)
    parser.add_argument("--turns", type=int, default=3, help="of each conversation")
    args = parser.parse_args()
    with serving(args.config) as url:
        client = OpenAI(base_url=f"{url}/v1", api_key="none")
        with ThreadPoolExecutor(len(TOPICS)) as pool:
            talks = list(pool.map(lambda topic: talk(client, topic, args.turns), TOPICS))
        for topic, answered_by in zip(TOPICS, talks, strict=True):
            print(f"{topic}: answered by {', '.join(answered_by)}")
        show_routes(url)
        show_shadow(url)


@contextlib.contextmanager
def serving(config: Path) -> Iterator[str]:
    """The server's address; it is stopped when the block ends."""
    command = [sys.executable, "-m", "engine.cli.main", "serve", "--config", str(config)]
    process = subprocess.Popen([*command, "--port", "0"], stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    try:
        for line in process.stderr:
            print(f"  {line}", end="", file=sys.stderr)
            if found := READY.search(line):
                # What is not read fills the pipe, and the server would wait.
                threading.Thread(target=process.stderr.read, daemon=True).start()
                yield found[1]
                return
        sys.exit(f"error: the server ended with status {process.wait()}")
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait()


def talk(client: OpenAI, topic: str, num_turns: int) -> list[str]:
    """A conversation by the alias; who answered each turn is in a header."""
    messages: list[Any] = [{"role": "system", "content": f"You know everything about {topic}."}]
    answered_by = []
    for _ in range(num_turns):
        messages.append({"role": "user", "content": f"Tell me one more thing about {topic}."})
        reply = client.chat.completions.with_raw_response.create(
            model="gpt-4o-mini", messages=messages, max_tokens=24, temperature=0
        )
        answered_by.append(reply.headers.get("x-engine-backend", "?"))
        messages.append({"role": "assistant", "content": reply.parse().choices[0].message.content})
    return answered_by


def show_routes(url: str) -> None:
    routes = get(f"{url}/v1/admin/routes")
    for model in routes["models"]:
        print(f"\n{model['id']} ({model['policy']})")
        for each in model["backends"]:
            print(
                f"  {each['name']}: {each['state']}, {each['requests']} requests,"
                f" cache hit rate {each['prefix_hit_rate']}"
            )
    newest = routes["decisions"][0]
    why = get(f"{url}/v1/admin/routes/{newest['request_id']}")
    print(f"why: {why['decisions'][0]['explanation']}")


def show_shadow(url: str) -> None:
    """Copies are answered when there is time for them, so wait for the last."""
    deadline = time.monotonic() + SHADOW_WAIT_S
    while True:
        shadow = get(f"{url}/v1/admin/shadow")
        busy = [each for each in shadow["models"] if each["waiting"] or each["in_flight"]]
        if not busy or time.monotonic() > deadline:
            break
        time.sleep(0.2)
    for each in shadow["models"]:
        print(f"\nshadow of {each['id']} on {each['backend']}: {each['outcomes']}")
    positions = Counter(
        each["first_divergence_token"]
        for each in shadow["recent"]
        if each["outcome"] == "different"
    )
    for position, count in sorted(positions.items()):
        print(f"  {count} answers part at token {position}")


def get(url: str) -> Any:
    with urllib.request.urlopen(url, timeout=10) as reply:
        return json.load(reply)


if __name__ == "__main__":
    main()

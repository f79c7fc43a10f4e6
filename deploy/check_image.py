"""Runs an image that buildah has built, without a container engine, and checks what it promises.

    buildah bud --isolation chroot -f deploy/Containerfile -t engine .
    python deploy/check_image.py localhost/engine            # as root

The image runs in a chroot and a mount namespace of its own: its root is read-only, /tmp is a tmpfs,
/data is a folder with the models of this machine. The user, the environment, the command and the
health check are those of the image's configuration.
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

COMPILERS = ("cc", "c++", "gcc", "g++", "clang", "clang++", "ld", "as", "make", "cmake")
URL = "http://127.0.0.1:8000"
READY_S = 120.0
# The arguments are the image's folder, the folder of /data, and a command that enters the chroot.
ENTER = """
set -e
mount --make-rprivate /
mount --bind "$1" "$1"
mount -t proc proc "$1/proc"
mount --rbind /dev "$1/dev"
mount -t tmpfs -o size=256m tmpfs "$1/tmp"
mount --bind "$2" "$1/data"
mount -o remount,bind,ro "$1"
shift 2
exec "$@"
"""


class Image:
    def __init__(self, name: str, data: Path) -> None:
        self._data = data
        self._container = output("buildah", "from", "--pull-never", name)
        self.root = Path(output("buildah", "mount", self._container))
        told = json.loads(output("buildah", "inspect", "--type", "image", name))
        self.config: dict[str, Any] = told["OCIv1"]["config"]
        self.health: list[str] = told["Docker"]["config"]["Healthcheck"]["Test"]

    def remove(self) -> None:
        subprocess.run(["buildah", "rm", self._container], check=True, stdout=subprocess.DEVNULL)

    def command(self, words: list[str], **variables: str) -> list[str]:
        """A command line that runs `words` in the image, as its user."""
        user = self.config["User"]
        environment = [
            *self.config["Env"],
            *(f"{name}={value}" for name, value in variables.items()),
        ]
        inside = ["chroot", f"--userspec={user}:{user}", str(self.root), "env", "-i", *environment]
        enter = ["unshare", "--mount", "sh", "-c", ENTER, "sh", str(self.root), str(self._data)]
        return [*enter, *inside, *words]

    def output(self, *words: str) -> str:
        done = subprocess.run(self.command(list(words)), capture_output=True, text=True)
        return done.stdout + done.stderr


def output(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def check(image: Image) -> dict[str, Any]:
    """Facts about the image. Raises if one is not as it should be."""
    user = image.output("id", "-u").strip()
    assert user not in ("", "0"), "it runs as root"
    found = [each for each in COMPILERS if image.output("which", each).strip()]
    assert not found, f"it has {found}"
    touched = image.output("sh", "-c", "touch /opt/engine/x; touch /x; touch /data/x && echo kept")
    assert touched.count("Read-only file system") == 2 and "kept" in touched, touched
    entry, words = image.config["Entrypoint"], image.config["Cmd"]
    command = image.command([*entry, *words], LLM_ENGINE_SERVER__INSECURE_NO_AUTH="true")
    began = time.monotonic()
    server = subprocess.Popen(command, start_new_session=True)
    try:
        wait_until_ready(server)
        ready_s = time.monotonic() - began
        kind, *probe = image.health
        assert kind == "CMD", image.health
        healthy = subprocess.run(image.command(probe), check=False).returncode
        assert healthy == 0, "the health check fails"
        text = complete("The capital of France is")
        assert text, "it answers with nothing"
    finally:
        os.killpg(server.pid, signal.SIGTERM)
        status = server.wait(60)
    assert status == 0, f"it ended with status {status}"
    failing = subprocess.run(image.command(probe), capture_output=True).returncode
    assert failing != 0, "the health check of a dead server succeeds"
    size = sum(each.stat().st_size for each in image.root.rglob("*") if is_plain(each))
    return {"user": user, "ready_s": round(ready_s, 2), "text": text, "size_mb": size // 10**6}


def is_plain(path: Path) -> bool:
    return path.is_file() and not path.is_symlink()


def wait_until_ready(server: "subprocess.Popen[bytes]") -> None:
    deadline = time.monotonic() + READY_S
    while True:
        try:
            urllib.request.urlopen(f"{URL}/readyz", timeout=2).close()
        except OSError:
            assert server.poll() is None and time.monotonic() < deadline, "it is never ready"
            time.sleep(0.02)
        else:
            return


def complete(prompt: str) -> str:
    body = json.dumps({"prompt": prompt, "max_tokens": 8, "temperature": 0}).encode()
    request = urllib.request.Request(
        f"{URL}/v1/completions", body, {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        return str(json.load(answer)["choices"][0]["text"])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("image")
    models = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "engine" / "models"
    name = parser.parse_args().image
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder)
        cache = data / "cache" / "engine"
        shutil.copytree(models / "smollm2-135m-instruct", cache / "models/smollm2-135m-instruct")
        image = Image(name, data)
        try:
            user = image.config["User"]
            subprocess.run(["chown", "-R", f"{user}:{user}", folder], check=True)
            print(json.dumps(check(image)))
        finally:
            image.remove()


if __name__ == "__main__":
    sys.exit(main())

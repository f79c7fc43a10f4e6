"""Renders the Helm chart of deploy/ with Helm's own code.

`python -m tests.support.references.helm` writes the plain manifests in deploy/kubernetes, which are
the chart's for one model on a CPU.
"""

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import yaml

from tests.clients.environments import HELM, SCRIPTS

ROOT = Path(__file__).parents[3]
CHART = ROOT / "deploy/helm/engine"
EXAMPLE = ROOT / "examples/deploy_inference_server/kubernetes/values.yaml"
VALUES = [*sorted((CHART / "ci").glob("*.yaml")), EXAMPLE]
PLAIN = ROOT / "deploy/kubernetes/base/engine.yaml"
RENDER_TIMEOUT_S = 300.0
# Lines that are true of objects which Helm manages.
OF_HELM = re.compile(
    r"^ *(helm\.sh/|app\.kubernetes\.io/managed-by|annotations:\n *helm\.sh/).*\n", re.M
)


def render(jobs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each job (release, chart, values), the manifest or Helm's error, and the linter's
    result.
    """
    HELM.build()
    command = [HELM.program("python"), str(SCRIPTS / "helm_render.py")]
    done = subprocess.run(
        command,
        input=json.dumps(jobs),
        capture_output=True,
        text=True,
        timeout=RENDER_TIMEOUT_S,
        check=True,
    )
    found: list[dict[str, Any]] = json.loads(done.stdout)
    return found


def job(values: Path, chart: Path = CHART, release: str = "demo") -> dict[str, Any]:
    return {
        "release": release,
        "chart": str(chart),
        "values": yaml.safe_load(values.read_text()),
    }


def manifests(text: str) -> list[dict[str, Any]]:
    return [each for each in yaml.safe_load_all(text) if each]


def plain_manifests() -> str:
    """The manifests for one model on a CPU, without what is Helm's."""
    (made,) = render([job(CHART / "ci/cpu.yaml", release="engine")])
    text = OF_HELM.sub("", made["manifest"])
    return f"# The chart's objects for one model on a CPU. make manifests writes this file.\n{text}"


if __name__ == "__main__":
    PLAIN.write_text(plain_manifests())

"""The plain manifests of deploy/kubernetes, which the Helm chart renders. `make test-clients` runs
Helm itself.
"""

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.references.kubernetes_checks import VERSIONS, problems, schema_problems

FOLDER = Path(__file__).parents[3] / "deploy/kubernetes"


def objects(text: str) -> list[dict[str, Any]]:
    return [each for each in yaml.safe_load_all(text) if each]


@pytest.mark.seconds
@pytest.mark.parametrize("version", [VERSIONS[0], VERSIONS[-1]])
def test_kubernetes_manifests_are_valid(version: str) -> None:
    manifests = objects((FOLDER / "base/engine.yaml").read_text())
    assert {each["kind"] for each in manifests} >= {"Deployment", "Service", "NetworkPolicy"}
    assert problems(manifests) == []
    assert schema_problems(manifests, version) == []


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not here")
@pytest.mark.parametrize("folder", ["base", "gpu"])
def test_kustomize_builds_the_kubernetes_manifests(folder: str) -> None:
    command = ["kubectl", "kustomize", str(FOLDER / folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    manifests = objects(done.stdout)
    assert problems(manifests) == []
    (workload,) = [each for each in manifests if each["kind"] == "Deployment"]
    container = workload["spec"]["template"]["spec"]["containers"][0]
    assert ("--device=cuda" in container["args"]) is (folder == "gpu")
    assert ("nvidia.com/gpu" in container["resources"]["limits"]) is (folder == "gpu")

"""The chart of deploy/helm, rendered and linted by Helm's own code, and mistakes in it."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from engine import __version__
from tests.support.references import helm
from tests.support.references.kubernetes_checks import VERSIONS, problems, schema_problems

pytestmark = pytest.mark.clients

VERSION = "1.32"  # for mistakes; the right manifests are checked against all
HELPERS, MODELS = "templates/_helpers.tpl", "templates/models.yaml"
ROUTER, ACCESS, VALUES = "templates/router.yaml", "templates/access.yaml", "values.yaml"
# A mistake: the file, and what is replaced there by what.
MISTAKES = {
    "a misspelled field": (HELPERS, "readinessProbe:", "readynessProbe:"),
    "a probe of a path that is not there": (HELPERS, "path: /readyz", "path: /ready"),
    "a probe that kills what only loads": (HELPERS, "path: /livez", "path: /readyz"),
    "a probe of an unknown port": (HELPERS, "port: probes", "port: probe"),
    "a port that nothing listens on": (MODELS, "--port=8000", "--port=8080"),
    "an unknown flag": (MODELS, "--host=", "--hots="),
    "an unknown setting": (HELPERS, "__PROBE_PORT", "__PROBES_PORT"),
    "a kill before the drain": (MODELS, "add 5 (int $model.drainSeconds) 15", "add 5 5"),
    "root": (HELPERS, "runAsNonRoot: true", "runAsNonRoot: false"),
    "a writable root": (HELPERS, "readOnlyRootFilesystem: true", "privileged: false"),
    "capabilities": (HELPERS, "drop: [ALL]", "drop: [NET_RAW]"),
    "a volume that is not there": (MODELS, "name: models, mountPath", "name: model, mountPath"),
    "a service without pods": (
        HELPERS,
        'selector: {{- include "engine.selector" . | nindent 2 }}',
        "selector: {app: engine}",
    ),
    "a service of an unknown port": (HELPERS, "targetPort: http,", "targetPort: web,"),
    "a removed version of an API": (MODELS, "autoscaling/v2", "autoscaling/v2beta2"),
    "another removed version": (MODELS, "policy/v1", "policy/v1beta1"),
    "a scaler of nothing": (
        MODELS,
        "kind: {{ $model.kind }}, name: {{ $name }}",
        "kind: {{ $model.kind }}, name: engine",
    ),
    "a metric that is not there": (VALUES, "num_requests_waiting", "num_request_waiting"),
    "a monitor of an unknown port": (ACCESS, "- port: http", "- port: metrics"),
    "a policy for an unknown port": (ACCESS, "port: http}", "port: https}"),
    "a policy that keeps out Prometheus": (VALUES, "metadata.name: monitoring}", "name: mon}"),
    "a policy that keeps out the router": (ACCESS, '"component" "router")', '"component" "r")'),
    "a policy that keeps out gRPC": (ACCESS, "port: grpc}", "port: http}"),
    "a policy without names": (ACCESS, "port: 53}", "port: 443}"),
    "a monitor without TLS": (ACCESS, "scheme: https", "scheme: http"),
    "a monitor with another key": (ACCESS, '"metrics_token" "api_key"', '"admin_key" "api_key"'),
    "a secret without the key": (ACCESS, "  api_key:", "  apikey:"),
    "a route to no service": (ROUTER, ':{{ $.Values.service.port }}/v1"', ':8080/v1"'),
    "an open block": (MODELS, "{{- range $model.args }}", "{{- range $model.args"),
    "a value of a wrong type": (VALUES, "replicas: 1\n  args", "replicas: one\n  args"),
    "a value that is not there": ("values.schema.json", '"drainSeconds"', '"drainSecs"'),
}
# Mistakes that other values than autoscaled.yaml show.
SHOWN_BY = {
    "a policy that keeps out Prometheus": "guarded.yaml",
    "a policy that keeps out the router": "guarded.yaml",
    "a policy that keeps out gRPC": "guarded.yaml",
    "a policy without names": "guarded.yaml",
    "a monitor without TLS": "guarded.yaml",
    "a monitor with another key": "guarded.yaml",
    "a secret without the key": "statefulset.yaml",
    "a route to no service": "several-models.yaml",
}


def test_helm_chart_renders_valid_objects_for_every_values_file_and_kubernetes_version() -> None:
    assert len(helm.VALUES) == 8
    for path, made in zip(
        helm.VALUES, helm.render([helm.job(each) for each in helm.VALUES]), strict=True
    ):
        assert "error" not in made, (path.name, made)
        # 1 is information: the chart has no icon.
        assert {each["Severity"] for each in made["lint"]["Messages"]} <= {1}, path.name
        objects = helm.manifests(made["manifest"])
        assert problems(objects) == [], path.name
        for version in VERSIONS:
            assert schema_problems(objects, version) == [], path.name


def test_plain_manifests_equal_the_rendered_helm_chart() -> None:
    assert helm.PLAIN.read_text() == helm.plain_manifests(), "make manifests"
    chart = yaml.safe_load((helm.CHART / "Chart.yaml").read_text())
    assert chart["appVersion"] == __version__


def refused(made: dict[str, Any]) -> list[str]:
    if "error" in made:
        return [made["error"]]
    objects = helm.manifests(made["manifest"])
    return problems(objects) + schema_problems(objects, VERSION)


def test_mistakes_planted_in_the_helm_chart_are_caught(tmp_path: Path) -> None:
    jobs = []
    for name, (file, old, new) in MISTAKES.items():
        chart = tmp_path / name / "engine"
        shutil.copytree(helm.CHART, chart)
        text = (chart / file).read_text()
        assert old in text, (file, old)
        (chart / file).write_text(text.replace(old, new))
        values = helm.CHART / "ci" / SHOWN_BY.get(name, "autoscaled.yaml")
        jobs.append(helm.job(values, chart))
    made = dict(zip(MISTAKES, helm.render(jobs), strict=True))
    missed = [name for name, each in made.items() if not refused(each)]
    assert len(made) >= 20 and missed == []


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({}, "auth.existingSecret"),
        ({"defaults": {"replicas": 2}}, "can't share a volume"),
        ({"models": [{"name": "a b", "model": "x"}]}, "name"),
        ({"models": []}, "models"),
        ({"replicas": 2}, "replicas"),
        ({"auth": {"apiKey": "short"}}, "apiKey"),
        ({"inferencePool": {"enabled": True}}, "endpoint picker"),
    ],
)
def test_wrong_values_are_refused_with_a_reason(values: dict[str, Any], message: str) -> None:
    if values and "auth" not in values:
        values = {"auth": {"insecureNoAuth": True}} | values
    (made,) = helm.render([{"release": "demo", "chart": str(helm.CHART), "values": values}])
    assert message in made["error"]

"""The files of deploy/observability: a dashboard and alerts about metrics that exist."""

import json
import re
import runpy
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from engine.core.config_schema import ServerSettings

ROOT = Path(__file__).parents[4]
FOLDER = ROOT / "deploy" / "observability"
DASHBOARD = FOLDER / "grafana" / "dashboards" / "engine.json"
ALERTS = (FOLDER / "alerts.yml").read_text()
METRIC = re.compile(r"\b((?:engine_|vllm:)\w+)")
LABELS = re.compile(r"\{[^}]*\}|by \([^)]*\)")


def expressions() -> list[str]:
    """All queries of our dashboard."""
    panels: list[dict[str, Any]] = json.loads(DASHBOARD.read_text())["panels"]
    return [target["expr"] for panel in panels for target in panel.get("targets", ())]


def known_metrics() -> set[str]:
    """All series of the reference page, which is written from the code."""
    page = (ROOT / "docs" / "reference" / "metrics.md").read_text()
    known = set()
    for name, kind in re.findall(r"^\| `([^`]+)` \| (\w+)", page, re.M):
        known |= {f"{name}_{end}" for end in ("bucket", "sum", "count")}
        if kind != "histogram":
            known.add(name)
    return known


def test_dashboard_json_equals_the_output_of_its_script() -> None:
    script = runpy.run_path(str(FOLDER / "dashboard.py"))
    assert DASHBOARD.read_text() == script["text"](), "run deploy/observability/dashboard.py"
    panels = script["dashboard"]()["panels"]
    places = [tuple(panel["gridPos"].values()) for panel in panels]
    assert len(set(places)) == len(places) and len({panel["id"] for panel in panels}) == len(panels)


def test_dashboard_queries_and_alerts_use_existing_metrics() -> None:
    rules = "\n".join(
        line for line in ALERTS.splitlines() if "summary:" not in line and "#" not in line
    )
    asked = {
        name for text in (*expressions(), rules) for name in METRIC.findall(LABELS.sub(" ", text))
    }
    assert len(asked) > 25
    assert asked <= known_metrics()


def test_every_alert_has_a_test_case_that_fires_it() -> None:
    alerts = re.findall(r"- alert: (\w+)", ALERTS)
    fired = (FOLDER / "alerts_test.yml").read_text()
    assert len(alerts) > 10
    assert [name for name in alerts if f"- name: {name}\n" not in fired] == []


def test_the_prometheus_config_scrapes_the_default_address() -> None:
    # A server refuses names in `Host` that it does not know, such as those of containers.
    server = ServerSettings()
    scraping = (FOLDER / "prometheus.yml").read_text()
    assert f'- targets: ["{server.host}:{server.port}"]' in scraping
    services = yaml.safe_load((FOLDER.parent / "compose.yaml").read_text())["services"]
    for name in ("prometheus", "grafana"):
        assert services[name]["network_mode"] == "host"
    assert services["engine"]["ports"] == [f"{server.host}:{server.port}:8000"]


@pytest.mark.skipif(shutil.which("promtool") is None, reason="needs Debian's package prometheus")
def test_promtool_fires_each_alert() -> None:
    for arguments in (["test", "rules", "alerts_test.yml"], ["check", "config", "prometheus.yml"]):
        done = subprocess.run(["promtool", *arguments], cwd=FOLDER, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr

"""Checks of Kubernetes manifests: the schemas of Kubernetes, and what no schema knows, such as a
port, a setting or a flag that does not exist.
"""

import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import kubernetes_validate

from engine.cli.commands import COMMANDS, LazyCommand
from engine.core.config_schema import SECTIONS, Settings

Manifest = dict[str, Any]
VERSIONS = tuple(f"1.{minor}" for minor in range(28, 38))
METRICS = Path(__file__).parents[3] / "docs/reference/metrics.md"
# Kinds of other projects, of which Kubernetes has no schema.
FOREIGN = ("monitoring.coreos.com/", "inference.networking.k8s.io/")
WORKLOADS = ("Deployment", "StatefulSet")
QUANTITY = re.compile(r"\d+(\.\d+)?(m|k|Ki|M|Mi|G|Gi|T|Ti)?")
CLOSE_S = 10  # time to close connections, after the drain
KEY_FILE = re.compile(r"LLM_ENGINE_SERVER__\w+_KEY_FILE")


def schema_problems(manifests: Sequence[Manifest], version: str) -> list[str]:
    """What the schemas of a version of Kubernetes refuse. Unknown fields are refused too."""
    found = []
    for each in manifests:
        if each["apiVersion"].startswith(FOREIGN):
            continue
        try:
            kubernetes_validate.validate(each, version, strict=True)
        except kubernetes_validate.ValidationError as error:
            found.append(f"{version} {_title(each)}: {error.message}")
        except kubernetes_validate.SchemaNotFoundError as error:
            found.append(f"{version} {_title(each)}: {error}")
    return found


def _title(manifest: Manifest) -> str:
    return f"{manifest['kind']} {manifest['metadata']['name']}"


def problems(manifests: Sequence[Manifest]) -> list[str]:
    """What is wrong with manifests that belong together, apart from their schemas."""
    found: list[str] = []
    for each in manifests:
        if each["kind"] in WORKLOADS:
            found += [f"{_title(each)}: {what}" for what in _workload_problems(each, manifests)]
        found += [f"{_title(each)}: {what}" for what in _reference_problems(each, manifests)]
    return found


def _workload_problems(workload: Manifest, manifests: Sequence[Manifest]) -> Iterator[str]:
    spec = workload["spec"]
    labels = spec["template"]["metadata"]["labels"]
    if not _matches(spec["selector"]["matchLabels"], labels):
        yield "its selector does not match its pods"
    pod = spec["template"]["spec"]
    if not pod.get("securityContext", {}).get("runAsNonRoot"):
        yield "its pods may run as root"
    volumes = {each["name"] for each in pod.get("volumes", ())}
    volumes |= {each["metadata"]["name"] for each in spec.get("volumeClaimTemplates", ())}
    for container in (*pod.get("initContainers", ()), *pod["containers"]):
        yield from _container_problems(container, volumes)
    for container in pod["containers"]:
        yield from _serving_problems(container, pod, manifests)
    for volume in pod.get("volumes", ()):
        yield from _volume_problems(volume, manifests)


def _matches(selector: Mapping[str, str], labels: Mapping[str, str]) -> bool:
    return selector.items() <= labels.items()


def _container_problems(container: Manifest, volumes: set[str]) -> Iterator[str]:
    context = container.get("securityContext", {})
    if not context.get("readOnlyRootFilesystem"):
        yield "its root is writable"
    if context.get("allowPrivilegeEscalation") is not False:
        yield "it may gain rights"
    if context.get("capabilities", {}).get("drop") != ["ALL"]:
        yield "it keeps capabilities"
    for mount in container.get("volumeMounts", ()):
        if mount["name"] not in volumes:
            yield f"there is no volume {mount['name']}"
    if not {"/data", "/tmp"} <= {each["mountPath"] for each in container["volumeMounts"]}:
        yield "it has no place to write"
    resources = container["resources"]
    for name, amount in (*resources["requests"].items(), *resources["limits"].items()):
        if not QUANTITY.fullmatch(str(amount)):
            yield f"{amount} is no amount of {name}"
    if "memory" not in resources["limits"]:
        yield "its memory is not limited"


def _serving_problems(
    container: Manifest, pod: Manifest, manifests: Sequence[Manifest]
) -> Iterator[str]:
    ports = {each["name"]: each["containerPort"] for each in container["ports"]}
    settings = {each["name"]: each["value"] for each in container["env"]}
    yield from _setting_problems(settings)
    given = [*container["command"], *container["args"]]
    flags = dict(each.partition("=")[::2] for each in given if each.startswith("--"))
    for flag in flags.keys() - serve_flags():
        yield f"engine serve has no flag {flag}"
    bound = {"http": flags.get("--port"), "probes": settings.get(_setting("probe_port"))}
    if "grpc" in ports:
        bound["grpc"] = settings.get(_setting("grpc_port"))
    for name, port in bound.items():
        if str(ports.get(name)) != port:
            yield f"its port {name} is {ports.get(name)}, and the server listens on {port}"
    for kind, path in (("startup", "/readyz"), ("readiness", "/readyz"), ("liveness", "/livez")):
        probe = container.get(f"{kind}Probe", {}).get("httpGet", {})
        if probe.get("path") != path or probe.get("port") not in ports:
            yield f"its {kind} probe asks {probe}"
    pause = int(container["lifecycle"]["preStop"]["exec"]["command"][-1])
    drain = float(settings.get(_setting("drain_timeout_s"), Settings().server.drain_timeout_s))
    if pod.get("terminationGracePeriodSeconds", 30) < pause + drain + CLOSE_S:
        yield "it is killed before its requests are finished"
    mounts = {each["mountPath"]: each["name"] for each in container["volumeMounts"]}
    secrets = {each["name"]: each["secret"] for each in pod["volumes"] if "secret" in each}
    for name, value in settings.items():
        if KEY_FILE.fullmatch(name):
            folder, _, entry = value.rpartition("/")
            yield from _key_problems(secrets.get(mounts.get(folder, "")), entry, manifests)


def _setting(name: str) -> str:
    return f"LLM_ENGINE_SERVER__{name.upper()}"


def _key_problems(
    secret: Manifest | None, entry: str, manifests: Sequence[Manifest]
) -> Iterator[str]:
    if secret is None:
        yield f"the key {entry} is not mounted"
        return
    for each in manifests:
        is_secret = each["kind"] == "Secret" and each["metadata"]["name"] == secret["secretName"]
        if is_secret and entry not in each["stringData"]:
            yield f"the secret has no {entry}"


def _setting_problems(variables: Mapping[str, str]) -> Iterator[str]:
    for name in variables:
        if not name.startswith("LLM_ENGINE_"):
            continue
        section, _, field = name.removeprefix("LLM_ENGINE_").lower().partition("__")
        if section not in SECTIONS or field not in type(getattr(Settings(), section)).model_fields:
            yield f"there is no setting {name}"


def _volume_problems(volume: Manifest, manifests: Sequence[Manifest]) -> Iterator[str]:
    name = volume.get("configMap", {}).get("name")
    if name is not None and not _has(manifests, "ConfigMap", name):
        yield f"there is no ConfigMap {name}"


def _has(manifests: Sequence[Manifest], kind: str, name: str) -> bool:
    return any(each["kind"] == kind and each["metadata"]["name"] == name for each in manifests)


def _pods(manifests: Sequence[Manifest]) -> list[tuple[dict[str, str], set[str]]]:
    """Labels and names of the ports of all pods."""
    found = []
    for each in manifests:
        if each["kind"] in WORKLOADS:
            template = each["spec"]["template"]
            ports = {port["name"] for port in template["spec"]["containers"][0]["ports"]}
            found.append((template["metadata"]["labels"], ports))
    return found


def _reference_problems(manifest: Manifest, manifests: Sequence[Manifest]) -> Iterator[str]:
    spec, kind = manifest.get("spec", {}), manifest["kind"]
    if kind == "Service":
        yield from _port_problems(
            spec["selector"], [each["targetPort"] for each in spec["ports"]], manifests
        )
    elif kind == "NetworkPolicy":
        ports = [port["port"] for rule in spec["ingress"] for port in rule["ports"]]
        yield from _port_problems(spec["podSelector"]["matchLabels"], ports, manifests)
        yield from _policy_problems(spec, manifests)
    elif kind in ("PodDisruptionBudget", "InferencePool"):
        yield from _port_problems(spec["selector"]["matchLabels"], [], manifests)
    elif kind == "HorizontalPodAutoscaler":
        target = spec["scaleTargetRef"]
        if not _has(manifests, target["kind"], target["name"]):
            yield f"there is no {target['kind']} {target['name']}"
        for each in spec["metrics"]:
            if f"`{each['pods']['metric']['name']}`" not in METRICS.read_text():
                yield f"there is no metric {each['pods']['metric']['name']}"
    elif kind == "ServiceMonitor":
        ports_of_services = {
            port["name"]
            for each in manifests
            if each["kind"] == "Service"
            and _matches(spec["selector"]["matchLabels"], each["metadata"]["labels"])
            for port in each["spec"]["ports"]
        }
        for endpoint in spec["endpoints"]:
            if endpoint["port"] not in ports_of_services:
                yield f"no service has the port {endpoint['port']}"
            yield from _endpoint_problems(endpoint, manifests)
    elif kind == "ConfigMap":
        yield from _toml_problems(manifest["data"]["engine.toml"], manifests)


def _policy_problems(spec: Manifest, manifests: Sequence[Manifest]) -> Iterator[str]:
    """Who must get through: clients of gRPC, the router, Prometheus of another namespace, and if
    what goes out is limited, requests for names and those of the router.
    """
    peers = [each for rule in spec["ingress"] for each in rule["from"]]
    ports = {port["port"] for rule in spec["ingress"] for port in rule["ports"]}
    if any("grpc" in known for _, known in _pods(manifests)) and "grpc" not in ports:
        yield "it keeps out gRPC"
    kinds = {each["kind"] for each in manifests}
    if "ServiceMonitor" in kinds and not any(_is_monitoring(each) for each in peers):
        yield "it keeps out Prometheus"
    chosen = [each["podSelector"].get("matchLabels", {}) for each in peers if "podSelector" in each]
    for labels, _ in _pods(manifests):
        is_router = labels["app.kubernetes.io/component"] == "router"
        if is_router and not any(_matches(each, labels) for each in chosen):
            yield "it keeps out the router"
    if ("Egress" in spec["policyTypes"]) is not ("egress" in spec):
        yield "its kinds are not those of its rules"
    if "egress" in spec:
        names = {port["port"] for rule in spec["egress"] for port in rule.get("ports", ())}
        if 53 not in names:
            yield "its pods can't look up names"


def _is_monitoring(peer: Manifest) -> bool:
    labels = peer.get("namespaceSelector", {}).get("matchLabels", {})
    return bool(labels.get("kubernetes.io/metadata.name") == "monitoring")


def _endpoint_problems(endpoint: Manifest, manifests: Sequence[Manifest]) -> Iterator[str]:
    """How Prometheus reads metrics: by TLS if the servers speak it, and with what they accept."""
    names = {
        each["name"]
        for workload in manifests
        if workload["kind"] in WORKLOADS
        for each in workload["spec"]["template"]["spec"]["containers"][0]["env"]
    }
    speaks_tls = _setting("tls_cert_file") in names
    if speaks_tls is not (endpoint.get("scheme") == "https"):
        yield f"it speaks {endpoint.get('scheme', 'http')}, and the servers do not"
    if speaks_tls and not endpoint.get("tlsConfig", {}).get("serverName"):
        yield "it knows no name of the certificate, and asks addresses"
    key = endpoint.get("authorization", {}).get("credentials", {}).get("key")
    token = "LLM_ENGINE_METRICS__TOKEN_FILE"
    expected = "metrics_token" if token in names else "api_key"
    if _setting("api_key_file") in names and key != expected:
        yield f"it sends {key}, and the servers want {expected}"


def _port_problems(
    selector: Mapping[str, str], ports: Sequence[str], manifests: Sequence[Manifest]
) -> Iterator[str]:
    chosen = [known for labels, known in _pods(manifests) if _matches(selector, labels)]
    if not chosen:
        yield "it selects no pods"
    for port in ports:
        if not all(port in known for known in chosen):
            yield f"its pods have no port {port}"


def _toml_problems(text: str, manifests: Sequence[Manifest]) -> Iterator[str]:
    for name, backend in tomllib.loads(text).get("backends", {}).items():
        address = urlsplit(backend["base_url"])
        ports = [
            port["port"]
            for each in manifests
            if each["kind"] == "Service" and each["metadata"]["name"] == address.hostname
            for port in each["spec"]["ports"]
        ]
        if address.port not in ports:
            yield f"the backend {name} is at {address.netloc}, which is no service"


@cache
def serve_flags() -> frozenset[str]:
    params = LazyCommand("serve", *COMMANDS["serve"]).resolve().params
    return frozenset(name for each in params for name in (*each.opts, *each.secondary_opts))

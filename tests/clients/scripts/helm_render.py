"""Renders and lints a chart with Helm's own code, for several sets of values. Needs Python 3.12.

Helm only returns a manifest that a cluster has accepted. So a small server plays the cluster: it
knows the kinds of objects, has none of them and accepts all. Reads a list of jobs
from stdin and writes a list of {"manifest": ...} or {"error": ...}, with the result of the linter.
"""

import asyncio
import json
import sys
import tempfile
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import helm_sdkpy

KINDS = {
    "v1": ("ConfigMap", "Namespace", "PersistentVolumeClaim", "Pod", "Secret", "Service"),
    "apps/v1": ("Deployment", "StatefulSet"),
    "autoscaling/v2": ("HorizontalPodAutoscaler",),
    "inference.networking.k8s.io/v1": ("InferencePool",),
    "monitoring.coreos.com/v1": ("ServiceMonitor",),
    "networking.k8s.io/v1": ("NetworkPolicy",),
    "policy/v1": ("PodDisruptionBudget",),
}


def plural(kind):
    return kind.lower()[:-1] + "ies" if kind.endswith("y") else kind.lower() + "s"


def resources(version):
    return {
        "kind": "APIResourceList",
        "apiVersion": "v1",
        "groupVersion": version,
        "resources": [
            {
                "name": plural(kind),
                "singularName": "",
                "namespaced": kind != "Namespace",
                "kind": kind,
                "verbs": ["get", "list", "create", "patch", "update", "delete", "watch"],
            }
            for kind in KINDS[version]
        ],
    }


def groups():
    found = []
    for version in KINDS:
        group, _, number = version.rpartition("/")
        if group:
            entry = {"groupVersion": version, "version": number}
            found.append({"name": group, "versions": [entry], "preferredVersion": entry})
    return {"kind": "APIGroupList", "apiVersion": "v1", "groups": found}


class Cluster(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def answer(self, status, body):
        self.send(status, json.dumps(body).encode(), "application/json")

    def send(self, status, raw, media_type):
        self.send_response(status)
        self.send_header("content-type", media_type)
        self.send_header("content-length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw)

    def echo(self, status):
        """Accept an object: return it, in the encoding that it came in."""
        raw = self.rfile.read(int(self.headers.get("content-length") or 0))
        self.send(status, raw, self.headers["content-type"])

    def do_GET(self):
        path = self.path.partition("?")[0].strip("/")
        if path == "version":
            self.answer(200, {"major": "1", "minor": "32", "gitVersion": "v1.32.0"})
        elif path == "api":
            self.answer(200, {"kind": "APIVersions", "versions": ["v1"]})
        elif path == "apis":
            self.answer(200, groups())
        elif path.removeprefix("apis/").removeprefix("api/") in KINDS:
            self.answer(200, resources(path.removeprefix("apis/").removeprefix("api/")))
        elif path.endswith("secrets"):
            self.answer(
                200, {"kind": "SecretList", "apiVersion": "v1", "metadata": {}, "items": []}
            )
        else:
            missing = {"kind": "Status", "status": "Failure", "reason": "NotFound", "code": 404}
            self.answer(404, missing)

    def do_POST(self):
        self.echo(201)

    def do_PATCH(self):
        self.echo(200)

    do_PUT = do_PATCH


async def render(config, release, chart, values):
    install = helm_sdkpy.Install(config)
    try:
        made = await install.run(release, chart, values=values, wait=False, timeout=20)
        return {"manifest": made["manifest"]}
    except helm_sdkpy.HelmError as error:
        return {"error": str(error)}


async def main():
    asked = json.load(sys.stdin)
    server = ThreadingHTTPServer(("127.0.0.1", 0), Cluster)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    kubeconfig = json.dumps(
        {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [
                {"name": "c", "cluster": {"server": f"http://127.0.0.1:{server.server_port}"}}
            ],
            "users": [{"name": "u", "user": {"token": "t"}}],
            "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
            "current-context": "x",
        }
    )
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        file.write(kubeconfig)
        file.flush()
        config = helm_sdkpy.Configuration(namespace="demo", kubeconfig=file.name)
        json.dump([await answer(config, job) for job in asked], sys.stdout)


async def answer(config, job):
    made = await render(config, job["release"], job["chart"], job["values"])
    try:
        linted = await helm_sdkpy.Lint(config).run(job["chart"])
    except helm_sdkpy.HelmError as error:
        linted = {"error": str(error)}
    return made | {"lint": linted}


asyncio.run(main())

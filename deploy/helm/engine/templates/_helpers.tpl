{{/* Names and labels. A component is a model's name, or "router". */}}
{{- define "engine.name" -}}
{{- printf "%s-%s" .root.Release.Name .component | trunc 52 | trimSuffix "-" -}}
{{- end }}

{{- define "engine.selector" -}}
app.kubernetes.io/name: engine
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- end }}

{{- define "engine.labels" -}}
{{ include "engine.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version }}
{{- end }}

{{- define "engine.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end }}

{{- define "engine.secret" -}}
{{- if .Values.auth.existingSecret -}}
{{ .Values.auth.existingSecret }}
{{- else if .Values.auth.apiKey -}}
{{ .Release.Name }}-keys
{{- end -}}
{{- end }}

{{- define "engine.scheme" -}}
{{- ternary "https" "http" (ne .Values.tls.existingSecret "") -}}
{{- end }}

{{/* The volumes and mounts of keys and of the certificate. */}}
{{- define "engine.secretMounts" -}}
{{- if include "engine.secret" . }}
- {name: keys, mountPath: /etc/engine/keys, readOnly: true}
{{- end }}
{{- if .Values.tls.existingSecret }}
- {name: tls, mountPath: /etc/engine/tls, readOnly: true}
{{- end }}
{{- end }}

{{- define "engine.secretVolumes" -}}
{{- if include "engine.secret" . }}
- {name: keys, secret: {secretName: {{ include "engine.secret" . }}, defaultMode: 0440}}
{{- end }}
{{- with .Values.tls.existingSecret }}
- {name: tls, secret: {secretName: {{ . }}, defaultMode: 0440}}
{{- end }}
{{- end }}

{{- define "engine.hasMetricsToken" -}}
{{- ternary .Values.auth.metricsTokenInSecret (ne .Values.auth.metricsToken "") (ne .Values.auth.existingSecret "") -}}
{{- end }}

{{/* What the containers of models and of the router share. */}}
{{- define "engine.pod" -}}
automountServiceAccountToken: false
enableServiceLinks: false
{{- with .root.Values.imagePullSecrets }}
imagePullSecrets: {{ toJson . }}
{{- end }}
securityContext:
  runAsNonRoot: true
  runAsUser: 10001
  runAsGroup: 10001
  fsGroup: 10001
  seccompProfile: {type: RuntimeDefault}
{{- end }}

{{- define "engine.container" -}}
image: {{ include "engine.image" .root | quote }}
imagePullPolicy: {{ .root.Values.image.pullPolicy }}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities: {drop: [ALL]}
{{- end }}

{{- define "engine.serving" -}}
ports:
  - {name: http, containerPort: 8000}
  - {name: probes, containerPort: 8001}
  {{- if .root.Values.service.grpcPort }}
  - {name: grpc, containerPort: 9000}
  {{- end }}
# Ready means that a request would be answered now. Alive means that the event loop runs: a model that
# loads or an engine process that restarts is alive, so it is not killed.
startupProbe:
  httpGet: {path: /readyz, port: probes}
  periodSeconds: 1
  timeoutSeconds: 2
  failureThreshold: {{ .startupSeconds }}
readinessProbe:
  httpGet: {path: /readyz, port: probes}
  periodSeconds: 2
  timeoutSeconds: 2
  failureThreshold: 2
livenessProbe:
  httpGet: {path: /livez, port: probes}
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: 3
lifecycle:
  # A pod still gets requests for some seconds after it was told to stop. It serves them, then drains.
  preStop: {exec: {command: [sleep, "5"]}}
{{- end }}

{{- define "engine.environment" -}}
- {name: LLM_ENGINE_SERVER__PROBE_PORT, value: "8001"}
- {name: LLM_ENGINE_SERVER__DRAIN_TIMEOUT_S, value: {{ .drainSeconds | quote }}}
{{- if .root.Values.service.grpcPort }}
- {name: LLM_ENGINE_SERVER__GRPC_PORT, value: "9000"}
{{- end }}
{{- if include "engine.secret" .root }}
- {name: LLM_ENGINE_SERVER__API_KEY_FILE, value: /etc/engine/keys/api_key}
{{- if or .root.Values.auth.existingSecret .root.Values.auth.adminKey }}
- {name: LLM_ENGINE_SERVER__ADMIN_KEY_FILE, value: /etc/engine/keys/admin_key}
{{- end }}
{{- if eq (include "engine.hasMetricsToken" .root) "true" }}
- {name: LLM_ENGINE_METRICS__TOKEN_FILE, value: /etc/engine/keys/metrics_token}
{{- end }}
{{- else if .root.Values.auth.insecureNoAuth }}
- {name: LLM_ENGINE_SERVER__INSECURE_NO_AUTH, value: "true"}
{{- else }}
{{- fail "set auth.existingSecret or auth.apiKey, or auth.insecureNoAuth=true to serve without a key" }}
{{- end }}
{{- if .root.Values.tls.existingSecret }}
- {name: LLM_ENGINE_SERVER__TLS_CERT_FILE, value: /etc/engine/tls/tls.crt}
- {name: LLM_ENGINE_SERVER__TLS_KEY_FILE, value: /etc/engine/tls/tls.key}
{{- end }}
# Clients and gateways name the service, not the address that the server is bound to.
- {name: LLM_ENGINE_SERVER__ALLOWED_HOSTS, value: "*"}
{{- end }}

{{- define "engine.claim" -}}
accessModes: [{{ .accessMode }}]
{{- with .storageClassName }}
storageClassName: {{ . }}
{{- end }}
resources: {requests: {storage: {{ .size }}}}
{{- end }}

{{- define "engine.service" -}}
type: {{ .root.Values.service.type }}
selector: {{- include "engine.selector" . | nindent 2 }}
ports:
  - {name: http, port: {{ .root.Values.service.port }}, targetPort: http, appProtocol: {{ include "engine.scheme" .root }}}
  {{- if .root.Values.service.grpcPort }}
  - {name: grpc, port: {{ .root.Values.service.grpcPort }}, targetPort: grpc, appProtocol: {{ ternary "https" "kubernetes.io/h2c" (ne .root.Values.tls.existingSecret "") }}}
  {{- end }}
{{- end }}

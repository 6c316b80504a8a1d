{{- define "tidemill.labels" -}}
app.kubernetes.io/name: tidemill
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .role }}
{{- end }}

{{- define "tidemill.bus" -}}
{{- if .Values.bus.url -}}
{{- .Values.bus.url -}}
{{- else -}}
{{- $name := printf "%s-bus" .Release.Name -}}
{{- $servers := list -}}
{{- range until (int .Values.bus.servers) -}}
{{- $servers = append $servers (printf "nats://%s-%d.%s:4222" $name . $name) -}}
{{- end -}}
{{- join "," $servers -}}
{{- end -}}
{{- end }}

{{- /* Seconds for a pod to drain: those of the process, and half a minute for its checkpoint and its last messages. */ -}}
{{- define "tidemill.grace" -}}
{{- add 30 (dig "up" "drain_s" 60 .Values.config | int) -}}
{{- end }}

{{- /* The user of a process on the bus: "learner", or "actor-3" of the third index. */ -}}
{{- define "tidemill.user" -}}
{{- if eq .role "audit" }}viewer{{ else if has .role (list "learner" "router") }}{{ .role }}{{ else }}{{ .role }}-$(POD_INDEX){{ end -}}
{{- end }}

{{- /* A pod. role, root, values of the role, words of the command, probed, kind of its owner, extra volumes and mounts. */ -}}
{{- define "tidemill.pod" -}}
{{- $root := .root }}
{{- $auth := and .root.Values.bus.authSecret (ne .role "bus") }}
metadata:
  labels: {{- include "tidemill.labels" . | nindent 4 }}
  {{- if ne .role "bus" }}
  annotations: {tidemill/config: {{ toJson .root.Values.config | sha256sum | trunc 16 | quote }}}
  {{- end }}
spec:
  automountServiceAccountToken: false
  enableServiceLinks: false
  terminationGracePeriodSeconds: {{ include "tidemill.grace" $root }}
  {{- if eq .kind "Job" }}
  restartPolicy: Never
  {{- end }}
  securityContext:
    runAsNonRoot: true
    runAsUser: 1000
    runAsGroup: 1000
    fsGroup: 1000
    seccompProfile: {type: RuntimeDefault}
  {{- with .values.nodeSelector }}
  nodeSelector: {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with .values.tolerations }}
  tolerations: {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with .init }}
  initContainers:
  {{- range . }}
  - name: {{ .name }}
    image: {{ $.values.image | default $root.Values.image }}
    command: {{ .command | toJson }}
    workingDir: /tmp
    securityContext: {{- include "tidemill.confined" . | nindent 6 }}
    env: [{name: HOME, value: /tmp}]
    {{- with $root.Values.envSecret }}
    envFrom: [{secretRef: {name: {{ . }}}}]
    {{- end }}
    volumeMounts: {{- include "tidemill.mounts" $ | nindent 4 }}
  {{- end }}
  {{- end }}
  containers:
  - name: {{ .role }}
    image: {{ .values.image | default $root.Values.image }}
    command: {{ prepend .command "tidemill" | toJson }}
    workingDir: /tmp
    securityContext: {{- include "tidemill.confined" . | nindent 6 }}
    env:
    - {name: HOME, value: /tmp}
    - {name: POD_NAME, valueFrom: {fieldRef: {fieldPath: metadata.name}}}
    - {name: POD_IP, valueFrom: {fieldRef: {fieldPath: status.podIP}}}
    {{- if eq .kind "Job" }}
    - {name: POD_INDEX, valueFrom: {fieldRef: {fieldPath: "metadata.annotations['batch.kubernetes.io/job-completion-index']"}}}
    {{- else if eq .kind "StatefulSet" }}
    - {name: POD_INDEX, valueFrom: {fieldRef: {fieldPath: "metadata.labels['apps.kubernetes.io/pod-index']"}}}
    {{- end }}
    {{- if $auth }}
    - {name: TIDEMILL_BUS_CREDENTIALS, value: /auth/user.env}
    {{- end }}
    {{- range $name, $value := $root.Values.env }}
    - {name: {{ $name }}, value: {{ $value | quote }}}
    {{- end }}
    {{- with $root.Values.envSecret }}
    envFrom: [{secretRef: {name: {{ . }}}}]
    {{- end }}
    {{- with .values.resources }}
    resources: {{- toYaml . | nindent 6 }}
    {{- end }}
    {{- if .probed }}
    ports: [{name: probes, containerPort: 8080}{{ range .ports }}, {name: {{ .name }}, containerPort: {{ .port }}}{{ end }}]
    startupProbe: {httpGet: {path: /healthz, port: probes}, periodSeconds: 5, failureThreshold: 120}
    livenessProbe: {httpGet: {path: /healthz, port: probes}, periodSeconds: 10, timeoutSeconds: 5, failureThreshold: 12}
    readinessProbe: {httpGet: {path: /readyz, port: probes}, periodSeconds: 5, timeoutSeconds: 5}
    {{- end }}
    volumeMounts: {{- include "tidemill.mounts" . | nindent 4 }}
    {{- if $auth }}
    - {name: auth, mountPath: /auth/user.env, subPathExpr: {{ include "tidemill.user" . }}.env, readOnly: true}
    {{- end }}
  volumes:
  - {name: config, configMap: {name: {{ $root.Release.Name }}-config}}
  - {name: tmp, emptyDir: {}}
  - {name: shm, emptyDir: {medium: Memory}}
  {{- with $root.Values.dataClaim }}
  - {name: data, persistentVolumeClaim: {claimName: {{ . }}, readOnly: true}}
  {{- end }}
  {{- if $root.Values.bus.authSecret }}
  - {name: auth, secret: {secretName: {{ $root.Values.bus.authSecret }}, defaultMode: 0440}}
  {{- end }}
  {{- range .volumes }}
  {{- with .volume }}
  - {{ toJson . }}
  {{- end }}
  {{- end }}
{{- end }}

{{- define "tidemill.confined" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end }}

{{- define "tidemill.mounts" -}}
- {name: config, mountPath: /config, readOnly: true}
- {name: tmp, mountPath: /tmp}
- {name: shm, mountPath: /dev/shm}
{{- if .root.Values.dataClaim }}
- {name: data, mountPath: /data, readOnly: true}
{{- end }}
{{- range .volumes }}
{{- if .mount }}
- {{ toJson .mount }}
{{- end }}
{{- end }}
{{- end }}

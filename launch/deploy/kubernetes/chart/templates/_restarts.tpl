{{- /* Codes 2, 76 and 78 are final. 10 is drained (--drained-code), 75 not in time; a lost node is no failure of the program. */ -}}
{{- define "tidemill.restarts" -}}
backoffLimit: 1000
podReplacementPolicy: Failed
podFailurePolicy:
  rules:
  - {action: FailJob, onExitCodes: {operator: In, values: [2, 76, 78]}}
  - {action: Ignore, onExitCodes: {operator: In, values: [10, 75]}}
  - {action: Ignore, onPodConditions: [{type: DisruptionTarget, status: "True"}]}
{{- end }}

{{- /* Part of a Job's name. Kubernetes refuses to change the pods of a Job, so a changed one gets another name: an upgrade
makes the new Job and deletes the old one. template: of its pods. */ -}}
{{- define "tidemill.version" -}}
{{- printf "%s%s" (include "tidemill.restarts" .) .template | sha256sum | trunc 8 -}}
{{- end }}

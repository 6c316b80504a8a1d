"""The Helm chart and the Kustomize base, by the real programs, the schemas of Kubernetes and rules of our own."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.kubernetes.charts import (
    CHART,
    KUBERNETES,
    RUN,
    Object,
    objects,
    of_kind,
    output,
    pods,
    rendered,
    role_of,
    run,
)
from tests.kubernetes.scaled_object import SCALED_OBJECT
from tests.schema_kit import errors
from tidemill.bus import exit_codes
from tidemill.bus.server.auth import ACCOUNT, NO_ACCOUNT
from tidemill.bus.wire import subjects
from tidemill.launch.deploy.values_schema import schema

VALUES = Path(__file__).with_name("values")
CASES = {
    "default": [],
    "spot": [CHART / "spot.yaml"],
    **{file.stem: [file] for file in sorted(VALUES.glob("*.yaml"))},
}
VERSIONS = ("1.31.0", "1.33.0", "1.35.0", "1.37.0")
"""Versions of Kubernetes: the oldest that the chart accepts, and those in use."""
UNKNOWN_KIND = re.compile(r"WARN \S+ Couldn't find schema for kind ScaledObject with api version keda.sh/v1alpha1 .*")

case = pytest.mark.parametrize("case", CASES)


def validate(file: Path) -> None:
    """Check a file by the schemas of Kubernetes; a kind without a schema is an error, but for the one we check."""
    for version in VERSIONS:
        done = run("kubernetes-validate", "--kubernetes-version", version, "--strict", file)
        lines = [line for line in (done.stdout + done.stderr).splitlines() if not line.startswith("INFO")]
        assert not [line for line in lines if not UNKNOWN_KIND.fullmatch(line)] and not done.returncode, lines


@case
def test_helm_finds_nothing_wrong(case: str) -> None:
    words = [word for file in CASES[case] for word in ("--values", file)]
    assert "[WARNING]" not in output("helm", "lint", "--strict", CHART, *words)


@case
def test_rendered_objects_fit_the_schemas_of_kubernetes(case: str, tmp_path: Path) -> None:
    (tmp_path / "rendered.yaml").write_text(rendered(CASES[case]))
    validate(tmp_path / "rendered.yaml")


@case
def test_every_container_is_confined_and_probed_and_drains_in_time(case: str) -> None:
    documents = objects(rendered(CASES[case]))
    config = yaml.safe_load(of_kind(documents, "ConfigMap", "config")["data"]["run.yaml"])
    drain_s = config.get("up", {}).get("drain_s", 60)
    for owner, pod in pods(documents):
        assert pod["securityContext"]["runAsNonRoot"] and pod["securityContext"]["runAsUser"] == 1000
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert pod["terminationGracePeriodSeconds"] >= drain_s + 30, owner["metadata"]["name"]
        for container in [*pod["containers"], *pod.get("initContainers", ())]:
            confined = container["securityContext"]
            assert confined["readOnlyRootFilesystem"] and not confined["allowPrivilegeEscalation"]
            assert confined["capabilities"] == {"drop": ["ALL"]}
            mounted = {mount["name"] for mount in container["volumeMounts"]}
            claims = {claim["metadata"]["name"] for claim in owner["spec"].get("volumeClaimTemplates", ())}
            assert mounted <= {volume["name"] for volume in pod["volumes"]} | claims
        (container,) = pod["containers"]
        named = {variable["name"] for variable in container["env"]}
        words = [*container["command"], *(mount.get("subPathExpr", "") for mount in container["volumeMounts"])]
        assert {name for word in words for name in re.findall(r"\$\((\w+)\)", word)} <= named
        if role_of(owner) != "audit":
            paths = [container[f"{kind}Probe"]["httpGet"]["path"] for kind in ("startup", "liveness", "readiness")]
            assert paths == ["/healthz", "/healthz", "/readyz"]


@case
def test_jobs_end_for_codes_that_no_restart_cures_and_never_complete_by_a_drain(case: str) -> None:
    jobs = [document for document in objects(rendered(CASES[case])) if document["kind"] == "Job"]
    assert any(role_of(job) == "learner" for job in jobs)
    for job in jobs:
        fails, drained, disrupted = job["spec"]["podFailurePolicy"]["rules"]
        assert (fails["action"], set(fails["onExitCodes"]["values"])) == ("FailJob", set(exit_codes.FINAL))
        code, *rest = drained["onExitCodes"]["values"]
        assert (drained["action"], rest) == ("Ignore", [exit_codes.NOT_IN_TIME])
        assert (disrupted["action"], disrupted["onPodConditions"][0]["type"]) == ("Ignore", "DisruptionTarget")
        (container,) = job["spec"]["template"]["spec"]["containers"]
        if role_of(job) != "audit":
            place = container["command"].index("--drained-code")
            assert container["command"][place + 1] == str(code)


FIXED = ("completionMode", "podFailurePolicy", "podReplacementPolicy", "template")
"""Fields of a Job that Kubernetes refuses to change; ``completions`` of an indexed one follow its ``parallelism``."""


@pytest.mark.parametrize(
    ("value", "renamed"),
    [
        ("image=registry.example/tidemill:2", {"learner", "engine", "actor", "audit"}),
        ("config.learner.steps=7", {"learner", "engine", "actor", "audit"}),
        ("learner.nodeSelector.pool=big", {"learner"}),
        ("engines.count=5", set()),
    ],
)
def test_an_upgrade_changes_no_job_that_there_is(value: str, renamed: set[str]) -> None:
    """Kubernetes refuses a change of a Job. A changed one has another name, and an equal one its name."""
    words = [word for file in CASES["default"] for word in ("--values", file)]
    texts = [output("helm", "template", RUN, CHART, *words, *more) for more in ([], ["--set", value])]
    before, after = ({one["metadata"]["name"]: one for one in objects(text) if one["kind"] == "Job"} for text in texts)
    for name in before.keys() & after.keys():
        assert [before[name]["spec"].get(field) for field in FIXED] == [
            after[name]["spec"].get(field) for field in FIXED
        ]
    assert {role_of(after[name]) for name in after.keys() - before.keys()} == renamed
    assert {role_of(before[name]) for name in before.keys() - after.keys()} == renamed


def test_a_process_gets_the_password_of_its_own_user_alone() -> None:
    documents = objects(rendered(CASES["users"]))
    files = {}
    for role in ("learner", "engine", "actor", "audit"):
        (container,) = of_kind(documents, "Job", role)["spec"]["template"]["spec"]["containers"]
        (mount,) = [mount for mount in container["volumeMounts"] if mount["name"] == "auth"]
        assert {"name": "TIDEMILL_BUS_CREDENTIALS", "value": mount["mountPath"]} in container["env"]
        files[role] = mount["subPathExpr"]
    assert files == {
        "learner": "learner.env",
        "engine": "engine-$(POD_INDEX).env",
        "actor": "actor-$(POD_INDEX).env",
        "audit": "viewer.env",
    }


@pytest.mark.parametrize(("case", "account"), [("everything", ACCOUNT), ("deployments", NO_ACCOUNT)])
def test_keda_reads_the_queues_of_this_run(case: str, account: str) -> None:
    documents = objects(rendered(CASES[case]))
    scaled = [document for document in documents if document["kind"] == "ScaledObject"]
    rollouts = ["walk"] if case == "everything" else []
    for document in scaled:
        assert not list(errors(document, SCALED_OBJECT))
        target = document["spec"]["scaleTargetRef"]
        assert any(
            (owner["kind"], owner["metadata"]["name"]) == (target["kind"], target["name"])
            and "replicas" not in owner["spec"]
            for owner in documents
        )
        queues = [trigger["metadata"] for trigger in document["spec"]["triggers"]]
        assert {queue["stream"] for queue in queues} == {subjects.stream(RUN, subjects.TASKS)}
        trained = [subjects.consumer(subjects.Kind.TRAIN, rollout) for rollout in ("", *rollouts)]
        assert [queue["consumer"] for queue in queues] == trained
        assert {queue["account"] for queue in queues} == {account}
    assert [document["metadata"]["name"] for document in scaled] == [f"{RUN}-actor", f"{RUN}-engine"]


def test_the_check_of_scaled_objects_finds_what_is_wrong() -> None:
    (document, *_) = [one for one in objects(rendered(CASES["deployments"])) if one["kind"] == "ScaledObject"]

    def found(**changes: Any) -> list[str]:
        return list(errors({**document, "spec": {**document["spec"], **changes}}, SCALED_OBJECT))

    assert not found()
    assert found(minReplicaCount="1") and found(minReplicas=1) and found(scaleTargetRef={})
    (trigger, *_) = document["spec"]["triggers"]
    assert found(triggers=[{**trigger, "metadata": {**trigger["metadata"], "lagThreshold": 2}}])


def test_a_nats_of_yours_takes_the_place_of_the_bus() -> None:
    documents = objects(rendered(CASES["own_nats"]))
    assert not [one for one in documents if one["metadata"]["name"] == f"{RUN}-bus"]
    config = yaml.safe_load(of_kind(documents, "ConfigMap", "config")["data"]["run.yaml"])
    assert config["bus"] == {"url": "nats://nats:4222", "replicas": 3, "lease_s": 60}
    for _, pod in pods(documents):
        words = pod["containers"][0]["command"]
        assert words[words.index("--bus") + 1] == "nats://nats:4222"
    (trigger,) = of_kind(documents, "ScaledObject", "actor")["spec"]["triggers"]
    assert trigger["metadata"]["natsServerMonitoringEndpoint"] == "nats-headless:8222"


def test_keda_with_jobs_is_refused() -> None:
    done = run("helm", "template", RUN, CHART, "--set", "keda.enabled=true")
    assert done.returncode and "keda.enabled: want workers: Deployment" in done.stderr


def test_the_schema_of_the_values_is_the_one_of_the_settings() -> None:
    """After a change of a setting: make kustomize-base."""
    assert json.loads((CHART / "values.schema.json").read_text()) == schema()


@pytest.mark.parametrize(
    ("value", "place"),
    [
        ("config.learner.stepz=3", "/config/learner"),
        ("config.learner.steps=-3", "/config/learner/steps"),
        ("config.directory=/tmp", "/config"),
        ("config.bus.url=nats://elsewhere", "/config/bus"),
        ("bus.servers=2", "/bus/servers"),
        ("engine.count=2", "''"),
        ("workers=Daemon", "/workers"),
    ],
)
def test_a_wrong_value_is_refused_with_its_place(value: str, place: str) -> None:
    done = run("helm", "template", RUN, CHART, "--set", value)
    assert done.returncode and f"at '{place.strip(chr(39))}'" in done.stderr, done.stderr


def test_a_packaged_chart_is_the_chart(tmp_path: Path) -> None:
    output("helm", "package", CHART, "--destination", tmp_path)
    (package,) = tmp_path.glob("tidemill-*.tgz")
    for files in CASES.values():
        assert rendered(files, chart=package) == rendered(files)


def test_the_base_is_what_the_chart_makes_of_its_defaults() -> None:
    """After a change of the chart: make kustomize-base."""
    assert (KUBERNETES / "base/all.yaml").read_text() == rendered(name="tidemill")


def test_the_overlay_moves_engines_and_actors_alone_to_spot_nodes(tmp_path: Path) -> None:
    def by_name(directory: str) -> dict[tuple[str, str], Object]:
        documents = objects(output("kubectl", "kustomize", KUBERNETES / directory))
        return {(document["kind"], document["metadata"]["name"]): document for document in documents}

    base, spot = by_name("base"), by_name("spot")
    (tmp_path / "spot.yaml").write_text(yaml.safe_dump_all(spot.values()))
    validate(tmp_path / "spot.yaml")
    changed = {name for name, document in spot.items() if document != base[name]}
    assert base.keys() == spot.keys() and {name.rpartition("-")[0] for _, name in changed} == {
        "tidemill-engine",
        "tidemill-actor",
    }
    for name in changed:
        pod = spot[name]["spec"]["template"]["spec"]
        assert pod["nodeSelector"] and pod["tolerations"]

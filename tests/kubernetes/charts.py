"""The chart and the Kustomize base, rendered by the real helm and kubectl (`make helm`)."""

import os
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.whole.prepared import ROOT

KUBERNETES = ROOT / "launch/deploy/kubernetes"
CHART = KUBERNETES / "chart"
PROGRAMS = ROOT / os.environ.get("KUBERNETES", ".venv-kubernetes") / "bin"
RUN = "smoke"
"""Name of the release, which is the name of the run."""

Object = dict[str, Any]


def run(program: str, *words: str | Path) -> "subprocess.CompletedProcess[str]":
    """Run a program of ``make helm``; skip the test where it is missing."""
    if not (PROGRAMS / program).exists():
        pytest.skip(f"{PROGRAMS / program}: no such program; cure: make helm")
    return subprocess.run([PROGRAMS / program, *words], capture_output=True, text=True, timeout=120)


def output(program: str, *words: str | Path) -> str:
    """Return the output of a program, which must end with 0."""
    done = run(program, *words)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def rendered(values: Sequence[Path] = (), *, name: str = RUN, chart: Path = CHART) -> str:
    """Return the chart as text, with files of values."""
    return output("helm", "template", name, chart, *(word for file in values for word in ("--values", file)))


def objects(text: str) -> list[Object]:
    """Return the objects of a rendering."""
    return [document for document in yaml.safe_load_all(text) if document is not None]


def of_kind(documents: Sequence[Object], kind: str, name: str) -> Object:
    """Return one object by its kind and its name without that of the run."""
    (document,) = [document for document in documents if document["kind"] == kind and role_of(document) == name]
    return document


def role_of(document: Object) -> str:
    """Return the name of an object without those of its run and of the version of a Job."""
    name = str(document["metadata"]["name"]).removeprefix(f"{RUN}-")
    return name.rpartition("-")[0] if document["kind"] == "Job" else name


def pods(documents: Sequence[Object]) -> Iterator[tuple[Object, Object]]:
    """Yield (owner, specification) of each pod."""
    for document in documents:
        template: Mapping[str, Any] | None = document.get("spec", {}).get("template")
        if template is not None:
            yield document, template["spec"]

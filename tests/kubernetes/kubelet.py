"""Pods of a rendered chart as processes, started and stopped as a kubelet does: each in a machine of a lab
(``tests/net/lab.py``) with an address of its own, its environment, its volumes at their paths, a read-only root and
user 1000 without capabilities. There is no control plane: a test decides on replacements by the owner's rules.
"""

import asyncio
import contextlib
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.kubernetes.charts import Object
from tests.net.lab import Machine, Started
from tests.waits import LIMIT_S, until
from tests.whole.prepared import ROOT

SYSTEM = ("usr", "etc", "dev", "proc", "sys", "bin", "sbin", "lib", "lib64")
KEPT = (sys.base_prefix, sys.prefix, str(ROOT))
"""What an image would have: the interpreter, its packages, the sources."""
USER = "1000"
_INDEX = re.compile(r"metadata\.(annotations|labels)\['[a-z./-]+-index'\]")


@dataclass(kw_only=True)
class Node:
    """Where pods run: a machine for each, ConfigMaps and Secrets as files, and the claims, which outlive them."""

    directory: Path
    objects: Mapping[tuple[str, str], Object]
    """Rendered objects by kind and name."""
    secrets: Mapping[str, Path]
    """Directories with the files of Secrets."""

    def volume(self, volume: Object, pod: str) -> Path:
        """Return the directory of a volume. Raises KeyError for a kind that the chart does not use."""
        match volume:
            case {"configMap": {"name": name}}:
                directory = self._made("configs", str(name))
                for file, text in self.objects["ConfigMap", name]["data"].items():
                    (directory / file).write_text(text)
            case {"secret": {"secretName": name, "defaultMode": mode}}:
                directory = self._made("secrets", str(name))
                for file in self.secrets[name].iterdir():
                    shutil.copy(file, directory)
                    (directory / file.name).chmod(mode)
            case {"persistentVolumeClaim": {"claimName": name}}:
                directory = self._made("claims", str(name))
            case {"emptyDir": _}:
                directory = self._made("empty", pod, volume["name"])
                directory.chmod(0o777)
            case _:
                raise KeyError(f"volume: {volume}")
        subprocess.run(["chown", "-R", f":{USER}", directory], check=True)  # fsGroup
        if "secret" not in volume:
            subprocess.run(["chmod", "-R", "g+rwX", directory], check=True)
        return directory

    def _made(self, *names: str) -> Path:
        directory = self.directory.joinpath(*names)
        directory.mkdir(parents=True, exist_ok=True)
        return directory


@dataclass(kw_only=True)
class Pod:
    """One pod of an owner: a Job, a StatefulSet or a Deployment."""

    node: Node
    machine: Machine
    owner: Object
    index: int = 0
    suffix: str = ""
    """End of its name; a StatefulSet's pod has its index."""
    started: Started | None = field(default=None, init=False)

    @property
    def name(self) -> str:
        """Name of the pod."""
        parts = (self.owner["metadata"]["name"], str(self.index), self.suffix)
        return "-".join(part for part in parts if part)

    @property
    def specification(self) -> Object:
        """Specification of the pod."""
        result: Object = self.owner["spec"]["template"]["spec"]
        return result

    @property
    def log(self) -> Path:
        """File with the output of its containers."""
        return self.node.directory / f"{self.name}.log"

    async def start(self) -> None:
        """Run its init containers to their ends, and start its container."""
        for container in self.specification.get("initContainers", ()):
            ending = await asyncio.to_thread(self._run, container)
            assert await asyncio.to_thread(ending.wait, LIMIT_S) == 0, self.log.read_text()
        (container,) = self.specification["containers"]
        assert "lifecycle" not in container, "a preStop hook that nothing here runs"
        self.started = await asyncio.to_thread(self._run, container)

    async def ready(self) -> None:
        """Start it, and wait until its readiness probe succeeds."""
        await self.start()
        (container,) = self.specification["containers"]
        path = container["readinessProbe"]["httpGet"]["path"]
        await until(lambda: self._answers(path), alive=lambda: self.code() is None, every_s=0.2)

    def code(self) -> int | None:
        """Return the exit code of its container; None while it runs."""
        assert self.started is not None
        return self.started.poll()

    async def ended(self, within_s: float = LIMIT_S) -> int:
        """Wait until its container has ended, and return the exit code."""
        assert self.started is not None
        return await asyncio.to_thread(self.started.wait, within_s)

    async def stop(self) -> int:
        """Stop it as a kubelet does, and return the exit code, which must come within the grace period."""
        assert self.started is not None
        self.started.send(signal.SIGTERM)
        try:
            return await self.ended(self.specification["terminationGracePeriodSeconds"])
        except subprocess.TimeoutExpired:
            self.started.send(signal.SIGKILL)
            raise AssertionError(f"{self.name}: killed after its grace period:\n{self.tail()}") from None

    def tail(self) -> str:
        """Return the end of its log."""
        return self.log.read_text(errors="replace")[-3000:]

    async def _answers(self, path: str) -> bool:
        with contextlib.suppress(OSError):
            reader, writer = await asyncio.open_connection(self.machine.address, 8080)
            writer.write(
                f"GET {path} HTTP/1.1\r\nHost: {self.machine.address}:8080\r\nConnection: close\r\n\r\n".encode()
            )
            line = await reader.readline()
            writer.close()
            return line.split()[1:2] == [b"200"]
        return False

    def _run(self, container: Object) -> Started:
        variables = {variable["name"]: self._value(variable) for variable in container.get("env", ())}
        for name, value in variables.items():
            variables[name] = _expanded(value, variables)
        words = [_expanded(word, variables) for word in container["command"]]
        root = tempfile.mkdtemp(prefix="root-", dir=self.node.directory)
        variables |= {"PATH": f"{sys.prefix}/bin:/usr/bin:/bin", "LANG": "C.UTF-8"}
        env = shlex.join(["env", "-i", f"--chdir={container['workingDir']}"])
        pairs = shlex.join([f"{name}={value}" for name, value in variables.items()])
        confined = f"setpriv --reuid {USER} --regid {USER} --clear-groups --bounding-set=-all --no-new-privs"
        script = [
            *self._mounts(root, container, variables),
            f"exec chroot {root} {confined} {env} {pairs} {shlex.join(words)}",
        ]
        command = ["unshare", "--mount", "sh", "-ec", "\n".join(script)]
        return self.machine.start(command, log=self.log)

    def _mounts(self, root: str, container: Object, variables: Mapping[str, str]) -> list[str]:
        """Return lines of shell that make the root of a container: system, volumes, what an image has; read-only."""
        lines = [f"mount -t tmpfs -o mode=755 root {root}"]
        for name in SYSTEM:
            path, place = Path("/", name), f"{root}/{name}"
            if path.is_symlink():
                lines.append(f"ln -s {path.readlink()} {place}")
            elif path.exists():
                lines.append(f"mkdir {place}; mount --rbind {path} {place}")
        volumes = {volume["name"]: volume for volume in self.specification["volumes"]}
        for template in self.owner["spec"].get("volumeClaimTemplates", ()):
            name = template["metadata"]["name"]
            claim = {"claimName": f"{name}-{self.owner['metadata']['name']}-{self.index}"}
            volumes[name] = {"name": name, "persistentVolumeClaim": claim}
        for mount in container["volumeMounts"]:
            source, place = self.node.volume(volumes[mount["name"]], self.name), f"{root}{mount['mountPath']}"
            if "subPathExpr" in mount:
                source /= _expanded(mount["subPathExpr"], variables)
                lines.append(f"mkdir -p $(dirname {place}); touch {place}")
            else:
                lines.append(f"mkdir -p {place}")
            lines.append(f"mount --bind {source} {place}")
            if mount.get("readOnly"):
                lines.append(f"mount -o remount,bind,ro {place}")
        for path in dict.fromkeys(KEPT):
            lines.append(
                f"mkdir -p {root}{path}; mount --bind {path} {root}{path}; mount -o remount,bind,ro {root}{path}"
            )
        return [*lines, f"mount -o remount,ro {root}"]

    def _value(self, variable: Object) -> str:
        if "value" in variable:
            return str(variable["value"])
        path = variable["valueFrom"]["fieldRef"]["fieldPath"]
        if _INDEX.fullmatch(path):
            return str(self.index)
        return {"metadata.name": self.name, "status.podIP": self.machine.address}[path]


def _expanded(text: str, variables: Mapping[str, Any]) -> str:
    return re.sub(r"\$\((\w+)\)", lambda match: str(variables[match[1]]), text)

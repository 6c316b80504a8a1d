"""Machines on one machine: sets of Linux namespaces with links to one bridge. Wants root on Linux, iproute2, nftables
and util-linux.

    with Lab(tmp_path, "bus", "node") as lab:
        child = lab["node"].start([sys.executable, "-m", "tidemill", "learner", ...], log=tmp_path / "node.log")
        lab["node"].cut(); lab["node"].heal(); lab["node"].vanish(); lab["node"].boot()

Each machine has its own network, host name, hosts file, process ids, /dev/shm, and a disk (``Lab.disk``) that no other
machine sees and that stays when it is off; all other files are those of this machine. No namespace has a name and none
outlives its first process, which the kernel ends with the test process, however that ends. So nothing of a killed test
is left over, labs beside each other cannot meet, and the network of this machine sees neither bridge nor addresses.
"""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import IO, Self

from tests.net.entered import Entered, forked_words
from tests.programs import missing

PROGRAMS = ("ip", "tc", "nft", "unshare", "nsenter", "setpriv")
INIT = "while :; do sleep 3600 & wait; done"
"""The first process of a machine: it reaps, as it becomes the parent of processes that have lost theirs."""
MADE_S = 120.0
ENDED_S = 30.0
HOSTS = "127.0.0.1 localhost\n::1 localhost\n"
TRAP = HOSTS + "127.0.1.1 {name}\n"
"""Hosts file as Debian's installer writes it: the machine's own name is an address of the loopback interface, and peers
have no names.
"""


class NoLab(RuntimeError):
    """A machine cannot be made here."""


def sh(*words: str, feed: str | None = None, check: bool = True) -> str:
    """Run a command and return its output. Raises NoLab with its error unless ``check`` is False."""
    done = subprocess.run(words, capture_output=True, text=True, input=feed, timeout=MADE_S)
    if check and done.returncode:
        raise NoLab(f"{' '.join(words)}: {done.stderr.strip()}")
    return done.stdout


@cache
def why_not() -> str:
    """Return why there can be no lab here; empty if there can: one with two machines is made and removed."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "network namespaces: want root on Linux"
    if packages := missing(PROGRAMS):
        return f"network namespaces: want {', '.join(packages)}"
    try:
        with tempfile.TemporaryDirectory() as directory, Lab(Path(directory), "a", "b") as lab:
            lab["a"].lose(1)
            lab["a"].limit("100mbit")
            lab["a"].run("true")
    except (NoLab, OSError) as error:  # not a timeout: a slow machine is no reason to skip
        return f"network namespaces: {error}"
    return ""


class Started:
    """A process of a machine. ``pid`` is its id outside of the machine."""

    def __init__(self, entering: "subprocess.Popen[bytes] | Entered", log: Path) -> None:
        self._entering, self.log_file = entering, log
        self.pid = _child_of(entering)

    @property
    def log(self) -> str:
        """Everything that it has printed so far."""
        return self.log_file.read_text(errors="replace")

    def poll(self) -> int | None:
        """Return its exit code, negative for a signal; None while it runs."""
        return self._entering.poll()

    def wait(self, within_s: float = ENDED_S) -> int:
        """Wait for its end and return its exit code. Raises subprocess.TimeoutExpired."""
        return self._entering.wait(within_s)

    def send(self, number: signal.Signals) -> None:
        """Send it a signal, unless it has ended."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def end(self, within_s: float = ENDED_S, *, signalled: bool = False) -> int:
        """Drain it by SIGTERM, or kill it after ``within_s``; return its exit code.

        ``signalled``: it has the SIGTERM already; a second one, a second later, would end it at once.
        """
        if not signalled:
            self.send(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.wait(within_s)
        self.send(signal.SIGKILL)
        return self.wait()


class Machine:
    """One machine: off until ``boot``."""

    def __init__(self, lab: "Lab", number: int, name: str) -> None:
        self._lab, self._number, self.name = lab, number, name
        self._init = _Namespaces()
        self.disk = lab.directory / "disks" / name
        """Disk of the machine, as a directory on the host."""
        self.address = f"fd77::{number + 10:x}" if lab.is_ipv6 else f"10.77.0.{number + 10}"
        self._link = f"m{number}"
        """Outer end of its link, in the switch."""
        self._dropped: list[tuple[str, str]] = []
        self._started: list[Started] = []

    @property
    def init(self) -> int:
        """Id of the machine's first process, outside of its namespaces."""
        return self._init.pid

    @property
    def in_url(self) -> str:
        """Address of the machine as in a URL."""
        return f"[{self.address}]" if ":" in self.address else self.address

    def boot(self) -> None:
        """Start it: a new set of namespaces with the name, the address and the link that it had. Raises NoLab."""
        hosts = self._lab.directory / f"{self.name}.hosts"
        hosts.write_text(self._lab.hosts_of(self))
        self.disk.mkdir(parents=True, exist_ok=True)
        setting_up = (
            f"mount --bind {hosts} /etc/hosts",
            "mount --bind /dev/null /etc/resolv.conf",
            "mount -t tmpfs shm /dev/shm",
            f"mount --bind {self.disk} {self._lab.disk}",
            f"mount -t tmpfs none {self.disk.parent}",  # the disks of the others
            f"hostname {self.name}",
        )
        self._init.start(("--net", "--uts", "--mount", "--pid", "--mount-proc"), "; ".join(setting_up))
        switch, mac = (
            self._lab.switch,
            f"02:77:00:00:00:{self._number + 10:02x}",
        )  # of the card, as it was before a restart
        switch.sh("ip", "link", "del", self._link, check=False)
        switch.sh(
            "ip",
            "link",
            "add",
            self._link,
            "type",
            "veth",
            "peer",
            "name",
            "eth0",
            "address",
            mac,
            "netns",
            str(self._init.pid),
        )
        switch.sh("ip", "link", "set", self._link, "master", "switch", "up")
        bits, options = (64, ("nodad",)) if self._lab.is_ipv6 else (24, ())
        self._init.sh("ip", "addr", "add", f"{self.address}/{bits}", "dev", "eth0", *options)
        for link in ("lo", "eth0"):
            self._init.sh("ip", "link", "set", link, "up")
        for table in self._dropped:
            self._drop(*table)

    def start(
        self, command: Sequence[str], *, log: Path, env: Mapping[str, str] | None = None, cwd: Path | None = None
    ) -> Started:
        """Start a process there, with this process's environment and ``env``; it ends with the machine."""
        self._started.append(Started(self._entering(command, log, env or {}, cwd or Path.cwd()), log))
        return self._started[-1]

    def _entering(
        self, command: Sequence[str], log: Path, env: Mapping[str, str], cwd: Path
    ) -> "subprocess.Popen[bytes] | Entered":
        if words := forked_words(command):
            return Entered(self._init.pid, words, env, log, cwd)
        inside = [
            "nsenter",
            "-t",
            str(self._init.pid),
            "-n",
            "-u",
            "-m",
            "-p",
            f"--wd={cwd}",
            "--",
            *command,
        ]
        with log.open("ab") as output:
            return subprocess.Popen(
                inside, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env={**os.environ, **env}
            )

    def run(self, *command: str, within_s: float = MADE_S) -> str:
        """Run a command there to its end and return its output. Raises NoLab with its errors."""
        inside = ["nsenter", "-t", str(self._init.pid), "-n", "-u", "-m", "-p", f"--wd={os.getcwd()}", "--", *command]
        done = subprocess.run(inside, capture_output=True, text=True, timeout=within_s)
        if done.returncode:
            raise NoLab(f"{self.name}: {' '.join(command)}: {done.stdout} {done.stderr}")
        return done.stdout

    @contextlib.contextmanager
    def inside(self) -> Iterator[None]:
        """While entered, sockets that this thread makes are those of the machine."""
        with self._init.network():
            yield

    def cut(self) -> None:
        """Take its link down: nothing arrives, nothing leaves, and no connection is notified."""
        self._lab.switch.sh("ip", "link", "set", self._link, "down")

    def heal(self) -> None:
        """Bring its link up again."""
        self._lab.switch.sh("ip", "link", "set", self._link, "up")

    def vanish(self) -> None:
        """Lose power: the link goes first, so that no peer receives a FIN or RST, then all processes."""
        self.cut()
        self.off()

    def lose(self, percent: float) -> None:
        """Drop a share of the packets that arrive; 0 = none."""
        self._init.sh("nft", "delete", "table", "inet", "loss", check=False)
        if percent:
            self._filter("loss", f"numgen random mod 1000 < {round(percent * 10)} drop" if percent < 100 else "drop")

    def limit(self, rate: str) -> None:
        """Limit the rate at which it sends, such as 100mbit; "" = no limit."""
        self._init.sh("tc", "qdisc", "del", "dev", "eth0", "root", check=False)
        if rate:
            self._init.sh(
                "tc", "qdisc", "add", "dev", "eth0", "root", "tbf", "rate", rate, "burst", "64k", "latency", "200ms"
            )

    def drop_from(self, other: "Machine") -> None:
        """Drop the packets that arrive from another machine: one direction of two. ``receive_all`` ends it."""
        table = (f"from_{other.name}", f"{'ip6' if ':' in other.address else 'ip'} saddr {other.address} drop")
        self._dropped.append(table)
        self._drop(*table)

    def receive_all(self) -> None:
        """Drop no packets of other machines any more."""
        for name, _ in self._dropped:
            self._init.sh("nft", "delete", "table", "inet", name)
        self._dropped.clear()

    def off(self) -> None:
        """End its processes and namespaces."""
        self._init.end()
        for started in self._started:
            started.wait()
        self._started.clear()

    def _drop(self, table: str, rule: str) -> None:
        self._filter(table, rule)

    def _filter(self, table: str, rule: str) -> None:
        chain = (
            f"table inet {table} {{\n chain in {{\n type filter hook input priority 0; policy accept;\n iifname "
            f'"eth0" {rule}\n }}\n}}\n'
        )
        self._init.sh("nft", "-f", "-", feed=chain)


class Lab:
    """Machines, and the bridge (``switch``) that connects them, in a network of its own."""

    def __init__(self, directory: Path, *names: str, is_ipv6: bool = False, hosts: str = "") -> None:
        """``hosts``: text of every machine's hosts file, with {name}; default: the names of all machines."""
        self.directory, self.is_ipv6, self._hosts = directory, is_ipv6, hosts
        self.disk = directory / "disk"
        """The disk of a machine, as its processes see it."""
        self.disk.mkdir()
        self.switch = _Namespaces()
        self.machines = {name: Machine(self, number, name) for number, name in enumerate(names)}

    def __getitem__(self, name: str) -> Machine:
        return self.machines[name]

    def hosts_of(self, machine: Machine) -> str:
        """Return the text of a machine's hosts file."""
        names = "".join(f"{other.address} {other.name}\n" for other in self.machines.values())
        return self._hosts.format(name=machine.name) if self._hosts else HOSTS + names

    def __enter__(self) -> Self:
        try:
            self.switch.start(("--net", "--pid"), "true")
            self.switch.sh("ip", "link", "add", "switch", "type", "bridge")
            self.switch.sh("ip", "link", "set", "switch", "up")
            for machine in self.machines.values():
                machine.boot()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End all processes; the namespaces and links go with them."""
        for machine in self.machines.values():
            machine.off()
        self.switch.end()


class _Namespaces:
    """A set of namespaces, kept by its first process."""

    def __init__(self) -> None:
        self._holder: subprocess.Popen[bytes] | None = None
        self.pid = 0
        """Id of the first process of the namespaces."""

    def start(self, kinds: Sequence[str], setting_up: str) -> None:
        """Make the namespaces, and run a line of shell in them. Raises NoLab with its error."""
        # The death signal comes from the thread that starts the process: the test's main one.
        command = ["setpriv", "--pdeathsig", "KILL", "unshare", *kinds, "--fork", "--kill-child=KILL"]
        script = f"set -e; {setting_up}; echo ready; exec >/dev/null 2>&1; {INIT}"
        self._holder = subprocess.Popen(
            [*command, "sh", "-c", script], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        assert self._holder.stdout is not None
        said = self._holder.stdout.readline()
        if said != b"ready\n":
            raise NoLab(f"unshare {' '.join(kinds)}: {(said + self._holder.stdout.read()).decode().strip()}")
        self.pid = _child_of(self._holder)

    def sh(self, *words: str, feed: str | None = None, check: bool = True) -> str:
        """Run a command in the network of this set. Raises NoLab."""
        return sh("nsenter", "-t", str(self.pid), "-n", *words, feed=feed, check=check)

    @contextlib.contextmanager
    def network(self) -> Iterator[None]:
        """While entered, this thread is in the network of this set."""
        import ctypes

        set_ns = ctypes.CDLL(None, use_errno=True).setns
        with open("/proc/thread-self/ns/net") as home, open(f"/proc/{self.pid}/ns/net") as there:
            _entered(set_ns(there.fileno(), 0), there)
            try:
                yield
            finally:
                _entered(set_ns(home.fileno(), 0), home)

    def end(self) -> None:
        """Kill the first process, and with it all others of its process ids."""
        if self._holder is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid or self._holder.pid, signal.SIGKILL)
        self._holder.wait(ENDED_S)
        if self._holder.stdout is not None:
            self._holder.stdout.close()
        self._holder = None


def _entered(code: int, namespace: "IO[str]") -> None:
    if code:
        raise NoLab(f"setns {namespace.name}: {code}")


def _child_of(parent: "subprocess.Popen[bytes] | Entered") -> int:
    """Return the one child of a process that makes a child and waits for it; its own id if it ended without. Raises
    NoLab.
    """
    children = Path(f"/proc/{parent.pid}/task/{parent.pid}/children")
    deadline = time.monotonic() + MADE_S
    while time.monotonic() < deadline:
        try:
            if found := children.read_text().split():
                return int(found[0])
        except FileNotFoundError:
            return parent.pid
        if parent.poll() is not None:
            return parent.pid
        time.sleep(0.002)
    raise NoLab(f"process {parent.pid} has made no child in {MADE_S:g} s")

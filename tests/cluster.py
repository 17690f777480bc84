"""A throw-away Slurm on one machine: munged, slurmctld and some slurmd, without systemd or cgroups; as root.

`python tests/cluster.py start FOLDER` and `stop FOLDER` for a person, the class `Cluster` for a test. With network
namespaces (the default) each node has its own host name, address, loopback and ports; the files are shared, as on a
cluster with a common file system. Node names are not host names: n1 is the host that calls itself n1-host.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import cluster_conf

PACKAGES = ("slurmctld", "slurmd", "slurm-client", "slurm-wlm-basic-plugins", "munge", "iproute2")
_COMMANDS = (
    "munged",
    "slurmctld",
    "slurmd",
    "sbatch",
    "srun",
    "scontrol",
    "squeue",
    "sinfo",
    "ip",
    "nsenter",
    "unshare",
)
_HOSTS = Path("/etc/hosts")


def unable() -> str | None:
    """Why this machine cannot run a Slurm, or None."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "a Slurm of one's own needs Linux and root"
    missing = [name for name in _COMMANDS if _which(name) is None]
    if missing:
        return f"{', '.join(missing)} missing: apt-get install --no-install-recommends {' '.join(PACKAGES)}"
    tried = subprocess.run(["unshare", "--net", "--uts", "true"], capture_output=True, text=True, check=False)
    return f"no network namespaces: {tried.stderr.strip()}" if tried.returncode else None


def _which(name: str) -> str | None:
    return shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")


class Failed(Exception):
    """A command of Slurm's failed, or something did not happen in time."""


class Cluster:
    """A running Slurm; made by `start`, or `of` an earlier start's.

    nodes: names of the default partition's, in order. apart: those of further partitions, by name. work: its files.
    """

    def __init__(
        self, work: Path, run: Path, port: int, nodes: list[str], apart: dict[str, list[str]], subnet: str, bridge: str
    ) -> None:
        self.work, self.run, self.port = work, run, port
        self.nodes, self.apart, self.subnet, self.bridge = nodes, apart, subnet, bridge

    @property
    def all_nodes(self) -> list[str]:
        return [*self.nodes, *(node for names in self.apart.values() for node in names)]

    # -- for tests: asking ---------------------------------------------------------------------------------------

    @property
    def conf(self) -> Path:
        return self.work / "etc" / "slurm.conf"

    def env(self, **extra: str) -> dict[str, str]:
        """Variables for a user of this cluster: this Python first in PATH, one thread, nothing of another Slurm's."""
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "SBATCH_", "MPDIST_"))}
        path = f"{Path(sys.executable).parent}:{kept.get('PATH', '')}:/usr/sbin:/sbin"
        return {**kept, "PATH": path, "SLURM_CONF": str(self.conf), "OMP_NUM_THREADS": "1", **extra}

    def call(
        self, *command: str, cwd: Path | None = None, timeout: float = 60, status: int | None = 0, **env: str
    ) -> str:
        """Standard output of a command; raises Failed with all it printed where its status is another than expected."""
        done = subprocess.run(
            command,
            cwd=cwd or self.work,
            env=self.env(**env),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )
        if status is not None and done.returncode != status:
            raise Failed(f"{' '.join(command)}: status {done.returncode}\n{done.stdout}{done.stderr}")
        return done.stdout

    def sbatch(self, *arguments: str, cwd: Path, **env: str) -> str:
        """The id of a submitted job."""
        return self.call("sbatch", "--parsable", *arguments, cwd=cwd, **env).strip().partition(";")[0]

    def job(self, job: str) -> dict[str, str]:
        """What `scontrol show job` says, by its names."""
        text = self.call("scontrol", "--oneliner", "show", "job", job)
        return {m[1]: m[2] for m in re.finditer(r"(?:^| )([A-Za-z][\w:/]*)=(.*?)(?= [A-Za-z][\w:/]*=|\s*$)", text)}

    def state(self, job: str) -> str:
        return self.job(job)["JobState"]

    def restarts(self, job: str) -> int:
        return int(self.job(job)["Restarts"])

    def wait(self, job: str, *states: str, timeout: float = 90) -> str:
        """Wait until the job is in one of these states (default: any that is final); which it is."""
        final = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED")
        wanted = states or final
        deadline = time.monotonic() + timeout
        while (state := self.state(job)) not in wanted:
            if time.monotonic() > deadline or (state in final and states):
                raise Failed(f"job {job} is {state}, not {' or '.join(wanted)}\n{self.output(job)}")
            time.sleep(0.5)
        return state

    def hurry(self, job: str, restart: int, timeout: float = 180, **update: str) -> None:
        """Wait until the job was queued again so often, and have it start now: Slurm lets two minutes pass.

        A node takes a job that starts in the second of its end for the one that it has just killed. update: what else
        `scontrol update` is to change first.
        """
        deadline = time.monotonic() + timeout
        while int((known := self.job(job))["Restarts"]) < restart or known["JobState"] == "COMPLETING":
            if time.monotonic() > deadline or known["JobState"] in ("COMPLETED", "FAILED", "CANCELLED"):
                raise Failed(f"job {job} is {known['JobState']}, not queued again\n{self.output(job)}")
            time.sleep(0.5)
        if self.state(job) == "PENDING":  # after the loss of a node it may not have to wait
            time.sleep(2)
            changes = [f"{key}={value}" for key, value in update.items()]
            self.call("scontrol", "update", f"jobid={job}", *changes, "StartTime=now", status=None)
        self.wait(job, "RUNNING", timeout=timeout)

    def output(self, job: str) -> str:
        """What the job has printed, its last attempt after the earlier ones."""
        path = Path(self.job(job).get("StdOut", "/dev/null"))
        return path.read_text(errors="replace") if path.is_file() else ""

    def queue(self) -> list[str]:
        return self.call("squeue", "--noheader", "--format=%i %T").splitlines()

    def processes(self, job: str, node: str | None = None) -> list[int]:
        """Processes that a job has left or is running (on one node, or anywhere); not Slurm's own."""
        found = []
        for pid, env, command in _processes():
            ours = env.get("SLURM_CONF") == str(self.conf) and env.get("SLURM_JOB_ID") == job
            here = env.get("SLURMD_NODENAME") if node is None else env.get("SLURMD_NODENAME") == node
            if ours and here and not Path(command).name.startswith(("slurm", "srun")):
                found.append(pid)
        return found

    def left_by(self, job: str, node: str | None = None, timeout: float = 20) -> list[str]:
        """Commands of a job that has ended (or on a node that it has left) which do not end in time; [] if all do."""
        deadline = time.monotonic() + timeout
        while (pids := self.processes(job, node)) and time.monotonic() < deadline:
            time.sleep(0.1)
        return [_command(pid) for pid in pids]

    # -- for tests: faults ---------------------------------------------------------------------------------------

    def kill_node(self, node: str) -> None:
        """The node stands still as one without power does: its slurmd is dead, and its processes answer nobody."""
        self._end(f"slurmd-{node}", signal.SIGKILL)
        for pid, env, _ in _processes():
            if env.get("SLURM_CONF") == str(self.conf) and env.get("SLURMD_NODENAME") == node:
                _signal(pid, signal.SIGSTOP)

    def crash_node(self, node: str) -> None:
        """The node starts anew: all that ran on it is dead at once, and whoever was connected to it knows."""
        self._end(f"slurmd-{node}", signal.SIGKILL)
        for pid, env, _ in _processes():
            if env.get("SLURM_CONF") == str(self.conf) and env.get("SLURMD_NODENAME") == node:
                _signal(pid, signal.SIGKILL)

    def cut(self, node: str) -> None:
        """Unplug the node's cable."""
        self._ip("link", "set", self._port(node), "down")

    def heal(self, node: str, timeout: float = 60) -> None:
        """Plug it in again, start its slurmd where it is dead, end what was left on it; waits until it is idle."""
        self._ip("link", "set", self._port(node), "up")
        if not _alive(self._pid(f"slurmd-{node}")):
            self._start_node(node)
        for pid, env, _ in _processes():
            if env.get("SLURM_CONF") == str(self.conf) and env.get("SLURMD_NODENAME") == node:
                _signal(pid, signal.SIGKILL)
        self.call("scontrol", "update", f"nodename={node}", "state=resume", status=None)
        self.wait_for_nodes([node], timeout)

    def wait_for_nodes(self, nodes: list[str], timeout: float = 60) -> None:
        deadline = time.monotonic() + timeout
        while True:
            lines = self.call("sinfo", "--noheader", "--Node", "--format=%N %T", status=None).splitlines()
            if {f"{node} idle" for node in nodes} <= set(lines):
                return
            if time.monotonic() > deadline:
                raise Failed(f"nodes are not idle after {timeout:.0f} s: {sorted(set(lines))}\n{self._logs()}")
            time.sleep(0.2)

    # -- start and stop ------------------------------------------------------------------------------------------

    @classmethod
    def start(
        cls, work: Path, nodes: int = 2, gpus: int = 0, keep: bool = False, apart: dict[str, int] | None = None
    ) -> Cluster:
        """Bring a cluster up in a new or empty folder. keep: it outlives this process, until `stop`.

        apart: further partitions with nodes of their own, by name, so that a node can be lost without harm to others' jobs.
        """
        if why := unable():
            raise Failed(why)
        for old in earlier():
            old.stop()
        work = work.resolve()
        work.mkdir(parents=True, exist_ok=True)
        if any(work.iterdir()):
            raise Failed(f"{work} is not empty")
        with _claimed() as (number, names):
            run = Path(f"/run/mpdist-slurm-{number}")  # short: a socket's path has 107 bytes at most
            run.mkdir()
            counts = {"": nodes, **(apart or {})}
            port = _free_ports(17800 + 100 * number, sum(counts.values()) + 1)
            fresh = (f"{names}{i}" for i in itertools.count(1))
            groups = {name: list(itertools.islice(fresh, count)) for name, count in counts.items()}
            subnet = f"10.203.{100 + number}"
            cluster = cls(work, run, port, groups.pop(""), groups, subnet, f"mpd{number}")
            cluster._remember(None if keep else os.getpid())
        try:
            cluster._configure(gpus)
            cluster._network()
            cluster._daemon("munged", *cluster._munged())
            cluster._wait_for(cluster.run / "munge.sock")
            cluster._daemon("slurmctld", "slurmctld", "-D", "-f", str(cluster.conf))
            for node in cluster.all_nodes:
                cluster._start_node(node)
            cluster.wait_for_nodes(cluster.all_nodes)
        except BaseException:
            cluster.stop()
            raise
        return cluster

    @classmethod
    def of(cls, run: Path) -> Cluster:
        """The cluster that an earlier `start` left a record of."""
        known = json.loads((run / "cluster.json").read_text())
        names = [known[name] for name in ("port", "nodes", "apart", "subnet", "bridge")]
        return cls(Path(known["work"]), run, *names)

    def stop(self) -> None:
        """End its jobs and daemons, and nothing else's; leaves the logs in `work`."""
        if _alive(self._pid("slurmctld")):
            with contextlib.suppress(Failed, subprocess.TimeoutExpired):
                self.call("scancel", "--user=root", timeout=10, status=None)
                deadline = time.monotonic() + 3
                while self.queue() and time.monotonic() < deadline:
                    time.sleep(0.1)
        names = ["slurmctld", *(f"slurmd-{node}" for node in self.all_nodes)]
        for name in names:
            self._end(name, signal.SIGTERM, wait=False)
        for name in names:
            self._end(name, signal.SIGTERM)
        for pid, env, _ in _processes():
            if env.get("SLURM_CONF") == str(self.conf) and ("SLURMD_NODENAME" in env or "SLURM_JOB_ID" in env):
                _signal(pid, signal.SIGKILL)
        self._end("munged", signal.SIGTERM)
        for node in self.all_nodes:
            self._ip("link", "delete", self._port(node), check=False)  # a process left in the space would keep it
            self._ip("netns", "delete", f"{self.bridge}-{node}", check=False)
        self._ip("link", "delete", self.bridge, check=False)
        _edit_hosts(lambda line: not line.endswith(f"# {self.run.name}"))
        shutil.rmtree(self.run, ignore_errors=True)

    def _remember(self, owner: int | None) -> None:
        known = {"work": str(self.work), "port": self.port, "nodes": self.nodes, "apart": self.apart}
        known["subnet"] = self.subnet
        (self.run / "cluster.json").write_text(json.dumps({**known, "bridge": self.bridge, "owner": owner}))

    def _configure(self, gpus: int) -> None:
        for name in ("etc", "log", "state"):
            (self.work / name).mkdir()
        nodes = {node: (self._address(i), self.port + i) for i, node in enumerate(self.all_nodes, 1)}
        host = socket.gethostname().partition(".")[0]
        controller = f"{self.subnet}.1"
        text = cluster_conf.text(self.work, self.run, host, controller, self.port, nodes, self.apart, gpus)
        self.conf.write_text(text)
        # slurmd loads a cgroup plugin even if nothing uses one; version 1 named outright starts on any machine.
        (self.work / "etc" / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        if gpus:
            cluster_conf.make_gpus(self.work, gpus)
        (self.work / "env.sh").write_text(f"export SLURM_CONF={self.conf}\n")

    def _network(self) -> None:
        lines = [f"{self._address(i)} {node} # {self.run.name}" for i, node in enumerate(self.all_nodes, 1)]
        _edit_hosts(lambda line: True, lines)
        self._ip("link", "add", self.bridge, "type", "bridge")
        self._ip("address", "add", f"{self.subnet}.1/24", "dev", self.bridge)
        self._ip("link", "set", self.bridge, "up")
        for i, node in enumerate(self.all_nodes, 1):
            space, outside = f"{self.bridge}-{node}", self._port(node)
            self._ip("netns", "add", space)
            self._ip("link", "add", outside, "type", "veth", "peer", "name", "eth0", "netns", space)
            self._ip("link", "set", outside, "master", self.bridge, "up")
            self._ip("-n", space, "address", "add", f"{self._address(i)}/24", "dev", "eth0")
            self._ip("-n", space, "link", "set", "eth0", "up")
            self._ip("-n", space, "link", "set", "lo", "up")

    def _address(self, number: int) -> str:
        return f"{self.subnet}.{10 + number}"

    def _port(self, node: str) -> str:
        """The bridge's port that the node's cable is plugged into."""
        return f"{self.bridge}.{node}"

    def _munged(self) -> list[str]:
        key = self.work / "etc" / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        files = {"key": key, "seed": self.work / "state" / "munged.seed", "log": self.work / "log" / "munged.log"}
        command = ["munged", "--foreground", "--force", f"--socket={self.run}/munge.sock"]
        command += [f"--pid-file={self.run}/munged.own", *(f"--{name}-file={path}" for name, path in files.items())]
        return command

    def _start_node(self, node: str) -> None:
        (self.run / "spool" / node).mkdir(parents=True, exist_ok=True)
        space = f"/run/netns/{self.bridge}-{node}"
        # Not `ip netns exec`: that one mounts another /sys.
        inside = 'hostname "$1-host"; exec slurmd -D -f "$2" -N "$1"'
        command = ["nsenter", f"--net={space}", "unshare", "--uts", "sh", "-c", inside, "sh", node, str(self.conf)]
        self._daemon(f"slurmd-{node}", *command)

    def _daemon(self, name: str, *command: str) -> None:
        with (self.work / "log" / f"{name}.out").open("ab") as log:
            process = subprocess.Popen(
                command,
                cwd=self.work,
                env=self.env(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, process.pid, -15)  # see PropagatePrioProcess
        process.returncode = 0  # it is ended by its pid, perhaps by another process: no complaint when it is forgotten
        (self.run / f"{name}.started").write_text(str(process.pid))

    def _pid(self, name: str) -> int | None:
        path = self.run / f"{name}.started"
        return int(path.read_text()) if path.exists() else None

    def _end(self, name: str, number: signal.Signals, wait: bool = True) -> None:
        pid = self._pid(name)
        if pid is None or not _alive(pid):
            return
        if str(self.work) not in _command(pid) and str(self.run) not in _command(pid):  # another's by now
            return
        _signal(pid, number)
        deadline = time.monotonic() + 10
        while wait and _alive(pid):
            time.sleep(0.05)
            if time.monotonic() > deadline:
                _signal(pid, signal.SIGKILL)

    def _wait_for(self, path: Path, timeout: float = 10) -> None:
        deadline = time.monotonic() + timeout
        while not path.exists():
            if time.monotonic() > deadline:
                raise Failed(f"{path} is not there after {timeout:.0f} s\n{self._logs()}")
            time.sleep(0.05)

    def _logs(self) -> str:
        parts = []
        for path in sorted((self.work / "log").iterdir()):
            lines = path.read_text(errors="replace").splitlines()[-8:]
            parts += [f"--- {path.name}", *lines] if lines else []
        return "\n".join(parts)

    def _ip(self, *arguments: str, check: bool = True) -> None:
        done = subprocess.run([_which("ip") or "ip", *arguments], capture_output=True, text=True, check=False)
        if check and done.returncode:
            raise Failed(f"ip {' '.join(arguments)}: {done.stderr.strip()}")


def earlier() -> list[Cluster]:
    """Clusters whose owner has died without stopping them."""
    found = []
    for record in Path("/run").glob("mpdist-slurm-*/cluster.json"):
        owner = json.loads(record.read_text())["owner"]
        if owner is not None and not _alive(owner):
            found.append(Cluster.of(record.parent))
    return found


@contextlib.contextmanager
def _claimed() -> Iterator[tuple[int, str]]:
    """A number and a prefix of node names that no other cluster of this machine has."""
    import fcntl

    with Path("/run/mpdist-slurm.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        links = {path.name.partition(".")[0] for path in Path("/sys/class/net").iterdir()}  # of another root's /run too
        taken = (i for i in range(100) if Path(f"/run/mpdist-slurm-{i}").exists() or f"mpd{i}" in links)
        number = min(set(range(100)) - set(taken))
        yield number, "n" if number == 0 else f"n{number}-"


def _free_ports(first: int, count: int) -> int:
    """The first of `count` ports in a row on which nothing listens."""
    for base in range(first, 65000, 100):
        with contextlib.suppress(OSError):
            for port in range(base, base + count):
                with socket.socket() as probe:
                    probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                    probe.bind(("", port))
            return base
    raise Failed("no free ports")


def _edit_hosts(keep: object, new: list[str] | None = None) -> None:
    """Rewritten in place: in a container the file may be a mount of its own."""
    import fcntl

    with Path("/run/mpdist-slurm.hosts").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        lines = [line for line in _HOSTS.read_text().splitlines() if callable(keep) and keep(line)]
        _HOSTS.write_text("\n".join([*lines, *(new or [])]) + "\n")


def _processes() -> Iterator[tuple[int, dict[str, str], str]]:
    """Of each process that can be read: pid, environment, the program's path."""
    for folder in Path("/proc").iterdir():
        if not folder.name.isdecimal() or int(folder.name) == os.getpid():
            continue
        try:
            words = (folder / "environ").read_bytes().decode(errors="replace").split("\0")
            command = (folder / "cmdline").read_bytes().decode(errors="replace").split("\0")[0]
            if not command or not _alive(int(folder.name)):
                continue
        except OSError:
            continue
        yield int(folder.name), dict(word.partition("=")[::2] for word in words if "=" in word), command


def _alive(pid: int | None) -> bool:
    if pid is None:
        return False
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, os.WNOHANG)  # one of ours that has ended is a zombie until somebody asks
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (OSError, IndexError):
        return False


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""


def _signal(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("start", "stop"))
    parser.add_argument("folder", type=Path, help="where its files go: new or empty")
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--gpus", type=int, default=0, help="pretended GPUs of each node")
    arguments = parser.parse_args()
    try:
        if arguments.what == "start":
            cluster = Cluster.start(arguments.folder, arguments.nodes, arguments.gpus, keep=True)
            print(f"{' '.join(cluster.nodes)} idle; next: . {cluster.work}/env.sh")
            return 0
        records = Path("/run").glob("mpdist-slurm-*/cluster.json")
        mine = [c for c in (Cluster.of(r.parent) for r in records) if c.work == arguments.folder.resolve()]
        for cluster in mine:
            cluster.stop()
        print("stopped" if mine else f"no cluster runs in {arguments.folder}")
        return 0
    except Failed as error:
        print(error, file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())

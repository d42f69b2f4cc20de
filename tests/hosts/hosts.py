"""Hosts made of namespaces of this machine, with a network between them and one directory in common.

    with running_hosts(2, shared=tmp_path / "shared") as hosts:
        process = hosts[1].start(["hostname"], log=tmp_path / "log.txt")
        hosts[0].cut_off()                      # its cable is pulled: nobody is told
        hosts[1].kill()                         # and all of its processes are gone

Each host has network, mount, UTS, IPC and PID namespaces of its own. So it has an address, a name, a machine id, a boot
id, its own `/tmp` and `/dev/shm`, and a `/proc` in which only its own processes are. The network is a bridge in a
namespace of its own, with a veth pair to each host; nothing is added to the machine's network. The kernel, its clock,
its page cache, and what lies outside `/tmp` are common. The hosts write the shared directory only.

Everything ends with the process that made it: the first process of each host reads a pipe that only that one holds.
"""

import contextlib
import functools
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_NETWORK = "10.203.0"
_RENDEZVOUS_PORT = 29400
_STARTS_S = 20.0
# `cat` ends when the pipe does, and with it all processes of its PID namespace. Orphans are reaped by the kernel.
_STAYS = "trap '' CHLD; echo up; exec cat >/dev/null"
# Folders below /tmp that a host needs are kept under /mnt, while its own /tmp is put over them.
_SETS_UP = """
set -eu
hostname "$1"; shift
mount --make-rprivate /
mount -t tmpfs own /mnt
n=0
for folder; do
    n=$((n + 1)); mkdir "/mnt/$n"; mount --rbind "$folder" "/mnt/$n"
done
mount -t tmpfs own /tmp
mount -t tmpfs own /dev/shm
n=0
for folder; do
    n=$((n + 1)); mkdir -p "$folder"; mount --rbind "/mnt/$n" "$folder"
done
if [ -n "$HOST_ID" ]; then
    echo "$HOST_ID" > /mnt/id
    [ ! -e /etc/machine-id ] || mount --bind /mnt/id /etc/machine-id
    mount --bind /mnt/id /proc/sys/kernel/random/boot_id
fi
printf '127.0.0.1 localhost\\n%s\\n' "$HOSTS_FILE" > /mnt/hosts
mount --bind /mnt/hosts /etc/hosts
"""


@functools.cache
def missing_reason() -> str:
    """Why there can be no hosts here; empty if there can be."""
    for program in ("unshare", "nsenter", "ip", "mount"):
        if shutil.which(program) is None:
            return f"hosts are made of namespaces by `{program}`, which is not installed"
    attempt = "mount -t tmpfs own /mnt && ip link add br0 type bridge && ip link add v0 type veth peer name v1"
    spaces = ["--net", "--mount", "--uts", "--ipc", "--pid", "--fork", "--mount-proc"]
    tried = subprocess.run(["unshare", *spaces, "sh", "-c", attempt], capture_output=True, text=True, check=False)
    return "" if tried.returncode == 0 else f"namespaces are not to be had here: {tried.stderr.strip()}"


@dataclass(slots=True)
class Host:
    name: str
    address: str
    _first: subprocess.Popen[str]
    _switch: subprocess.Popen[str]
    _port: str
    _started: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def start(
        self, command: Sequence[str], log: Path, environment: Mapping[str, str] | None = None
    ) -> subprocess.Popen[bytes]:
        """Start a program there, with this process's environment and what is added; its output goes to `log`."""
        own = {"GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1"}
        variables = {**os.environ, **own, **(environment or {})}
        enter = _enter(self._first, "--net", "--mount", "--uts", "--ipc", "--pid=for-children")
        with log.open("ab") as output:
            process = subprocess.Popen(
                [*enter, *command],
                env=variables,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd="/",
                start_new_session=True,
            )
        self._started.append(process)
        return process

    def cut_off(self) -> None:
        """Pull its cable: what is sent is lost, and neither end is told."""
        _run([*_enter(self._switch, "--net"), "ip", "link", "set", self._port, "down"])

    def reconnect(self) -> None:
        _run([*_enter(self._switch, "--net"), "ip", "link", "set", self._port, "up"])

    def kill(self) -> None:
        """End all of its processes at once, by SIGKILL; none of them can say goodbye but the kernel, to a peer."""
        self._first.kill()
        self._first.wait()
        for process in self._started:
            # `nsenter` outlives what it has started, for as long as it is stopped.
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            process.wait()


@contextmanager
def running_hosts(count: int, shared: Path) -> Iterator[list[Host]]:
    """So many hosts, which all have the directory `shared`; whatever runs on them when the block is left is killed."""
    shared.mkdir(parents=True, exist_ok=True)
    # Without this project and the interpreter nothing runs.
    needed = [ROOT, Path(sys.prefix), Path(sys.base_prefix), *(Path(entry) for entry in sys.path if entry)]
    names = [f"host-{number}" for number in range(count)]
    addresses = [f"{_NETWORK}.{number + 1}" for number in range(count)]
    table = "\n".join(f"{address} {name}" for address, name in zip(addresses, names, strict=True))
    with ExitStack() as ends:
        switch = ends.enter_context(
            _first_process(["--net"], f"ip link add br0 type bridge; ip link set br0 up; {_STAYS}")
        )
        hosts: list[Host] = []
        for number, (name, address) in enumerate(zip(names, addresses, strict=True)):
            spaces = ["--net", "--mount", "--uts", "--ipc", "--pid", "--fork", "--kill-child", "--mount-proc"]
            first = ends.enter_context(
                _first_process(
                    spaces,
                    f"{_SETS_UP}{_STAYS}",
                    [name, *(str(folder) for folder in _below_tmp([shared, *needed]))],
                    {"HOSTS_FILE": table, "HOST_ID": f"{number:032x}"},
                )
            )
            port = f"port{number}"
            in_switch, in_host = _enter(switch, "--net"), _enter(first, "--net")
            _run([*in_switch, "ip", "link", "add", port, "type", "veth", "peer", "eth0", "netns", str(first.pid)])
            _run([*in_switch, "ip", "link", "set", port, "master", "br0", "up"])
            _run([*in_host, "ip", "addr", "add", f"{address}/24", "dev", "eth0"])
            for device in ("lo", "eth0"):
                _run([*in_host, "ip", "link", "set", device, "up"])
            hosts.append(Host(name, address, first, switch, port))
        try:
            yield hosts
        finally:
            for host in hosts:
                host.kill()


def torchrun(
    hosts: Sequence[Host],
    ranks_each: int,
    script: Sequence[str],
    folder: Path,
    environment: Mapping[str, str],
) -> list[subprocess.Popen[bytes]]:
    """Start one job on all of the hosts, which meet at the first; `folder / "NAME.log"` has the output of each."""
    folder.mkdir(parents=True, exist_ok=True)
    started = []
    for host in hosts:
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks_each)]
        command += ["--nnodes", str(len(hosts)), "--local-addr", host.address]
        command += ["--rdzv-backend", "c10d", "--rdzv-id", folder.name]
        command += ["--rdzv-endpoint", f"{hosts[0].address}:{_RENDEZVOUS_PORT}"]
        started.append(host.start([*command, *script], folder / f"{host.name}.log", environment))
    return started


def _below_tmp(folders: Sequence[Path]) -> list[Path]:
    """Those that a new /tmp would hide; of two, one of which lies in the other, the outer one."""
    below = sorted({path for path in folders if path.is_relative_to("/tmp") and path.is_dir()})
    return [path for path in below if not any(path != other and path.is_relative_to(other) for other in below)]


@contextmanager
def _first_process(
    spaces: Sequence[str], script: str, arguments: Sequence[str] = (), environment: Mapping[str, str] | None = None
) -> Iterator[subprocess.Popen[str]]:
    """Namespaces, kept by a process that lives until the block is left."""
    process = subprocess.Popen(
        ["unshare", *spaces, "sh", "-c", script, "sh", *arguments],
        env={**os.environ, **(environment or {})},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        assert process.stdout is not None
        said = process.stdout.readline().strip()
        if said != "up":
            raise RuntimeError(f"a host could not be set up: {said}")
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                stream.close()


def _enter(first: subprocess.Popen[str], *spaces: str) -> list[str]:
    chosen = [
        f"--pid=/proc/{first.pid}/ns/pid_for_children" if space == "--pid=for-children" else space for space in spaces
    ]
    return ["nsenter", "--target", str(first.pid), *chosen]


def _run(command: Sequence[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_STARTS_S)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: exit code {done.returncode}: {done.stderr.strip()}")

"""File systems that hosts share, with servers and two clients on this machine: GlusterFS and CephFS, in user space.

    with running("gluster", folder) as volume:          # "gluster-r2": two bricks that replicate; "ceph"
        volume.mount("a"), volume.mount("b")            # two clients are two hosts, with caches of their own
        volume.remount("b")                             # one that was killed

To be called in namespaces of its own (`scripts/shared_fs/run.py`): whatever is left ends with them, and nothing of the
machine's network, mounts, `/run` and `/var` is touched.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

KINDS: Final = ("gluster", "gluster-r2", "ceph")
_STARTS_WITHIN_S: Final = 120.0
_HOST: Final = "shared-fs-server"  # GlusterFS takes no address of the loopback, but a name of one


class Volume(ABC):
    """One volume that is served."""

    packages: str
    programs: tuple[str, ...]

    def __init__(self, folder: Path, replicas: int = 1) -> None:
        self.folder = folder
        self.replicas = replicas
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    @classmethod
    def missing(cls) -> str:
        """Why it cannot be served here; empty if it can."""
        if os.geteuid() != 0 or not Path("/dev/fuse").exists():
            return "needs root and /dev/fuse"
        missing = [program for program in (*cls.programs, "unshare", "ip") if shutil.which(program) is None]
        return f"{', '.join(missing)} not found; packages {cls.packages}" if missing else ""

    @abstractmethod
    def serve(self) -> None:
        """Start the servers, and make the volume."""

    @abstractmethod
    def client(self, directory: Path) -> list[str]:
        """The command that mounts the volume, and stays."""

    @abstractmethod
    def servers(self) -> list[int]:
        """Processes that hold the data."""

    @abstractmethod
    def set_full(self, directory: Path, full: bool) -> None:
        """Take no more than 20 MB of data in a client's directory, until told otherwise."""

    @contextmanager
    def full(self, directories: Sequence[Path]) -> Iterator[None]:
        """One directory, by all clients' names of it, is full during the block. Servers look every few seconds."""

        def takes_more(directory: Path) -> bool:
            try:
                (directory / "probe").write_bytes(bytes(30_000_000))
            except OSError:
                return False
            finally:
                (directory / "probe").unlink(missing_ok=True)
            return True

        self.set_full(directories[0], True)
        until(lambda: not any(map(takes_more, directories)))
        try:
            yield
        finally:
            self.set_full(directories[0], False)
            until(lambda: all(map(takes_more, directories)))

    def mount(self, name: str) -> Path:
        """The directory of a client, which is started if it does not run."""
        directory = self.folder / name
        if name not in self.processes:
            directory.mkdir(exist_ok=True)
            self.start(name, *self.client(directory))
            until(lambda: os.path.ismount(directory))
        return directory

    def remount(self, name: str) -> None:
        """A client that was killed comes back."""
        self.processes.pop(name).wait()
        subprocess.run(["umount", "-l", str(self.folder / name)], check=True)
        self.mount(name)

    def start(self, name: str, *command: str) -> None:
        """A process that ends with the volume."""
        with (self.folder / f"{name}.log").open("wb") as log:
            self.processes[name] = subprocess.Popen(command, stdout=log, stderr=log)

    def stop(self) -> None:
        """End clients, then servers."""
        for directory in (self.folder / name for name in self.processes if len(name) == 1):
            subprocess.run(["umount", "-l", str(directory)], check=False)
        for process in reversed(self.processes.values()):
            process.kill()
            process.wait()


class Gluster(Volume):
    """`replicas` bricks, one server each."""

    packages = "glusterfs-server glusterfs-client"
    programs = ("glusterd", "gluster", "glusterfs")

    def serve(self) -> None:
        for place in ("/var/lib/glusterd", "/var/log/glusterfs"):
            Path(place).mkdir(parents=True, exist_ok=True)
            subprocess.run(["mount", "-t", "tmpfs", "own", place], check=True)
        (self.folder / "hosts").write_text(f"127.0.0.1 localhost {_HOST}\n")
        subprocess.run(["mount", "--bind", str(self.folder / "hosts"), "/etc/hosts"], check=True)
        self.start("glusterd", "glusterd", "--no-daemon")
        until(lambda: self._gluster("volume", "list"))
        bricks = [f"{_HOST}:{self.folder}/brick{number}" for number in range(self.replicas)]
        copies = [] if self.replicas == 1 else ["replica", str(self.replicas)]
        self._gluster("volume", "create", "v", *copies, *bricks, "force")
        self._gluster("volume", "start", "v")

    def _gluster(self, *arguments: str) -> str:
        return run("gluster", "--mode=script", *arguments)

    def client(self, directory: Path) -> list[str]:
        start = ["glusterfs", "--no-daemon", "--process-name", "fuse", f"--log-file={directory}.client.log"]
        return [*start, f"--volfile-server={_HOST}", "--volfile-id=/v", str(directory)]

    def servers(self) -> list[int]:
        detail = self._gluster("volume", "status", "v", "detail")
        return [int(pid) for pid in re.findall(r"^Pid\s*:\s*(\d+)", detail, flags=re.MULTILINE)]

    def set_full(self, directory: Path, full: bool) -> None:
        self._gluster("volume", *(["set", "v", "storage.reserve", "99"] if full else ["reset", "v", "storage.reserve"]))

    def bring_back(self) -> None:
        """Start a brick that was killed."""
        self._gluster("volume", "start", "v", "force")


class Ceph(Volume):
    """One monitor, manager, OSD (in memory) and MDS, without authentication."""

    packages = "ceph-mon ceph-mgr ceph-osd ceph-mds ceph-fuse attr"
    programs = ("ceph", "ceph-mon", "ceph-mgr", "ceph-osd", "ceph-mds", "ceph-fuse", "setfattr")

    def serve(self) -> None:
        disk, cluster = str(uuid.uuid4()), str(uuid.uuid4())
        for name in ("mon", "mgr", "osd", "mds", "run"):
            (self.folder / name).mkdir()
        options = {
            "global": f"fsid={cluster}; mon host=v2:127.0.0.1:3300; public addr=127.0.0.1; cluster addr=127.0.0.1;"
            f"run dir={self.folder}/run; log file={self.folder}/$name.log; admin socket={self.folder}/run/$name.asok;"
            "auth cluster required=none; auth service required=none; auth client required=none;"
            "auth allow insecure global id reclaim=false; osd pool default size=1; osd pool default min size=1;"
            "osd pool default pg autoscale mode=off; osd crush chooseleaf type=0; mon allow pool size one=true;"
            "mon data avail crit=0",
            "mon.m": f"mon data={self.folder}/mon; mon addr=v2:127.0.0.1:3300",
            "mgr.x": f"mgr data={self.folder}/mgr; mgr initial modules=",
            "osd": f"osd data={self.folder}/osd; osd uuid={disk}; osd objectstore=memstore;"
            f"memstore device bytes={4 * 1024**3}; osd class update on start=false",
            # By default a client waits up to 5 s for what another has just written.
            "mds": f"mds data={self.folder}/mds; mds tick interval=0.5",
            "client": "client quota df=true",
        }
        text = "\n".join(f"[{name}]\n" + lines.replace(";", "\n") for name, lines in options.items())
        self._conf = str(self.folder / "ceph.conf")
        Path(self._conf).write_text(f"{text}\n")
        monmap = str(self.folder / "monmap")
        run("monmaptool", "--create", "--fsid", cluster, "--addv", "m", "[v2:127.0.0.1:3300]", monmap)
        run("ceph-mon", "-c", self._conf, "--mkfs", "-i", "m", "--monmap", monmap)
        self._daemon("mon", "m", "mon stat", "quorum")
        self._daemon("mgr", "x", "mon stat", "quorum")
        self._ceph("osd new", disk)
        run("ceph-osd", "-c", self._conf, "--mkfs", "-i", "0")
        self._daemon("osd", "0", "osd stat", "1 up")
        for command in ("osd pool create meta 8", "osd pool create data 8", "fs new v meta data"):
            self._ceph(command)
        self._daemon("mds", "s", "mds stat", "up:active")

    def _ceph(self, command: str, *more: str) -> str:
        return run("ceph", "-c", self._conf, "--connect-timeout", "20", *command.split(), *more)

    def _daemon(self, kind: str, name: str, question: str, answer: str) -> None:
        self.start(kind, f"ceph-{kind}", "-f", "-i", name, "-c", self._conf)
        until(lambda: answer in self._ceph(question))

    def client(self, directory: Path) -> list[str]:
        return ["ceph-fuse", "-f", "-c", self._conf, "-n", "client.admin", str(directory)]

    def servers(self) -> list[int]:
        return [self.processes["osd"].pid]

    def set_full(self, directory: Path, full: bool) -> None:
        run("setfattr", "-n", "ceph.quota.max_bytes", "-v", "20000000" if full else "0", str(directory))


def run(*command: str) -> str:
    """What a program says; raises `OSError` with it if it fails."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    if done.returncode != 0:
        raise OSError(f"{' '.join(command)}: {done.stdout[-2000:]}{done.stderr[-2000:]}")
    return done.stdout + done.stderr


def until(condition: Callable[[], object]) -> None:
    """Wait for it, and for the command in it to succeed."""
    end_s = time.monotonic() + _STARTS_WITHIN_S
    while True:
        with contextlib.suppress(OSError):
            if condition():
                return
        if time.monotonic() > end_s:
            raise TimeoutError(f"not ready after {_STARTS_WITHIN_S} s")
        time.sleep(0.2)


def pause(pids: Sequence[int], seconds: int) -> None:
    """Stop processes, and let them continue so long after."""
    named = " ".join(map(str, pids))
    run("sh", "-c", f"kill -STOP {named}; setsid sh -c 'sleep {seconds}; kill -CONT {named}' >/dev/null 2>&1 &")


TYPES: Final[dict[str, tuple[type[Gluster] | type[Ceph], int]]] = {
    "gluster": (Gluster, 1),
    "gluster-r2": (Gluster, 2),
    "ceph": (Ceph, 1),
}


@contextmanager
def running(kind: str, folder: Path) -> Iterator[Gluster | Ceph]:
    """Serve a volume for the block."""
    volume = TYPES[kind][0](folder, TYPES[kind][1])
    try:
        volume.serve()
        yield volume
    finally:
        volume.stop()

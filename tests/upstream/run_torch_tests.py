"""Run PyTorch's own `test/distributed/checkpoint` on CPU and gloo, with DCP's reader and writer of files or with ours.

    python tests/upstream/run_torch_tests.py --repo PYTORCH --strategy stock --out stock.json
    python tests/upstream/run_torch_tests.py --repo PYTORCH --strategy ours  --out ours.json --only-passed stock.json
    python tests/upstream/run_megatron_tests.py --compare stock.json ours.json

`--repo` is a checkout of PyTorch, or what of it lies below `test/distributed/checkpoint`, of a version near that of
the installed torch; nothing of it is kept here, and nothing is fetched. Tests are read as text and changed where they
ask for a GPU or NCCL, so that many run without; those that cannot fail with either side. Their ranks are forked.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
FOLDER = "test/distributed/checkpoint"
# Storage of others, and what has nothing of a reader or a writer in it.
LEFT_OUT = re.compile(
    r"_experimental|hf_|hugging|safetensor|transport|barriers|cuobj|traverse|stager|pinned|dedup|executor"
)
WITHOUT_GPU = (
    (r"^ *@(?:requires_nccl|skip_if_lt_x_gpu|requires_accelerator_dist_backend)\(.*\)\n", ""),
    (r"rank:(\{?\w+\}?)/cuda[^\"']*", r"rank:\1/cpu"),
    (r"cpu:gloo,cuda:nccl|\bnccl\b", "gloo"),
    (r"with_comms\(init_rpc=False\)", 'with_comms(init_rpc=False, backend="gloo")'),
    (r"\.cuda\((?:[^()]|\(\))*\)", ""),
    (r"([\"'])cuda(?::[^\"']*)?\1", r"\1cpu\1"),
    (r"torch\.cuda\.(?:set_device|synchronize|manual_seed\w*)\((?:[^()]|\(\))*\)", "None"),
)
LIMIT_S = 1500.0


def ours_in_the_place_of_stock() -> None:
    """Every name of torch's modules that is the stock reader or writer becomes ours."""
    import torch.distributed.checkpoint.filesystem as stock
    from torch.distributed.checkpoint import format_utils  # noqa: F401  (so that its names are replaced as well)

    import mcore_ckpt

    replaced = {
        stock.FileSystemReader: mcore_ckpt.FileSystemReader,
        stock.FileSystemWriter: mcore_ckpt.FileSystemWriterAsync,
    }
    for module in list(sys.modules.values()):
        if getattr(module, "__name__", "").startswith("torch.distributed.checkpoint"):
            for name, value in list(vars(module).items()):
                if isinstance(value, type) and value in replaced:
                    setattr(module, name, replaced[value])


def forked_ranks() -> None:
    """Ranks that have imported torch when they start: on a small machine imports would be most of the time."""
    import torch
    from torch.testing._internal.common_distributed import MultiProcessTestCase

    def fork(self: MultiProcessTestCase) -> None:
        self._start_processes(torch.multiprocessing.get_context("fork").Process)

    MultiProcessTestCase._spawn_processes = fork
    torch.set_num_threads(1)


def fsdp_on_the_cpu() -> None:
    """FSDP of the first kind asks for an accelerator unless it is told otherwise."""
    import torch
    from torch.distributed.fsdp import FullyShardedDataParallel

    begin = FullyShardedDataParallel.__init__

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        kwargs.setdefault("device_id", torch.device("cpu"))
        begin(self, *args, **kwargs)

    FullyShardedDataParallel.__init__ = init


def inside(strategy: str, outcomes: Path, arguments: list[str]) -> int:
    """Run pytest in this process."""
    import pytest
    from rank_main import Outcomes

    forked_ranks()
    fsdp_on_the_cpu()
    if strategy == "ours":
        ours_in_the_place_of_stock()
    plugins = ["-p", "no:cacheprovider", "-p", "no:randomly", "-p", "no:timeout", "-W", "ignore", "--rootdir=."]
    return int(pytest.main(["-q", *plugins, *arguments], plugins=[Outcomes(outcomes)]))


def run_file(
    source: Path, name: str, options: argparse.Namespace, wanted: set[str] | None
) -> dict[str, dict[str, str]]:
    """One file's tests in a process of its own: outcome and text by name."""
    with tempfile.TemporaryDirectory() as folder:
        text = source.read_text()
        for pattern, by in WITHOUT_GPU:
            text = re.sub(pattern, by, text, flags=re.MULTILINE)
        copy = Path(folder) / source.name
        copy.write_text(text)
        outcomes = Path(folder) / "outcomes.jsonl"
        selected = [copy.name] if wanted is None else sorted(f"{copy.name}::{test}" for test in wanted)
        command = [sys.executable, "-W", "ignore", __file__, "--inside", str(outcomes), "--strategy", options.strategy]
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join((str(HERE), str(options.package.resolve()), str(options.repo / "test"))),
            "DISTRIBUTED_TESTS_DEFAULT_TIMEOUT": "120",
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
            "TMPDIR": folder,
        }
        process = subprocess.Popen(
            [*command, *selected],
            cwd=folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            log = process.communicate(timeout=LIMIT_S)[0].decode(errors="replace")
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            log = process.communicate()[0].decode(errors="replace")
        found: dict[str, dict[str, str]] = {}
        for line in outcomes.read_text().splitlines() if outcomes.exists() else []:
            entry = json.loads(line)
            test = f"{name}::{entry['test'].partition('::')[2]}"
            if found.get(test, {}).get("outcome") != "failed":
                found[test] = {"outcome": entry["outcome"], "text": entry["text"]}
        for verdict in found.values():
            if verdict["outcome"] == "started":
                verdict.update(outcome="hung", text=log[-3000:])
        return found or {f"{name}::": {"outcome": "failed", "text": log[-3000:]}}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repo", type=Path, default=Path())
    parser.add_argument("--strategy", choices=("stock", "ours"), default="ours")
    parser.add_argument("--package", type=Path, default=ROOT, help="folder that holds mcore_ckpt")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only-passed", type=Path, help="run only the tests that passed in this earlier run")
    parser.add_argument("--inside", type=Path, help=argparse.SUPPRESS)
    parser.add_argument(
        "files", nargs="*", help=f"paths below {FOLDER}; default: all that concern a reader or a writer"
    )
    options, arguments = parser.parse_known_args()
    if options.inside:
        return inside(options.strategy, options.inside, [*options.files, *arguments])
    options.repo = options.repo.resolve()
    folder = options.repo / FOLDER
    files = options.files or sorted(
        path.relative_to(folder).as_posix() for path in folder.rglob("test_*.py") if not LEFT_OUT.search(str(path))
    )
    wanted: dict[str, set[str]] = defaultdict(set)
    for test, verdict in json.loads(options.only_passed.read_text()).items() if options.only_passed else ():
        if verdict["outcome"] == "passed":
            wanted[test.partition("::")[0]].add(test.partition("::")[2])
    found: dict[str, dict[str, str]] = {}
    for file in files:
        if options.only_passed and not wanted[file]:
            continue
        started_s = time.monotonic()
        mine = run_file(folder / file, file, options, wanted[file] if options.only_passed else None)
        found.update(mine)
        outcomes = [verdict["outcome"] for verdict in mine.values()]
        counts = {name: outcomes.count(name) for name in ("passed", "failed", "hung", "skipped")}
        print(f"{file}: {counts} in {time.monotonic() - started_s:.0f} s", flush=True)
        if options.out:
            options.out.write_text(json.dumps(found, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())

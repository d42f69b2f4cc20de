"""Small changes of the package, each of which some test must notice: `make test-mutants`.

Each change is made in a copy of the tree, where the tests named next to it run until one fails. Printed are the changes
that were noticed and those that were missed; the exit code is 1 if one was missed. `-k WORD` tries some of them.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parent.parent
_PARTS: Final = ("mcore_ckpt", "tests", "scripts", "docs", "examples", "benchmarks", "pyproject.toml", "README.md")
_DEADLINE_S: Final = 900


@dataclass(frozen=True)
class Mutant:
    """In `file`, below the package, `old` becomes `new`; `tests`, below `tests`, notice."""

    what: str
    file: str
    old: str
    new: str
    tests: str


MUTANTS: Final = (
    Mutant(
        "the CRC-32 of many small tensors is not compared",
        "load/requests.py",
        'return np.fromiter(map(crc32, payloads), "<u4", len(self.rows)).tobytes() == self.rows["crc"].tobytes()',
        "return True",
        "load/test_binding.py load/test_reader.py",
    ),
    Mutant(
        "the CRC-32 of a record is not compared",
        "load/records.py",
        "        if got != expected:\n            what =",
        "        if False:\n            what =",
        "load/test_reader.py tools/test_verify.py",
    ),
    Mutant(
        "the CRC-32 of a block of a large tensor is not compared",
        "load/records.py",
        "        if value != expected:\n            raise self._damaged",
        "        if False:\n            raise self._damaged",
        "load/test_reader.py load/test_binding.py",
    ),
    Mutant(
        "a data file of another save is taken",
        "format/integrity.py",
        "if footer.save_id != expected.save_id:",
        "if False:",
        "load/test_binding.py format/test_seal.py",
    ),
    Mutant(
        "the length of a data file is not compared",
        "format/integrity.py",
        "if size_bytes != planned_bytes or (expected is not None and expected.size_bytes != size_bytes):",
        "if False:",
        "load/test_binding.py format/test_seal.py tools/test_verify.py",
    ),
    Mutant(
        "the common state of another save is taken",
        "format/metadata_read.py",
        "if expected is not None and (got := crc32(content)) != expected.table_crc32:",
        "if (got := 0):",
        "directory/test_common_file.py megatron/test_common_state.py",
    ),
    Mutant(
        "the ids of the saves that ranks load are not compared",
        "dcp/reader.py",
        "if len(saves) > 1:",
        "if False:",
        "load/test_replaced_checkpoint.py megatron/test_one_save.py",
    ),
    Mutant(
        "an index is kept between two loads",
        "load/reader.py",
        "        self.forget(self._rank)\n        self._index, self.index_version = index, version",
        "        self._index = self._index or index",
        "load/test_replaced_checkpoint.py load/test_reader.py",
    ),
    Mutant(
        "the dtype of a destination is ignored",
        "load/requests.py",
        'if policy == "raise":',
        "if False:",
        "load/test_dtype_conversions.py",
    ),
    Mutant(
        "a slice begins one element too late",
        "core/boxes.py",
        "return Box(tuple(map(operator.sub, box.offsets, origin)), box.sizes)",
        "return Box(tuple(max(0, a - b - (a - b > 1)) for a, b in zip(box.offsets, origin, strict=True)), box.sizes)",
        "load/test_reshard_property.py load/test_binding.py",
    ),
    Mutant(
        "a replica is taken for a main replica",
        "state/shards.py",
        "    return not any(replica_id)",
        "    return replica_id[-1] == 0",
        "megatron/test_strategy.py megatron/test_interop.py megatron/test_optimizer_state.py",
    ),
    Mutant(
        "the sizes of the files that are there are not compared",
        "directory/commit.py",
        "if is_wrong(sizes[name], size)}",
        "if sizes[name] < 0}",
        "directory/test_publish.py save/test_owner.py save/test_save_edges.py",
    ),
    Mutant(
        "the notes of other saves are not looked at",
        "directory/commit.py",
        "refuse_others(storage, commit.owner, found[1])",
        "list(found[1])",
        "directory/test_commit.py save/test_owner.py",
    ),
    Mutant(
        "a claim that a killed save has left is not completed",
        "directory/commit.py",
        "                _publish(storage, noted, claimant, base, pending_name(claimant.save or save))",
        "                pass",
        "directory/test_commit.py",
    ),
    Mutant(
        "no second look at what is in force after the claim",
        "directory/commit.py",
        "if now == self.base and self._own is not None:",
        "if self._own is not None:",
        "directory/test_commit.py",
    ),
    Mutant(
        "files of the save itself are swept after its commit",
        "directory/commit.py",
        "found.save is None else found.save != self.id",
        "found.save is None else True",
        "directory/test_commit.py directory/test_publish.py",
    ),
    Mutant(
        "a data file is not synced",
        "storage/direct_io.py",
        "                os.fsync(fd)\n                if self._unsynced or self._buffered_fd is not None:",
        "                if self._unsynced or self._buffered_fd is not None:",
        "storage/test_local.py directory/test_fault_sweeps.py",
    ),
    Mutant(
        "a small file is renamed before its content is durable",
        "storage/resolve.py",
        "            direct_io.write_all(fd, memoryview(content), 0)\n            os.fsync(fd)",
        "            direct_io.write_all(fd, memoryview(content), 0)",
        "storage/test_local.py directory/test_fault_sweeps.py",
    ),
    Mutant(
        "a published index is not synced",
        "directory/commit.py",
        "storage.sync()  # before all else: else",
        "pass  # else",
        "directory/test_publish.py directory/test_fault_sweeps.py",
    ),
    Mutant(
        "a rank without objects loses its empty bucket's neighbours",
        "save/planner.py",
        "min(thread_count, len(sizes))) if indices]",
        "min(thread_count, len(sizes))) if indices][:1]",
        "save/test_planning.py",
    ),
    Mutant(
        "bytes_data is forgotten where it does not fit any more",
        "save/planner.py",
        "not chosen or objects_end([sizes_bytes[index] for index in chosen]) <= bucket.region_bytes",
        "True",
        "save/test_planning.py save/test_save_edges.py",
    ),
    Mutant(
        "a plan is used again for another number of ranks or files",
        "save/planner.py",
        "and structure.laid_out_for == (group.rank, group.size, request.thread_count)",
        "and structure.laid_out_for is not None",
        "save/test_planning.py megatron/test_strategy.py",
    ),
    Mutant(
        "retention removes the newest checkpoint",
        "directory/retention.py",
        "_Newest(head, below[-1] if len(below) == keep_last else None",
        "_Newest(head, below[-1] + 1 if len(below) == keep_last else None",
        "tools/test_retention.py save/test_upkeep.py",
    ),
    Mutant(
        "a class that no index holds is imported from its pickle",
        "format/index_pickle.py",
        "        if _is_newer(module, name):",
        "        return super().find_class(module, name)\n        if _is_newer(module, name):",
        "format/test_hostile_pickles.py format/test_metadata.py",
    ),
    Mutant(
        "callbacks run though a rank's write has failed",
        "save/async_queue.py",
        'if outcome == "skipped":',
        "if False:",
        "save/test_async_queue.py",
    ),
    Mutant(
        "replicas that differ count as equal",
        "save/replicas.py",
        "return digest_of(self._ids, np.array(crcs, np.uint32)[self._order], times) == digest",
        "return True",
        "save/test_save_edges.py",
    ),
    Mutant(
        "what an interrupted conversion has left is not compared",
        "reshard/conversion.py",
        "    return images.results[0].crcs == known.crcs",
        "    return True",
        "models/test_conversions.py",
    ),
)


def problem_of(mutant: Mutant, root: Path = ROOT) -> str | None:
    """Why a change cannot be tried; None if it can."""
    file = root / "mcore_ckpt" / mutant.file
    count = file.read_text().count(mutant.old) if file.is_file() else 0
    missing = [name for name in mutant.tests.split() if not (root / "tests" / name.partition("::")[0]).exists()]
    if count != 1:
        return f"its text is in {mutant.file} {count} times"
    return f"{missing[0]} is not there" if missing else None


def try_out(mutant: Mutant, root: Path) -> str:
    """What became of a change, made in the copy `root` and taken back."""
    if problem := problem_of(mutant, root):
        return f"CANNOT BE TRIED: {problem}"
    file = root / "mcore_ckpt" / mutant.file
    before = file.read_text()
    file.write_text(before.replace(mutant.old, mutant.new))
    try:
        tests = [f"tests/{name}" for name in mutant.tests.split()]
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-x",
            "-q",
            "-p",
            "no:cacheprovider",
            "--no-header",
            "--tb=no",
            *tests,
        ]
        environment = {**os.environ, "PYTHONPATH": str(root), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            command, cwd=root, env=environment, capture_output=True, text=True, timeout=_DEADLINE_S, check=False
        )
    except subprocess.TimeoutExpired:
        return f"noticed: tests hang for {_DEADLINE_S} s"
    finally:
        file.write_text(before)
    failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    if done.returncode == 1 and failed:
        return f"noticed: {failed[0].partition(' - ')[0].split()[1]}"
    return "MISSED" if done.returncode == 0 else f"CANNOT BE TRIED: pytest ends with {done.returncode} {failed[:1]}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-k", metavar="WORD", default="", help="only changes that are called so")
    word = parser.parse_args().k
    missed = 0
    with tempfile.TemporaryDirectory(prefix="mutants-") as scratch:
        root = Path(scratch)
        for part in _PARTS:
            copy = shutil.copytree if (ROOT / part).is_dir() else shutil.copy
            copy(ROOT / part, root / part)
        for mutant in MUTANTS:
            if word in mutant.what:
                began_s = time.monotonic()
                came = try_out(mutant, root)
                missed += not came.startswith("noticed")
                print(f"{mutant.what}: {came} ({time.monotonic() - began_s:.0f} s)", flush=True)
    print(f"{missed} of {sum(word in mutant.what for mutant in MUTANTS)} changes were not noticed")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())

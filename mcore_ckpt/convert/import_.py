"""Safetensors, torch files and plain DCP checkpoints as a `torch_dist` checkpoint of any parallel layout.

The other way of `export`: the same keys and tensors come back. What Megatron-Core wants besides the data is added:
`metadata.json`, and a common state, empty unless one is given.
"""

from __future__ import annotations

import io
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from mcore_ckpt.convert._partition import Partitioner
from mcore_ckpt.convert._reshard_target import BuildOptions, build_target, refuse_target
from mcore_ckpt.convert._sources import ImportFormat, open_source
from mcore_ckpt.convert.reshard_plan import TargetLayout, make_plan
from mcore_ckpt.convert.rules import (
    PartitionRule,
    RenameRule,
    parse_partition_rules,
    parse_rename_rules,
    rules_in,
)
from mcore_ckpt.core.paths import local_path
from mcore_ckpt.format.metadata_read import (
    COMMON_FILE,
    CONFIG_FILE,
    encode_config,
)
from mcore_ckpt.storage.local import LocalStorage
from mcore_ckpt.tools.dtype_cast import floating_dtype
from mcore_ckpt.tools.inspection import checkpoint_directory
from mcore_ckpt.tools.verify import check_file

__all__ = ["ImportReport", "import_checkpoint"]


@dataclass(frozen=True, slots=True)
class ImportReport:
    """What was made.

    Attributes:
        left_out: how many objects of a DCP checkpoint, or entries of a torch file, are no tensors.
        left_out_keys: their keys.
    """

    source: str
    target: str
    format: ImportFormat
    tensors: int
    payload_bytes: int
    left_out: int
    left_out_keys: tuple[str, ...] = ()


def import_checkpoint(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    tp: int = 1,
    pp: int = 1,
    ep: int = 1,
    rename: str | os.PathLike[str] | Iterable[RenameRule] | None = None,
    rules: str | os.PathLike[str] | Iterable[PartitionRule] | None = None,
    dtype: str | None = None,
    common: str | os.PathLike[str] | None = None,
    workers: int = 2,
    verify: bool = True,
    memory_bytes: int = 1024**3,
    progress: bool | None = False,
) -> ImportReport:
    """Make a `torch_dist` checkpoint of tensors in the format of others.

    Args:
        source: a directory of safetensors or torch files, one such file, or a DCP checkpoint.
        target: directory to make; it must not exist, or be empty.
        tp: tensor parallel size of the target.
        pp: pipeline parallel size.
        ep: expert parallel size.
        rename: a file of rename rules: lines of a regular expression and what to put for it, or `-` to drop the key.
        rules: a file of partition rules, as for a reshard; they see the new keys.
        dtype: convert floating-point tensors: `"bf16"`, `"fp16"`, `"fp32"`, or torch's names for them.
        common: a `common.pt` of another checkpoint to take along; an empty one without it.
        workers: threads, and files for each rank.
        verify: prove the target against the source before it appears.
        memory_bytes: for everything.
        progress: show bars; None: if standard error is a terminal.

    Raises:
        CheckpointNotFoundError: there is nothing to import.
        CorruptCheckpointError: it contradicts itself.
        UnsafePickleError: a torch file holds more than tensors and plain values.
        CheckpointExistsError, OptionError, SaveError: as for `reshard_checkpoint`.
    """
    layout, dtype = TargetLayout(tp, pp, ep), floating_dtype(dtype)
    partition = rules_in(rules, parse_partition_rules)
    src, dst = checkpoint_directory(source), local_path(target)
    refuse_target(src if src.is_dir() else src.parent / "-", dst)
    kind, payloads, left_out = open_source(src, rules_in(rename, parse_rename_rules))
    with payloads:
        plan = make_plan(
            payloads.index,
            layout,
            Partitioner(payloads.index, rules=partition),
            dtype=dtype,
            workers=workers,
        )

        def carry(partial: Path) -> None:
            storage = LocalStorage(partial)
            storage.publish(CONFIG_FILE, encode_config())
            storage.publish(COMMON_FILE, _common_state(common))

        build = BuildOptions(workers=workers, verify=verify, memory_bytes=memory_bytes)
        build_target(payloads, plan, dst, build, carry=carry, progress=progress)
    total = sum(move.payload_bytes for move in plan.moves)
    return ImportReport(str(src), str(dst), kind, len(plan.moves), total, len(left_out), tuple(left_out))


def _common_state(path: str | os.PathLike[str] | None) -> bytes:
    if path is not None:
        storage = LocalStorage(Path(path).parent, follow_links=True)
        check_file(storage, Path(path).name)
        return storage.read(Path(path).name)
    import torch

    content = io.BytesIO()
    torch.save({}, content)
    return content.getvalue()

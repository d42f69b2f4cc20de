"""Files of `torch.save` with any number of tensors, whose elements are written where they belong in the archive.

The pickle is made first, so sizes and offsets of all records are known before a byte is written. The CRC-32 of each
tensor follows its elements, and again in the directory at the end of the file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mcore_ckpt.core.crc import crc32
from mcore_ckpt.format.index import CheckpointIndex
from mcore_ckpt.format.item_layout import ArchiveLayout
from mcore_ckpt.reshard._journal import Journal
from mcore_ckpt.reshard.safetensors import Exported, shard_names, weight_map
from mcore_ckpt.reshard.slots import Blob, Frame, TargetPlan, TensorMove, all_in_one, in_shares
from mcore_ckpt.reshard.state_pickle import SavedTensor, pickle_state
from mcore_ckpt.reshard.target_files import TargetFiles
from mcore_ckpt.tools.payloads import StoredPayloads


@dataclass(frozen=True, slots=True)
class _Archive:
    """One file: its layout, and of each tensor its CRC-32, or the key of the move that writes it."""

    layout: ArchiveLayout
    sums: tuple[int | str, ...]


@dataclass(frozen=True, kw_only=True)
class _TorchPlan(TargetPlan):
    archives: Mapping[str, _Archive]

    def frame(self, move: TensorMove, number: int) -> Frame:
        return self.archives[move.slots[number].file].layout.frame(int(move.key.rpartition(" ")[2]))

    def finish(self, files: TargetFiles, journal: Journal, payloads: StoredPayloads, *, is_compared: bool) -> None:
        for name, archive in self.archives.items():
            crcs = [known if isinstance(known, int) else journal.sums[known][0][0] for known in archive.sums]
            files.write_end(name, self.sizes[name], archive.layout.end(crcs))


def plan_state_files(
    states: Mapping[str, Any], index: CheckpointIndex, workers: int, index_file: tuple[str, bytes] | None = None
) -> TargetPlan:
    """Where each tensor of some state dicts, by file name, goes; `SavedTensor`s name keys of `index`."""
    moves: list[TensorMove] = []
    blobs: list[Blob] = []
    sizes: dict[str, int] = {}
    archives: dict[str, _Archive] = {}
    for file, state in states.items():
        pickled, tensors = pickle_state(state)
        layout = ArchiveLayout(pickled, [tensor.nbytes for tensor in tensors])
        blobs.append(Blob(file, 0, layout.begin))
        sums: list[int | str] = []
        for number, (tensor, offset) in enumerate(zip(tensors, layout.offsets, strict=True)):
            if isinstance(tensor.content, bytes):
                crc, frame = crc32(tensor.content), layout.frame(number)
                sums.append(crc)
                blobs.append(Blob(file, offset, frame.head + tensor.content + frame.tail_with(crc)))
            else:
                sums.append(f"{file} {number}")
                moves.append(all_in_one(index.tensors[tensor.content], f"{file} {number}", file, offset))
        sizes[file] = layout.size_bytes
        archives[file] = _Archive(layout, tuple(sums))
    return _TorchPlan(
        work=in_shares(moves, workers),
        blobs=tuple(blobs),
        sizes=sizes,
        files_at_once=1,
        archives=archives,
        index_file=index_file,
    )


def plan_torch_files(
    tensors: Sequence[Exported], index: CheckpointIndex, most_bytes: int, workers: int = 2
) -> TargetPlan:
    """As `plan_safetensors`, in files `pytorch_model...bin`, each with a dict of tensors by name."""
    shards = shard_names(tensors, most_bytes, "pytorch_model", "bin")
    states = {
        file: {tensor.name: SavedTensor(tensor.entry.dtype, tensor.shape, tensor.entry.fqn) for tensor in shard}
        for file, shard in shards.items()
    }
    index_file = ("pytorch_model.bin.index.json", weight_map(shards)) if len(shards) > 1 else None
    return plan_state_files(states, index, workers, index_file)

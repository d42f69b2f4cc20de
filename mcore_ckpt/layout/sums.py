"""From the checksums of all ranks' files to the seal of `.metadata`.

Each rank tells what it has summed as columns of raw numbers, with what it tells at the commit anyway. The coordinator
puts them into the order in which `.metadata` lists the items, which the encoder of the plans knows.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain

from mcore_ckpt.format.metadata_read import COMMON_FILE
from mcore_ckpt.format.seal import MetadataSeal, SealedFile
from mcore_ckpt.layout.buckets import BucketLayout
from mcore_ckpt.layout.file_image import ImageResult

__all__ = ["FileSums", "seal_of_save", "sums_of_objects"]


@dataclass(frozen=True, slots=True)
class FileSums:
    """The checksums of one data file; cheap to pickle.

    Attributes:
        file_name: of the file.
        size_bytes: of the file.
        table_crc32: of the table in its seal.
        crcs: CRC-32 of each tensor's payload, in the order of the file.
        long_payloads: which of the tensors have running sums.
        inner_blocks: how many each of those has.
        blocks: the running sums.
        objects: which of the rank's objects lie in it.
        object_crcs: CRC-32 of each of those.
    """

    file_name: str
    size_bytes: int
    table_crc32: int
    crcs: array[int]
    long_payloads: array[int]
    inner_blocks: array[int]
    blocks: array[int]
    objects: tuple[int, ...]
    object_crcs: array[int]

    @classmethod
    def of(
        cls,
        layout: BucketLayout,
        objects: tuple[int, ...],
        table_crc32: int,
        object_crcs: array[int],
        result: ImageResult,
    ) -> FileSums | None:
        """What is known of a file that was written; None if whoever wrote it has not summed it."""
        if not result.sealed:
            return None
        return cls(
            layout.file_name,
            layout.image.size_bytes,
            table_crc32,
            result.crcs,
            layout.long_payloads,
            layout.inner_blocks,
            result.blocks,
            objects,
            object_crcs,
        )


def sums_of_objects(files: Sequence[FileSums | None]) -> list[int]:
    """CRC-32 of each of a rank's objects, in the rank's own order; for files that are all known."""
    sums = {
        number: crc
        for file in files
        if file is not None
        for number, crc in zip(file.objects, file.object_crcs, strict=True)
    }
    return [sums[number] for number in sorted(sums)]


def seal_of_save(
    save_id: bytes,
    files: Sequence[FileSums],
    order: Sequence[int],
    object_crcs: Sequence[int],
    common: SealedFile | None = None,
) -> MetadataSeal:
    """The seal of a checkpoint.

    Args:
        save_id: of the save.
        files: of all ranks, in the order of the ranks and of their plans.
        order: for each tensor item, as `.metadata` lists them, its number among those of all files.
        object_crcs: of all objects, as `.metadata` lists them.
        common: the file of the common state, if there is one.
    """
    crcs = list(chain.from_iterable(file.crcs for file in files))
    firsts = accumulate((len(file.crcs) for file in files), initial=0)
    running: dict[int, array[int]] = {}
    for first, file in zip(firsts, files, strict=False):
        at = 0
        for number, count in zip(file.long_payloads, file.inner_blocks, strict=True):
            running[first + number] = file.blocks[at : at + count]
            at += count
    summed = [(n, running[number]) for n, number in enumerate(order) if number in running] if running else []
    sealed = {file.file_name: SealedFile(file.size_bytes, file.table_crc32, save_id) for file in files}
    if common is not None:
        sealed[COMMON_FILE] = common
    ordered = array("I", [crcs[number] for number in order])
    ordered.extend(object_crcs)
    return MetadataSeal(
        save_id,
        dict(sorted(sealed.items())),
        ordered,
        array("Q", [n for n, _ in summed]),
        array("I", [len(sums) for _, sums in summed]),
        array("I", chain.from_iterable(sums for _, sums in summed)),
    )

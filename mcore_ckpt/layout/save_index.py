"""From what all ranks have written to `.metadata`: the index of tensors and objects, the manifest of checksums, and the
fingerprints of the tensors.

The coordinator puts the checksums into the order in which `.metadata` lists the items, which the encoder of the plan
knows.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate, chain
from typing import Any

import numpy as np

from mcore_ckpt.core.errors import PlanError
from mcore_ckpt.core.fingerprints import products
from mcore_ckpt.format.file_names import with_id
from mcore_ckpt.format.footer import ManifestFile
from mcore_ckpt.format.index import ObjectEntry
from mcore_ckpt.format.manifest import NO_FINGERPRINT, Manifest
from mcore_ckpt.format.metadata_read import COMMON_FILE
from mcore_ckpt.format.metadata_write import ChunkFactors, MetadataEncoder
from mcore_ckpt.layout.file_image import WrittenFile
from mcore_ckpt.layout.plans import GlobalPlan


def metadata_of_save(
    plan: GlobalPlan,
    encoder: MetadataEncoder,
    objects: Sequence[tuple[ObjectEntry, ...]],
    files: Sequence[tuple[WrittenFile, ...]],
    *,
    save_id: bytes,
    storage_meta: dict[str, Any],
    common: ManifestFile | None = None,
) -> tuple[bytes, Manifest | None]:
    """The content of `.metadata`, and its manifest. Raises `PlanError` if two ranks have written objects of one key.

    `objects` are index entries of each rank's objects, file by file; `files` each rank's files, in the order of its
    plan. Where one has no footer, `.metadata` has no manifest.
    """
    entries: dict[str, ObjectEntry] = {}
    for rank, of_rank in enumerate(objects):
        for entry in of_rank:
            if entry.fqn in entries:
                raise PlanError(f"{entry.fqn}: rank {rank} writes an object that another rank has written, too")
            entries[entry.fqn] = entry
    written = list(chain.from_iterable(files))
    manifest = _manifest(save_id, written, encoder, common) if all(f.has_footer for f in written) else None
    content = encoder.encode(
        entries,
        files={name: with_id(name, save_id) for name, _ in plan.files},
        storage_meta=storage_meta,
        manifest=manifest,
    )
    return content, manifest


def _manifest(
    save_id: bytes, files: Sequence[WrittenFile], encoder: MetadataEncoder, common: ManifestFile | None
) -> Manifest:
    """The manifest of a save."""
    order = encoder.order  # the number of each tensor item among those of all files
    crcs = list(chain.from_iterable(file.crcs for file in files))
    firsts = list(accumulate((len(file.crcs) for file in files), initial=0))
    cumulative: dict[int, array[int]] = {}
    for first, file in zip(firsts, files, strict=False):
        at = 0
        for number, count in zip(file.long_payloads, file.inner_blocks, strict=True):
            cumulative[first + number] = file.blocks[at : at + count]
            at += count
    summed = [(n, cumulative[number]) for n, number in enumerate(order) if number in cumulative] if cumulative else []
    listed = {file.name: ManifestFile(file.size_bytes, file.table_crc32, save_id) for file in files}
    if common is not None:
        listed[COMMON_FILE] = common
    ordered = array("I", [crcs[number] for number in order])
    ordered.extend(chain.from_iterable(file.object_crcs for file in files))
    return Manifest(
        save_id,
        dict(sorted(listed.items())),
        ordered,
        array("Q", [n for n, _ in summed]),
        array("I", [len(sums) for _, sums in summed]),
        array("I", chain.from_iterable(sums for _, sums in summed)),
        fingerprints=None if encoder.factors is None else _fingerprints(encoder.factors, order, crcs, files, firsts),
    )


def _fingerprints(
    factors: ChunkFactors,
    order: Sequence[int],
    crcs: Sequence[int],
    files: Sequence[WrittenFile],
    firsts: Sequence[int],
) -> array[int]:
    """The fingerprint of each tensor; -1 of those without. `firsts`: number of the first item of each file."""
    if not factors.firsts:
        return array("q")
    ordered = np.array(crcs, np.uint32)[np.array(order)]
    multipliers = np.array(factors.factors, np.uint32)
    counts = products(ordered, multipliers)
    unknown = set(factors.without)
    if not multipliers.all():
        parts = {first + n: part for first, file in zip(firsts, files, strict=False) for n, part in file.parts}
        for chunk in np.flatnonzero(multipliers == 0).tolist():
            part = parts.get(order[chunk])
            counts[chunk] = part or 0
            if part is None:  # a rank saves without fingerprints, or a third-party callback has written it
                unknown.add(bisect_right(factors.firsts, chunk) - 1)
    sums = np.bitwise_xor.reduceat(counts, np.array(factors.firsts)).astype(np.int64)
    sums[sorted(unknown)] = NO_FINGERPRINT
    return array("q", sums.tobytes())

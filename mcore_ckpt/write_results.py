"""Comparing what was written with what was planned, item by item, before a checkpoint may be published."""

from __future__ import annotations

from collections import Counter
from itertools import chain

from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, MetadataIndex

from mcore_ckpt.errors import SaveError

__all__ = ["compare_items", "items_of"]


def items_of(metadata: Metadata) -> Counter[MetadataIndex]:
    """Every item that the metadata promises: the chunks of its tensors, and its objects."""
    items: Counter[MetadataIndex] = Counter()
    for key, stored in metadata.state_dict_metadata.items():
        if isinstance(stored, BytesStorageMetadata):
            items[MetadataIndex(key)] += 1
        else:
            items.update(MetadataIndex(key, chunk.offsets) for chunk in stored.chunks)
    return items


def compare_items(planned: Counter[MetadataIndex], written: Counter[MetadataIndex], path: str) -> None:
    """Raise `SaveError` unless each planned item was written once, and nothing else."""
    missing, excess = planned - written, written - planned
    if missing or excess:
        examples = ", ".join(f"{index.fqn} at {index.offset}" for index in list(chain(missing, excess))[:5])
        raise SaveError(
            f"{path}: {sum(missing.values())} planned items were not written and {sum(excess.values())} written items"
            f" were not planned ({examples}); the checkpoint is not published"
        )

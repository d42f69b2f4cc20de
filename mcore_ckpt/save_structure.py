"""What a strategy keeps from one save to the next, and what a rank tells of one save."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from mcore_ckpt.checkpoint_index import ObjectEntry
from mcore_ckpt.local_plan import LocalPlan
from mcore_ckpt.metadata_beside import TensorPlans
from mcore_ckpt.metadata_write import MetadataEncoder
from mcore_ckpt.rank_layout import RankLayout, TensorSpec
from mcore_ckpt.save_report import FileReport

__all__ = ["Planned", "Structure", "Written"]


@dataclass(slots=True)
class Planned:
    """What the coordinator knows of all ranks' tensors.

    Attributes:
        plans: by rank, checked.
        tensors: what `.metadata` is made from.
        encoder: that, made; None until some save's writer, or commit, has done it.
    """

    plans: list[LocalPlan]
    tensors: TensorPlans
    encoder: MetadataEncoder | None = None

    @property
    def files(self) -> list[tuple[str, int]]:
        """Name and length in bytes of all ranks' files, by name."""
        return sorted(
            (name, size) for plan in self.plans for name, size in zip(plan.files, plan.file_bytes, strict=True)
        )

    @property
    def unencoded(self) -> TensorPlans | None:
        """What a writer has to make the encoder from; None if there is one."""
        return self.tensors if self.encoder is None else None

    def metadata_encoder(self, made: MetadataEncoder | None) -> MetadataEncoder:
        """The encoder: the one at hand, or `made` (by the save's writer), or made here and now."""
        if self.encoder is None:
            self.encoder = made or self.tensors.encoder()
        return self.encoder


@dataclass(slots=True)
class Structure:
    """What one strategy keeps between its saves.

    Attributes:
        layout: this rank's files.
        planned: on the coordinator, every rank's plan.
        reused: the last save needed no planning.
        shards: of each shard of the last save, in order, what its specification follows from, and that. To compare
            takes a fraction of the time of working it out.
        laid_out_for: rank and number of ranks when it was laid out: file names and plans are of those. A restart inside
            the process may give it another place.
    """

    layout: RankLayout | None = None
    planned: Planned | None = None
    reused: bool = False
    shards: list[tuple[tuple[Any, ...], TensorSpec]] = field(default_factory=list)
    laid_out_for: tuple[int, int] | None = None

    def layout_for(self, rank: int, ranks: int) -> RankLayout | None:
        """The layout, if there is one and it was made for this rank among this number of ranks."""
        return self.layout if self.laid_out_for == (rank, ranks) else None


@dataclass(slots=True)
class Written:
    """What one rank tells the coordinator after its writing."""

    objects: tuple[ObjectEntry, ...]
    files: tuple[FileReport, ...]
    phases_s: dict[str, float] = field(default_factory=dict)

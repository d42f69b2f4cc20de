"""What a strategy keeps from one save to the next, and what a rank tells of one save."""

from __future__ import annotations

from dataclasses import dataclass, field

from mcore_ckpt.checkpoint_index import ObjectEntry
from mcore_ckpt.local_plan import LocalPlan
from mcore_ckpt.metadata_write import MetadataEncoder
from mcore_ckpt.rank_layout import RankLayout
from mcore_ckpt.save_report import FileReport

__all__ = ["Structure", "Written"]


@dataclass(slots=True)
class Structure:
    """What one strategy keeps between its saves.

    Attributes:
        layout: this rank's files.
        encoder: on the coordinator, makes `.metadata`.
        plans: on the coordinator, every rank's plan.
        reused: the last save needed no planning.
    """

    layout: RankLayout | None = None
    encoder: MetadataEncoder | None = None
    plans: list[LocalPlan] | None = None
    reused: bool = False


@dataclass(slots=True)
class Written:
    """What one rank tells the coordinator after its writing."""

    objects: tuple[ObjectEntry, ...]
    files: tuple[FileReport, ...]
    phases_s: dict[str, float] = field(default_factory=dict)

"""What the ranks of a save agree on before a byte is written: every file, every offset, and that all of it fits.

Layout and plan follow from the structure of the state alone (keys, dtypes, shapes, offsets), and are kept in a
`Structure`. So a further save of the same model is planned by an exchange of a few bytes, in which every rank says that
its structure has stayed, and none of the plans travels again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from mcore_ckpt.core.errors import PlanError, SaveError
from mcore_ckpt.core.failures import attempt, value_of
from mcore_ckpt.core.ranks import RankGroup
from mcore_ckpt.format.file_names import with_id
from mcore_ckpt.format.index import ObjectEntry
from mcore_ckpt.format.metadata_write import MetadataEncoder
from mcore_ckpt.format.seal import SealedFile
from mcore_ckpt.layout.buckets import PlacedObjects, RankLayout, lay_out_rank
from mcore_ckpt.layout.plan_check import check_plans
from mcore_ckpt.layout.plans import LocalPlan, TensorPlans
from mcore_ckpt.layout.shards import noted_shapes
from mcore_ckpt.layout.sums import FileSums, seal_of_save, sums_of_objects
from mcore_ckpt.layout.torch_classes import dcp_dispatch_table, local_plans_as_dcp
from mcore_ckpt.save.rank_state import NOTHING, Described, RankState

__all__ = ["Planned", "SavePlan", "Structure", "place_as_before", "plan_as_before", "plan_save"]


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

    def files(self, save_id: bytes) -> list[tuple[str, int]]:
        """Name and length in bytes of all ranks' files of one save, by name."""
        return sorted(
            (with_id(name, save_id), size)
            for plan in self.plans
            for name, size in zip(plan.files, plan.file_bytes, strict=True)
        )

    @property
    def unencoded(self) -> TensorPlans | None:
        """What a writer has to make the encoder from; None if there is one."""
        return self.tensors if self.encoder is None else None

    def metadata(
        self,
        objects: Sequence[tuple[ObjectEntry, ...]],
        storage_meta: dict[str, Any],
        plans: bool,
        save_id: bytes,
        sums: Sequence[tuple[FileSums | None, ...]],
        common: SealedFile | None = None,
    ) -> bytes:
        """The content of `.metadata`.

        Args:
            objects: of each rank.
            storage_meta: which save this is.
            plans: put every rank's plan into it (`SaveOptions.keep_local_plans`).
            save_id: of the save.
            sums: of each rank's files; where one is missing, `.metadata` is not sealed.
            common: the file of the common state, for the seal; None if there is none.

        Raises:
            PlanError: two ranks have written objects of the same key.
        """
        entries: dict[str, ObjectEntry] = {}
        for rank, of_rank in enumerate(objects):
            for entry in of_rank:
                if entry.fqn in entries:
                    raise PlanError(f"{entry.fqn}: rank {rank} writes an object that another rank has written, too")
                entries[entry.fqn] = entry
        if self.encoder is None:
            self.encoder = self.tensors.encoder()
        keys = [[entry.fqn for entry in of_rank] for of_rank in objects]
        local_plans = local_plans_as_dcp(self.plans, keys) if plans else None
        known = [file for of_rank in sums for file in of_rank if file is not None]
        seal = None
        if len(known) == sum(map(len, sums)):
            object_crcs = [crc for of_rank in sums for crc in sums_of_objects(of_rank)]
            seal = seal_of_save(save_id, known, self.encoder.order, object_crcs, common)
        files = {name: with_id(name, save_id) for plan in self.plans for name in plan.files}
        return self.encoder.encode(
            entries,
            files=files,
            storage_meta=storage_meta,
            local_plans=local_plans,
            dispatch_table=dcp_dispatch_table() if plans else None,
            seal=seal,
        )


@dataclass(slots=True)
class Structure:
    """What one strategy keeps between its saves.

    Attributes:
        layout: this rank's files.
        planned: on the coordinator, every rank's plan.
        described: the shards of the last save. To compare takes a fraction of the time of describing them.
        laid_out_for: rank, number of ranks and `thread_count` when it was laid out: file names and plans are of those.
            A restart inside the process may give it another place, and a setting may be changed between two saves.
    """

    layout: RankLayout | None = None
    planned: Planned | None = None
    described: Described = NOTHING
    laid_out_for: tuple[int, int, int] | None = None


@dataclass(frozen=True, slots=True)
class SavePlan:
    """What one rank is going to write, and on the coordinator what all are.

    Attributes:
        layout: this rank's files.
        placed: where this save's objects lie in them.
        planned: on the coordinator, every rank's plan.
        save_id: of the save, the same on all ranks.
        reused: it is the plan of the save before.
    """

    layout: RankLayout
    placed: PlacedObjects
    planned: Planned | None
    save_id: bytes
    reused: bool

    @property
    def unencoded(self) -> TensorPlans | None:
        """On the coordinator, what `.metadata` is still to be made from, beside the writing."""
        return None if self.planned is None else self.planned.unencoded

    @property
    def files(self) -> list[str]:
        """Names of this rank's files."""
        return [bucket.file_name for bucket in self.layout.buckets]


def place_as_before(
    structure: Structure, state: RankState, group: RankGroup, *, thread_count: int, separation_hint: str | None
) -> PlacedObjects | None:
    """Where this save's objects would lie in the files of the save before; None if this rank needs a new layout."""
    layout = structure.layout
    if layout is None or structure.laid_out_for != (group.rank, group.size, thread_count):
        return None
    if layout.separation_hint != separation_hint or layout.specs != state.specs:
        return None
    return layout.place_objects(state.object_keys, state.object_bytes)


def plan_as_before(structure: Structure, placed: PlacedObjects, save_id: bytes) -> SavePlan:
    """The plan of the save before, for the files of another save."""
    assert structure.layout is not None
    return SavePlan(structure.layout.named(save_id), placed.named(save_id), structure.planned, save_id, reused=True)


def plan_save(
    structure: Structure,
    state: RankState,
    group: RankGroup,
    *,
    save_id: bytes,
    thread_count: int,
    separation_hint: str | None,
) -> SavePlan:
    """Lay out what this rank writes, and let the coordinator check the plans of all ranks.

    Args:
        structure: takes the result, for the next save.
        state: what this rank writes.
        group: the ranks that save; all call this.
        save_id: of the save.
        thread_count: files of this rank, at most.
        separation_hint: prefix of keys that get files of their own.

    Raises:
        PlanError: the ranks' shards do not make up the tensors; the same on every rank.
    """
    structure.layout = structure.planned = None
    laid_out = attempt(
        partial(
            lay_out_rank,
            state.specs,
            state.object_keys,
            state.object_bytes,
            rank=group.rank,
            thread_count=thread_count,
            separation_hint=separation_hint,
        )
    )
    placed = attempt(partial(_place, laid_out, state))
    encoded = group.run_gather("plan the save", partial(_told, laid_out, placed, state), wrap=SaveError)
    planned = attempt(partial(_checked, encoded)) if encoded is not None else None
    group.run_on_coordinator("check the plan", partial(_is_good, planned), wrap=SaveError)
    structure.layout, structure.planned = value_of(laid_out), None if planned is None else value_of(planned)
    structure.laid_out_for = (group.rank, group.size, thread_count)
    return SavePlan(
        structure.layout.named(save_id), value_of(placed).named(save_id), structure.planned, save_id, reused=False
    )


def _place(laid_out: RankLayout | BaseException, state: RankState) -> PlacedObjects:
    placed = value_of(laid_out).place_objects(state.object_keys, state.object_bytes)
    if placed is None:
        raise PlanError(f"no room for the objects {state.object_keys[:5]} in the files planned for them")
    return placed


def _told(
    laid_out: RankLayout | BaseException, placed: PlacedObjects | BaseException, state: RankState
) -> tuple[bytes, dict[str, tuple[int, ...]]]:
    """What a rank tells the coordinator: its plan, and the shapes of parameters that are stored in another form."""
    value_of(placed)
    own_shapes = {spec.key: spec.original_shape for spec in state.specs if spec.original_shape is not None}
    return value_of(laid_out).plan.encode(), own_shapes


def _checked(encoded: Sequence[tuple[bytes, dict[str, tuple[int, ...]]]]) -> Planned:
    plans = [LocalPlan.decode(data) for data, _ in encoded]
    check_plans(plans)
    notes = noted_shapes(own_shapes for _, own_shapes in encoded)
    return Planned(plans, TensorPlans(tuple(data for data, _ in encoded), notes))


def _is_good(planned: Planned | BaseException | None) -> None:
    assert planned is not None  # only the coordinator is asked, and it has the plans
    value_of(planned)

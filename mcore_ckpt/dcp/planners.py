"""The planners of saves and loads, on `torch.distributed.checkpoint`'s protocols: DCP's own, which check more.

A save is checked to make up each tensor; a load has each key checked for kind, global shape and dtype before anything
is read, and unpickles no class outside the allow-list.
"""

from __future__ import annotations

import io
from typing import Any

import torch
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner, LoadPlan, Metadata, SavePlan
from torch.distributed.checkpoint._nested_dict import set_element
from torch.distributed.checkpoint.metadata import (
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import ReadItem

from mcore_ckpt.core.boxes import Box, covers
from mcore_ckpt.core.errors import KindMismatchError, PlanError, ShapeMismatchError
from mcore_ckpt.core.options import LoadOptions
from mcore_ckpt.core.process import collector_paused
from mcore_ckpt.core.ranks import without_modes
from mcore_ckpt.format.safe_pickle import load_object
from mcore_ckpt.load.records import missing_key
from mcore_ckpt.load.requests import check_dtype, check_planned
from mcore_ckpt.state.shards import global_shape


class MCoreSavePlanner(DefaultSavePlanner):
    """Plans a save as DCP's default planner does, and checks that the chunks make up each tensor.

    Args:
        dedup_replicated_tensors: accepted for Megatron's sake; replicas are never written twice.
        can_run_decentralized_global_plan: accepted for Megatron's sake; the coordinator plans.
        options: as in DCP's default planner.
    """

    def __init__(
        self,
        *,
        dedup_replicated_tensors: bool | None = None,
        can_run_decentralized_global_plan: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(**options)

    @without_modes()
    def create_local_plan(self) -> SavePlan:
        return super().create_local_plan()

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """The coordinator's part: deduplicate what is replicated, and check that the chunks make up each tensor.

        Raises:
            PlanError: a chunk is planned twice, is missing, or lies outside its tensor; names the key.
        """
        try:
            plans, metadata = super().create_global_plan(all_plans)
        except (ValueError, AssertionError) as error:
            raise PlanError(f"the ranks' plans do not fit together: {error}") from error
        for key, stored in metadata.state_dict_metadata.items():
            if isinstance(stored, TensorStorageMetadata):
                boxes = [Box(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in stored.chunks]
                problem = covers(tuple(stored.size), boxes)
                if problem:
                    raise PlanError(f"{key}: {problem}")
        return plans, metadata


class MCoreLoadPlanner(DefaultLoadPlanner):
    """Plans a load as DCP's default planner does, and checks key, kind, global shape and dtype of what is asked for.

    Args:
        options: `LoadOptions`; `on_dtype_mismatch` and `allowed_classes` matter here.
        **default_options: `flatten_state_dict`, `flatten_sharded_tensors`, `allow_partial_load` of DCP's planner.
    """

    def __init__(self, *, options: LoadOptions | None = None, **default_options: Any) -> None:
        super().__init__(**default_options)
        self._options = LoadOptions.from_environment() if options is None else options

    @collector_paused()
    @without_modes()
    def create_local_plan(self) -> LoadPlan:
        """Read items for this rank.

        Raises:
            MissingKeyError: a key is not in the checkpoint (and `allow_partial_load` is off).
            KindMismatchError, ShapeMismatchError, DtypeMismatchError: it is stored as something else.
            CorruptCheckpointError: the stored chunks do not hold all that is requested.
        """
        assert self.metadata is not None  # DCP sets the planner up with it
        stored = self.metadata.state_dict_metadata
        for key, value in self.state_dict.items():
            if key in stored:
                self._check(key, value, stored[key])
            elif not self.allow_partial_load:
                raise missing_key(key, "the checkpoint", stored)
        plan = super().create_local_plan()
        check_planned(plan.items, self.state_dict, stored, "the checkpoint")
        return plan

    def _check(self, key: str, value: Any, stored: Any) -> None:
        is_tensor = isinstance(stored, TensorStorageMetadata)
        if isinstance(value, torch.Tensor):
            if not is_tensor:
                raise KindMismatchError(f"{key}: a tensor is requested, the checkpoint holds an object under this key")
            if tuple(stored.size) != global_shape(value):
                raise ShapeMismatchError(
                    f"{key}: the checkpoint holds global shape {tuple(stored.size)}, the model expects "
                    f"{global_shape(value)}"
                )
            policy = self._options.on_dtype_mismatch
            check_dtype(key, "the checkpoint", stored.properties.dtype, value.dtype, policy)
        elif is_tensor and not (hasattr(value, "__create_chunk_list__") or hasattr(value, "local_shards")):
            raise KindMismatchError(f"{key}: the checkpoint holds a tensor, the state dict a {type(value).__name__}")

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Put a stored object where it belongs; its pickle goes through the allow-list.

        Raises:
            UnsafePickleError: the object contains a class outside the allow-list.
        """
        key = read_item.dest_index.fqn
        loaded = load_object(value.read(), self._options.allowed_classes, where=key)
        if self.flatten_state_dict:
            set_element(self.original_state_dict, self.mappings[key], loaded)
        else:
            self.state_dict[key] = loaded

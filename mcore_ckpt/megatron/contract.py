"""Each function and class of Megatron-Core that this package replaces or calls: since when, and what its absence costs.

`install()` asks this table before it changes anything, `mcore-ckpt doctor` prints it, and a test looks for all of it in
each version. Without a name whose row says of no loss `install()` refuses.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Version = tuple[int, int]
_ALWAYS: Version = (99, 0)


@dataclass(frozen=True, slots=True)
class Name:
    """One name of Megatron.

    Attributes:
        module: below `megatron.core.dist_checkpointing`.
        name: of a function, class, or method (`Class.method`).
        use: "replaced" by ours, or "called" by ours.
        since: first version of megatron-core, major and minor, of which it is used.
        until: last one.
        absence: what is lost without it; empty if it is needed.
    """

    module: str
    name: str
    use: Literal["replaced", "called"]
    since: Version = (0, 12)
    until: Version = _ALWAYS
    absence: str = ""

    def belongs_to(self, version: Version) -> bool:
        """Whether it is used of that version of megatron-core."""
        return self.since <= version <= self.until

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


_REGISTRY: Version = (0, 16)  # the last version with a registry of strategies
_OURS = "asynchronous saves use the queue and the requests of mcore_ckpt"

CONTRACT: tuple[Name, ...] = (
    Name("strategies.torch", "TorchDistSaveShardedStrategy", "replaced"),
    Name("strategies.torch", "TorchDistLoadShardedStrategy", "replaced"),
    Name("strategies.torch", "register_default_torch_strategies", "replaced", until=_REGISTRY),
    Name("strategies.base", "register_default_strategy", "called", until=_REGISTRY),
    Name("strategies.base", "StrategyAction", "called", until=_REGISTRY),
    Name("strategies.base", "AsyncSaveShardedStrategy", "called", until=_REGISTRY),
    Name("strategies.base", "LoadShardedStrategy", "called", until=_REGISTRY),
    Name("strategies.common", "TorchCommonSaveStrategy.save_common", "replaced", until=_REGISTRY),
    Name("strategies.common", "TorchCommonLoadStrategy.load_common", "replaced", until=_REGISTRY),
    Name("strategies.common", "save_common", "replaced", since=(0, 17)),
    Name("strategies.common", "load_common", "replaced", since=(0, 17)),
    Name("serialization", "save", "replaced"),
    Name("serialization", "load", "replaced"),
    Name("serialization", "load_common_state_dict", "replaced", since=(0, 19)),
    Name("serialization", "remove_sharded_tensors", "replaced", since=(0, 17)),
    Name("core", "save_config", "replaced"),
    Name("core", "maybe_load_config", "replaced"),
    Name("core", "CheckpointingConfig", "called"),
    Name("core", "CheckpointingException", "called"),
    Name("validation", "verify_checkpoint", "called", since=(0, 17)),
    Name("validation", "determine_global_metadata", "replaced"),
    Name("validation", "validate_sharding_integrity", "replaced"),
    Name(
        "validation",
        "save_integrity_manifest",
        "replaced",
        since=(0, 17),
        absence="integrity.json of --verify-integrity is written by Megatron, of all files of the directory",
    ),
    Name("strategies.fully_parallel", "FullyParallelSaveStrategyWrapper.apply_saving_parallelization", "replaced"),
    Name("strategies.fully_parallel", "FullyParallelLoadStrategyWrapper.load", "replaced"),
    Name("strategies.fully_parallel", "FullyParallelLoadStrategyWrapper.fill_in_deferred_sharded_objects", "called"),
    Name("exchange_utils", "determine_main_replica_uniform_distribution", "replaced"),
    Name("exchange_utils", "ShardDistribution", "called"),
    Name("exchange_utils", "_shard_size", "called"),
    Name("utils", "_sharded_tensor_shard_id", "called"),
    Name("utils", "_sharded_object_id", "called"),
    Name("dict_utils", "diff", "called"),
    Name("mapping", "ShardedTensor", "called"),
    Name("mapping", "ShardedObject", "called"),
    Name(
        "strategies.torch",
        "get_async_strategy",
        "replaced",
        since=(0, 17),
        absence="training code that imports nvidia-resiliency-ext by itself finds its names, which are supplied",
    ),
    Name("strategies.async_utils", "AsyncCallsQueue", "replaced", absence=_OURS),
    Name("strategies.async_utils", "AsyncRequest", "called", absence=_OURS),
    Name(
        "strategies.filesystem_async",
        "FileSystemWriterAsync",
        "replaced",
        absence="code that writes through DCP finds the writer in mcore_ckpt or in nvidia-resiliency-ext",
    ),
)

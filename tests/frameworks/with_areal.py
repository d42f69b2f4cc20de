"""AReaL's `MegatronCheckpointManager`, called as its engine does, but for two arguments of the optimizer's state dict.

AReaL leaves them out: Megatron-Core 0.17 then refuses the save, and a resume has no moments.
"""

import sys
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

# Their `__init__` imports controllers and servers; the third one, of which nothing is called, needs numba.
for _name in ("areal", "areal.infra"):
    _spec: Any = find_spec(_name)
    sys.modules[_name] = ModuleType(_name)
    sys.modules[_name].__path__ = list(_spec.submodule_search_locations)
sys.modules["areal.utils.seqpack"] = SimpleNamespace(flat2d=None)  # type: ignore[assignment]

from areal.engine.megatron_utils.checkpointer import MegatronCheckpointManager  # noqa: E402


class Manager:
    """Saves into `RUN/step_N`, and resumes from the last one that is complete.

    Args:
        job: what is trained.
        async_save: as of AReaL's `MegatronEngineConfig`.
    """

    def __init__(self, job: Any, async_save: bool = False) -> None:
        self._run, self._is_loading = Path(job.run), True
        stock, metadata = job.optimizer.sharded_state_dict, {"distrib_optim_sharding_type": "dp_reshardable"}
        job.optimizer.sharded_state_dict = lambda state: stock(state, self._is_loading, metadata=metadata)
        self._manager = MegatronCheckpointManager(
            job.model, job.optimizer, job.scheduler, use_checkpoint_opt_param_scheduler=True, async_save=async_save
        )

    def load(self) -> int:
        found = [int(one.parent.name.removeprefix("step_")) for one in self._run.glob("step_*/.metadata")]
        if found:
            self._manager.load_checkpoint(str(self._run / f"step_{max(found)}"))
        self._is_loading = False
        return max(found, default=0)

    def save(self, step: int) -> None:
        folder = self._run / f"step_{step}"
        folder.mkdir(parents=True, exist_ok=True)
        self._manager.save_checkpoint(str(folder))

    def between(self) -> None:
        """AReaL finalizes a save ahead of the next one, of a load, and at the end."""

    def finish(self) -> None:
        self._manager.close()

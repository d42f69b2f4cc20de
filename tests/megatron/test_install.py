"""`install()`: who serves Megatron afterwards, and that nothing is left behind.

Each test runs in a child process of its own, forked from one in which nothing is installed.
"""

import importlib
import logging
import os
import pickle
import subprocess
import sys
import tempfile
import types
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import Any

import megatron.core
import megatron.core.dist_checkpointing.strategies.fully_parallel
import pytest
import torch
import torch.distributed.checkpoint
from megatron.core import package_info
from megatron.core.dist_checkpointing import serialization, validation
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.strategies import async_utils
from megatron.core.dist_checkpointing.strategies import torch as strategies

import mcore_ckpt
import mcore_ckpt.megatron.strategy
from mcore_ckpt import (
    CheckpointError,
    CheckpointNotFoundError,
    MissingKeyError,
    OptionError,
    SaveOptions,
    StrategyNotFoundError,
    TorchDistLoadStrategy,
    TorchDistSaveStrategy,
    UnsupportedMegatronError,
    get_strategy,
    register_strategy,
)
from mcore_ckpt.commands.cli import main
from mcore_ckpt.launch import main as launch
from mcore_ckpt.megatron import strategy as registry
from mcore_ckpt.megatron.calls import as_megatron_error
from mcore_ckpt.megatron.install import CONTRACT, _AfterImport, owner_of
from mcore_ckpt.megatron.versions import TESTED_VERSIONS, megatron_version
from tests.support.command import document_of, output_of
from tests.support.kept_log import kept_log
from tests.support.processes import forked, in_child

pytest.importorskip("megatron.core")


HAS_REGISTRY = megatron_version() < (0, 17)
ROOT = Path(__file__).resolve().parents[2]
FINDS = "megatron.core.dist_checkpointing.strategies.torch"


def new_each_time(make: Callable[[], Any], expected: type) -> None:
    first, second = make(), make()
    assert type(first) is expected, first
    assert type(second) is expected
    assert first is not second


@forked
def test_every_way_to_a_default_strategy_gives_a_new_one_of_ours() -> None:
    mcore_ckpt.install()
    new_each_time(lambda: serialization.get_default_save_sharded_strategy("torch_dist"), TorchDistSaveStrategy)
    new_each_time(lambda: strategies.TorchDistSaveShardedStrategy("torch_dist", 1), TorchDistSaveStrategy)
    new_each_time(strategies.TorchDistLoadShardedStrategy, TorchDistLoadStrategy)
    if megatron_version() < (0, 19):
        from megatron.core.dist_checkpointing.strategies.base import StrategyAction, get_default_strategy

        for _ in range(3):  # the stock registry is refilled with stock strategies at every look-up
            new_each_time(
                lambda: get_default_strategy(StrategyAction.SAVE_SHARDED, "torch_dist", 1), TorchDistSaveStrategy
            )
            new_each_time(
                lambda: get_default_strategy(StrategyAction.LOAD_SHARDED, "torch_dist", 1), TorchDistLoadStrategy
            )


@pytest.mark.skipif(not HAS_REGISTRY, reason="this Megatron has no registry to look into")
@forked
def test_our_registry_decides_what_megatrons_look_up_finds() -> None:
    from megatron.core.dist_checkpointing.strategies.base import StrategyAction, get_default_strategy

    mcore_ckpt.install()
    mine = TorchDistSaveStrategy(options=SaveOptions(thread_count=7))
    register_strategy("save_sharded", "torch_dist", 1, mine)
    assert get_default_strategy(StrategyAction.SAVE_SHARDED, "torch_dist", 1) is mine


class Action(Enum):
    """As Megatron's `StrategyAction`."""

    SAVE_SHARDED = "save_sharded"


class Strategy:
    """Stands for a strategy; callable, to show that an instance is not mistaken for a factory."""

    def save(self) -> None:
        """Save nothing."""

    def __call__(self) -> None:
        raise AssertionError("a strategy was called as if it were a factory")


@pytest.mark.quick
def test_a_factory_is_called_at_each_look_up_and_an_instance_is_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_factories", dict(registry._factories))
    register_strategy("save_sharded", "mine", 3, Strategy)
    first, second = get_strategy("save_sharded", "mine", 3), get_strategy(Action.SAVE_SHARDED, "mine", 3)
    assert isinstance(first, Strategy)
    assert first is not second
    register_strategy(Action.SAVE_SHARDED, "mine", 3, first)  # a later registration wins
    assert get_strategy("save_sharded", "mine", 3) is get_strategy(Action.SAVE_SHARDED, "mine", 3) is first
    with pytest.raises(StrategyNotFoundError) as caught:
        get_strategy("save_sharded", "zarr", 1)
    for named in (
        "save_sharded 'zarr' version 1",
        "save_sharded 'mine' version 3",
        "load_sharded 'torch_dist' version 1",
    ):
        assert named in str(caught.value)
    with pytest.raises(OptionError, match="load_sharded"):
        register_strategy("save", "mine", 1, Strategy)


def module_with(name: str, code: str) -> Any:
    module = types.ModuleType(name)
    sys.modules[name] = module
    exec(code, vars(module))
    return module


@forked
def test_modules_that_had_imported_the_names_get_ours_and_get_them_back() -> None:
    early = module_with(
        "a_framework",
        f"from {FINDS} import TorchDistSaveShardedStrategy\nfrom {FINDS} import TorchDistLoadShardedStrategy as Load",
    )
    stock_save, stock_load = early.TorchDistSaveShardedStrategy, early.Load
    mcore_ckpt.install()
    assert early.TorchDistSaveShardedStrategy is TorchDistSaveStrategy
    assert early.Load is TorchDistLoadStrategy
    late = module_with(
        "another_framework",
        f"from {FINDS} import TorchDistSaveShardedStrategy\nfrom mcore_ckpt import TorchDistSaveStrategy",
    )
    mcore_ckpt.uninstall()
    assert early.TorchDistSaveShardedStrategy is stock_save
    assert early.Load is stock_load
    assert late.TorchDistSaveShardedStrategy is stock_save
    assert late.TorchDistSaveStrategy is TorchDistSaveStrategy is mcore_ckpt.TorchDistSaveStrategy


def globals_of(prefix: str) -> dict[Any, int]:
    return {
        (name, key): id(value)
        for name, module in list(sys.modules.items())
        if name.partition(".")[0] == prefix
        for key, value in list(vars(module).items())
        if not key.startswith("__")
    }


@forked
def test_uninstall_restores_all_names_and_methods_and_torch_itself_is_not_changed() -> None:
    def picture() -> dict[Any, int]:
        members = {("queue", key): id(value) for key, value in vars(async_utils.AsyncCallsQueue).items()}
        return {**globals_of("megatron"), **members}

    mcore_ckpt.install()  # imports what it needs
    mcore_ckpt.uninstall()
    before = picture()
    torch_before = globals_of("torch"), dict(vars(torch.Tensor))
    replaced = mcore_ckpt.install()
    assert (globals_of("torch"), dict(vars(torch.Tensor))) == torch_before
    assert mcore_ckpt.install() == replaced
    assert picture() != before
    mcore_ckpt.uninstall()
    after = picture()
    assert after == before, {key for key in after | before if after.get(key) != before.get(key)}


@forked
def test_one_line_on_rank_0_says_what_is_in_force_and_logging_stays_the_programs() -> None:
    seen: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: seen.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("mcore_ckpt").addHandler(handler)
    os.environ["RANK"] = "1"
    mcore_ckpt.install()
    mcore_ckpt.uninstall()
    assert seen == []
    os.environ["RANK"] = "0"
    mcore_ckpt.install()
    mcore_ckpt.install()
    (line,) = seen
    assert "TorchDistSaveStrategy and TorchDistLoadStrategy" in line
    assert megatron.core.__version__ in line
    assert not logging.getLogger("mcore_ckpt").isEnabledFor(logging.INFO)


@forked
def test_options_come_from_the_environment() -> None:
    os.environ.update(MCORE_CKPT_THREAD_COUNT="5", MCORE_CKPT_ON_EXISTING="error", MCORE_CKPT_PAGE_CACHE="on")
    mcore_ckpt.install()
    strategy = serialization.get_default_save_sharded_strategy("torch_dist")
    assert strategy.thread_count == 5
    assert strategy.options.on_existing == "error"
    assert strategies.TorchDistLoadShardedStrategy().options.page_cache == "on"
    mcore_ckpt.uninstall()
    os.environ["MCORE_CKPT_PAGE_CACHE"] = "off"
    with pytest.raises(mcore_ckpt.OptionError, match="MCORE_CKPT_PAGE_CACHE='off'"):
        mcore_ckpt.install()


@forked
def test_a_newer_version_is_warned_about_and_never_served_by_half() -> None:
    package_info.MINOR = 99
    stock = strategies.TorchDistSaveShardedStrategy
    with kept_log() as said:
        if HAS_REGISTRY:  # what is installed is an old one in truth, and lacks what the newest has
            with pytest.raises(UnsupportedMegatronError, match="Nothing was changed"):
                mcore_ckpt.install()
            assert strategies.TorchDistSaveShardedStrategy is stock
        else:
            mcore_ckpt.install()
            assert strategies.TorchDistSaveShardedStrategy is TorchDistSaveStrategy
    (warning,) = said
    assert TESTED_VERSIONS[0] in warning
    assert TESTED_VERSIONS[-1] in warning


@forked
def test_an_incompatible_version_is_refused_and_stays_as_it_was() -> None:
    stock = strategies.TorchDistSaveShardedStrategy
    del validation.determine_global_metadata
    with pytest.raises(UnsupportedMegatronError, match=r"validation\.determine_global_metadata.*0\.12\.3 to 0\.19\.2"):
        mcore_ckpt.install()
    assert strategies.TorchDistSaveShardedStrategy is stock


@forked
def test_this_version_has_all_of_the_contract_those_names_included_that_it_need_not_have() -> None:
    assert not [str(name) for name in CONTRACT if name.belongs_to(megatron_version()[:2]) and owner_of(name) is None]


@forked
def test_doctor_says_what_install_finds_here(tmp_path: Path) -> None:
    """In a child: Megatron is imported, and warnings are switched off."""
    found = {one["what"]: one["state"] for one in document_of("doctor", tmp_path)["findings"]}
    assert found["serialization.save"] == "replaced by mcore_ckpt"
    assert found[f"direct I/O in {tmp_path}"] in ("works", "refused")
    os.environ["MCORE_CKPT_WRITER"] = "pigeon"
    assert "MCORE_CKPT_WRITER='pigeon'" in output_of("doctor", tmp_path, code=1)
    assert main(["doctor", str(tmp_path / "absent")]) == 2
    assert not list(tmp_path.iterdir())


@forked
def test_a_version_that_is_too_old_is_refused() -> None:
    package_info.MAJOR, package_info.MINOR, package_info.PATCH = 0, 11, 0
    with pytest.raises(UnsupportedMegatronError, match=r"0\.11\.0.*0\.12\.3"):
        mcore_ckpt.install()


def storage_client() -> Any:
    """The multi-storage client if it is installed, or what Megatron calls of it, for local paths."""
    try:
        return importlib.import_module("multistorageclient")
    except ModuleNotFoundError:
        client: Any = types.ModuleType("multistorageclient")
        client.Path, client.open, client.torch = Path, open, torch
        isdir = lambda path, strict=True: os.path.isdir(path)  # noqa: E731
        path = types.SimpleNamespace(isdir=isdir, exists=os.path.exists)
        client.os = types.SimpleNamespace(path=path, makedirs=os.makedirs)
        return client


def state_to_save(value: float) -> dict[str, Any]:
    from megatron.core.dist_checkpointing import ShardedTensor

    tensor = torch.full((10,), value)
    return {"w": ShardedTensor.from_rank_offsets("w", tensor), "iteration": int(value)}


@pytest.mark.skipif(megatron_version() < (0, 13), reason="this Megatron has no multi-storage client")
@forked
def test_a_local_path_is_served_though_the_multi_storage_client_is_on() -> None:
    """To 0.16 Megatron switches it on wherever its package is installed, as in NVIDIA's containers."""
    from megatron.core import msc_utils

    msc_utils.msc = storage_client()
    msc_utils.MultiStorageClientFeature.enable()
    assert msc_utils.MultiStorageClientFeature.is_enabled()
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    mcore_ckpt.install()
    target = Path(tempfile.mkdtemp())
    megatron.core.dist_checkpointing.save(state_to_save(1), str(target))
    queue = async_utils.AsyncCallsQueue()
    queue.schedule_async_request(
        megatron.core.dist_checkpointing.save(state_to_save(3), str(target), async_sharded_save=True)
    )
    queue.maybe_finalize_async_calls(blocking=True)
    queue.close()
    loaded = megatron.core.dist_checkpointing.load(state_to_save(-1), str(target))
    assert loaded["iteration"] == 3
    assert torch.equal(loaded["w"], torch.full((10,), 3.0))


@forked
def test_errors_are_megatrons_and_ours() -> None:
    try:
        try:
            Path("/nowhere/at/all").read_text()
        except OSError as cause:
            raise MissingKeyError("no such key: a.b") from cause
    except CheckpointError as error:
        same = as_megatron_error(error)
    assert isinstance(same, CheckpointingException)
    assert isinstance(same, MissingKeyError)
    assert isinstance(same.__cause__, FileNotFoundError)
    copied = pickle.loads(pickle.dumps(same))
    assert (type(copied), str(copied)) == (type(same), str(same))
    lost = as_megatron_error(CheckpointNotFoundError(2, "no checkpoint", "/nowhere"))
    assert isinstance(lost, FileNotFoundError)
    assert lost.filename == "/nowhere"
    assert str(as_megatron_error(CheckpointNotFoundError("no checkpoint at /nowhere"))) == "no checkpoint at /nowhere"


@pytest.mark.skipif(HAS_REGISTRY, reason="this Megatron takes any strategy that has its abstract base")
def test_strategies_pass_for_megatrons_own_and_run_nothing_of_them() -> None:
    """From 0.17 on Megatron replaces what is no instance of its own class by one of its own, without a word."""
    strategy = TorchDistSaveStrategy()
    assert isinstance(strategy, strategies.TorchDistSaveShardedStrategy)
    assert isinstance(TorchDistLoadStrategy(), strategies.TorchDistLoadShardedStrategy)
    with pytest.raises(UnsupportedMegatronError, match="_get_save_and_finalize_callbacks"):
        strategy._get_save_and_finalize_callbacks(None, None, "mcore")


SCRIPT = """
import atexit, pickle, sys
import __main__
import neighbour
class Here: number: int = 1
assert Here.__annotations__ == {"number": int}
assert __name__ == "__main__" and __main__.Here is Here
assert isinstance(pickle.loads(pickle.dumps(Here())), Here)
assert sys.modules["__mp_main__"].Here is Here, "by that name processes of multiprocessing send one back"
import megatron.core.dist_checkpointing.strategies.torch as strategies
atexit.register(lambda: print("at exit:", sys.modules["__main__"].Here is Here))
import logging
logging.getLogger("mcore_ckpt").warning("before the set-up")
logging.basicConfig()
logging.getLogger("mcore_ckpt").warning("after the set-up")
print(sys.argv, strategies.TorchDistSaveShardedStrategy.__module__)
import tempfile, torch, torch.distributed.checkpoint as dcp
import mcore_ckpt.save.async_queue
with tempfile.TemporaryDirectory() as path:
    dcp.save({"a": torch.ones(3)}, storage_writer=mcore_ckpt.FileSystemWriterAsync(path), no_dist=True)
    dcp.load({"a": torch.zeros(3)}, storage_reader=mcore_ckpt.FileSystemReader(path), no_dist=True)
print(*{name.split(".")[1] for name in sys.modules if name.startswith("mcore_ckpt.")})
sys.exit(7)
"""


def test_launch_runs_a_script_as_python_would(tmp_path: Path) -> None:
    (tmp_path / "neighbour.py").touch()
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-W", "ignore", "-m", "mcore_ckpt.launch", str(script), "--ckpt-format", "torch_dist"]
    path = os.pathsep.join([*filter(None, [os.environ.get("PYTHONPATH")]), str(ROOT)])  # this checkout
    environment = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT, env=environment)
    assert done.returncode == 7, done.stderr
    first, layers, last = done.stdout.splitlines()
    assert first == f"{[str(script), '--ckpt-format', 'torch_dist']} mcore_ckpt.megatron.strategy"
    assert last == "at exit: True"
    assert {"megatron", "dcp", "load", "save"} <= set(layers.split())
    assert not {"tools", "reshard", "models", "commands"} & set(layers.split()), "a trainer needs none of them"
    for line in ("are in force for megatron-core", "before the set-up", "after the set-up"):
        assert done.stderr.count(line) == 1, done.stderr


@forked
def test_methods_that_are_patched_and_not_called_are_named_at_install() -> None:
    writer = importlib.import_module("megatron.core.dist_checkpointing.strategies.filesystem_async")
    with kept_log() as said, pytest.MonkeyPatch.context() as patch:
        mcore_ckpt.install()
        mcore_ckpt.uninstall()
        assert "is replaced by" not in "".join(said)
        patch.setattr(writer.FileSystemWriterAsync, "write_preloaded_data", staticmethod(lambda *_: None))
        patch.setattr(strategies.MCoreLoadPlanner, "create_local_plan", lambda _: None)
        mcore_ckpt.install()
    for method in ("FileSystemWriterAsync.write_preloaded_data", "MCoreLoadPlanner.create_local_plan"):
        assert f"{method} is replaced by code of {__name__}" in "".join(said)


# --- who certifies a resume -------------------------------------------------------------------------------------------

TRAINING = {
    "__init__": "",
    "checkpointing": """
from argparse import Namespace
import torch
import megatron.training.async_utils
from megatron.core import dist_checkpointing

def get_rng_state():
    return None

def generate_state_dict(args, rng_state, iteration=None, optim_sd_kwargs=None, rerun_state=None):
    weight = dist_checkpointing.ShardedTensor.from_rank_offsets("w", torch.full((10,), 3.0))
    return {"args": args, "w": weight, "iteration": iteration}

def load_checkpoint(model, optimizer, path):
    off = dict.fromkeys(("finetune", "no_load_optim", "no_load_rng"), False)
    dist_checkpointing.load(generate_state_dict(Namespace(**off), get_rng_state()), path)
    return 3, 0
""",
    "async_utils": "",
    "training": """
from megatron.training.checkpointing import load_checkpoint
import megatron.training.initialize

def pretrain(path):
    load_checkpoint(None, None, path)
""",
    "initialize": "",
}
HOOK = """
import sys
from importlib.machinery import PathFinder

class Hook:
    def find_spec(name, path=None, target=None):
        if name == "megatron.training.WHERE":
            DO
            return PathFinder.find_spec(name, path, target)

sys.meta_path.insert(0, Hook)
"""
INSTALL = "import mcore_ckpt\nmcore_ckpt.install()\n"
IMPORT, RESUME = "import megatron.training.training as training\n", "training.pretrain(PATH)\n"
AHEAD = HOOK.replace("WHERE", "checkpointing").replace("DO", "pass")
AMID = HOOK.replace("WHERE", "async_utils").replace("DO", INSTALL.replace("\n", "; "))
REPLACED = """
from megatron.training import checkpointing
checkpointing.load_checkpoint = lambda *args, load=checkpointing.load_checkpoint: load(*args)
"""
ALONE = "from megatron.training.checkpointing import load_checkpoint\nload_checkpoint(None, None, PATH)\n"
BOUND = "training.load_checkpoint = functools.partial(training.load_checkpoint)\n"


def test_a_hook_that_asks_the_other_finders_itself_is_no_hindrance(monkeypatch: pytest.MonkeyPatch) -> None:
    class Hook:
        finders = (_AfterImport, *sys.meta_path)

        @classmethod
        def find_spec(cls, *asked: Any) -> Any:
            return next(filter(None, (finder.find_spec(*asked) for finder in cls.finders)), None)

    monkeypatch.setattr(sys, "meta_path", [Hook])
    monkeypatch.setattr("mcore_ckpt.megatron.install._change_modules", lambda: None)
    monkeypatch.setattr("mcore_ckpt.megatron.versions.Patches.replaced", lambda _: {"as after": "install()"})
    spec = Hook.find_spec("megatron.core.optimizer.distrib_optimizer", [f"{megatron.core.__path__[0]}/optimizer"])
    assert spec.loader.exec_module.__qualname__.endswith("execute_and_change")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("run") / "iter_0000003"

    def save() -> None:
        path.mkdir()
        torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
        mcore_ckpt.install()
        megatron.core.dist_checkpointing.save(state_to_save(3.0), str(path))

    in_child(save)
    return path


@pytest.mark.parametrize(
    ("script", "certified"),
    [
        (IMPORT + RESUME, True),
        (INSTALL + IMPORT + RESUME, True),
        (IMPORT + INSTALL + RESUME, True),
        (INSTALL + AHEAD + IMPORT + RESUME, True),
        (AMID + IMPORT + RESUME, True),
        (IMPORT + REPLACED + INSTALL + RESUME, True),
        (IMPORT + REPLACED + INSTALL + "checkpointing.load_checkpoint(None, None, PATH)\n", True),
        (INSTALL + AHEAD + ALONE, False),
        ("import functools\n" + IMPORT + BOUND + INSTALL + RESUME, False),
    ],
    ids=["launcher", "first", "last", "ahead", "amid", "replaced", "replacing", "unseen", "bound"],
)
@forked
def test_each_resume_is_certified_or_said_not_to_be(script: str, certified: bool, saved: Path, tmp_path: Path) -> None:
    for name, code in TRAINING.items():
        (tmp_path / "training").mkdir(exist_ok=True)
        (tmp_path / "training" / f"{name}.py").write_text(code)
    job = tmp_path / "job.py"
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    job.write_text(script.replace("PATH", repr(str(saved))))
    package: Any = sys.modules["megatron"]
    package.__path__ = [str(tmp_path), *package.__path__]
    with kept_log(logging.INFO) as lines:
        if INSTALL in script or AMID in script:
            exec(compile(job.read_bytes(), str(job), "exec"), {"__name__": "job"})
        else:
            assert launch([str(job)]) == 0
    (line,) = [line for line in lines if "resumed from" in line]
    expected = "resumed from iter_0000003 as saved: 1 tensors" if certified else "iter_0000003 is not certified: "
    assert expected in line


VERL = """
import torch
from megatron.core import dist_checkpointing

class MegatronCheckpointManager:
    should_load_dist_ckpt_model, should_load_optimizer, should_load_extra = True, False, False
    peft_cls, use_megatron_fsdp, optimizer = None, False, None

    def _build_sharded_state_dict_metadata(self):
        return {}

    def _build_model_sharded_state_dict(self, metadata):
        return {"w": dist_checkpointing.ShardedTensor.from_rank_offsets("w", torch.full((10,), 3.0)), "iteration": 3}

    _build_extra_state_dict = None

    def load_checkpoint(self, local_path):
        dist_checkpointing.load(self._build_model_sharded_state_dict({}), f"{local_path}/model/dist_ckpt")
"""
LIKE_MEGATRON = TRAINING["checkpointing"].replace("import megatron.training.async_utils\n", "")
# The base of adapters, which has been saved without them.
FILTER = """
def _filter_adapter_state_dict(state, is_adapter):
    state["w"].key = state["w"].key.removeprefix("base_layer.")
    return state

"""
LOOPS = {
    "swift.megatron.utils.megatron_lm_utils": (
        LIKE_MEGATRON.replace("get_rng", "_get_rng")
        .replace("load(generate", "load(_filter_adapter_state_dict(generate")
        .replace("state()), path", "state()), False), path")
        .replace('"w", torch', '"base_layer.w", torch')
        .replace("def generate", f"{FILTER}def generate")
        .replace("generate_state", "_generate_state")
        .replace("load_checkpoint(model", "load_mcore_checkpoint(args, model")
        .replace("return 3, 0", "return 3"),
        "load_mcore_checkpoint(None, None, None, PATH)",
    ),
    "megatron.bridge.training.checkpointing": (
        LIKE_MEGATRON.replace("load_checkpoint(model", "_load_checkpoint_from_path(path, state, model")
        .replace("optimizer, path", "optimizer")
        .replace("(args, rng_state", "(ckpt_cfg, opt_param_scheduler, rng_state")
        .replace("(**off), get", "(**off), Namespace(override_opt_param_scheduler=True), get")
        .replace('"args": args, ', ""),
        "_load_checkpoint_from_path(PATH, None, None, None)",
    ),
    "verl.utils.checkpoint.megatron_checkpoint_manager": (VERL, "MegatronCheckpointManager().load_checkpoint(PARTS)"),
}


@pytest.mark.parametrize("value", [3.0, 4.0], ids=["right", "wrong"])
@pytest.mark.parametrize("name", LOOPS)
@forked
def test_loads_of_frameworks_are_certified(name: str, value: float, saved: Path, tmp_path: Path) -> None:
    source, call = LOOPS[name]
    (tmp_path / "parts" / "model").mkdir(parents=True)
    (tmp_path / "parts" / "model" / "dist_ckpt").symlink_to(saved)
    *packages, module = name.split(".")
    folder = tmp_path.joinpath(*packages)
    folder.mkdir(parents=True)
    (folder / f"{module}.py").write_text(source.replace("3.0", str(value)))
    sys.path.insert(0, str(tmp_path))
    package: Any = sys.modules["megatron"]
    package.__path__ = [str(tmp_path / "megatron"), *package.__path__]
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    mcore_ckpt.install()
    loop = vars(importlib.import_module(name))
    with kept_log(logging.INFO) as lines:
        eval(call, {**loop, "PATH": str(saved), "PARTS": str(tmp_path / "parts")})
    (line,) = [line for line in lines if "resumed from" in line]
    assert ("NOT as saved" in line) if value == 4.0 else line.endswith("as saved: 1 tensors, 0 objects, 1 rank")


WANTED = os.environ.get("MCORE_CKPT_TEST_MEGATRON")


@pytest.mark.skipif(WANTED is None, reason="only where a version is asked for, as scripts/test_matrix.sh does")
def test_the_version_asked_for_is_the_one_imported() -> None:
    code = "from megatron.core import package_info; print(package_info.__version__)"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=170)
    assert ended.stdout.strip() == WANTED

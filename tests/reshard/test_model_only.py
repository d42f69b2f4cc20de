"""Old checkpoints that stay without their optimizer's state: what goes, what stays, and what a job is told."""

import contextlib
import os
import resource
import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed.checkpoint as dcp

import mcore_ckpt
from mcore_ckpt import FileSystemReader, FileSystemWriterAsync, LoadOptions, MissingKeyError
from mcore_ckpt.commands.cli import main
from mcore_ckpt.core.errors import CheckpointExistsError, CorruptCheckpointError, SaveError
from mcore_ckpt.directory.commit import CLAIM, YOUNG_S, Commit, pending_name
from mcore_ckpt.directory.in_force import DrainNote, index_files
from mcore_ckpt.directory.iterations import look_at
from mcore_ckpt.directory.retention import NOT_COPIED, prune_run
from mcore_ckpt.format.index import CheckpointIndex, Removed, StoredChunk, StoredItem, TensorEntry
from mcore_ckpt.format.integrity import id_in_names
from mcore_ckpt.format.metadata_read import INCOMPLETE_MARKER, METADATA_FILE, TRACKER_FILE, parse_index, read_index
from mcore_ckpt.format.metadata_write import encode_metadata
from mcore_ckpt.reshard import conversion
from mcore_ckpt.reshard import model_only as model_only_module
from mcore_ckpt.reshard.model_only import remove_optimizers
from mcore_ckpt.reshard.reshard import reshard_checkpoint
from mcore_ckpt.storage.resolve import LocalStorage, storage_at
from mcore_ckpt.tools.keys import is_optimizer_key, read_object, stored_common_state
from mcore_ckpt.tools.runs import copy_checkpoint, lineage_of_run
from mcore_ckpt.tools.verify import verify_checkpoint
from tests.support.command import output_of, refusal_of
from tests.support.gloo_ranks import made, run_megatron_ranks
from tests.support.local_files import contents, names
from tests.support.meanwhile import ahead_of
from tests.support.model_like import model_tensors, read_all, write_model
from tests.support.models import GATED, MOE_SEQUENTIAL, ModelShape, Parallel, build_training
from tests.support.object_server import ObjectDirectory
from tests.support.processes import exit_code, fork
from tests.support.stored_layouts import flip_item, stock_item
from tests.tools.test_retention import name_of, why

ITERATIONS = (100, 200, 300)
GOLDEN = Path(__file__).parents[1] / "format" / "golden"


@pytest.fixture
def run(checkpoint: Path, tmp_path: Path) -> Path:
    """As Megatron-Core writes it: without manifests, files without the id of a save."""
    for iteration in ITERATIONS:
        shutil.copytree(checkpoint, tmp_path / "run" / name_of(iteration))
    return tmp_path / "run"


def model_only(run: str | Path) -> list[int]:
    found = [name for name in storage_at(run).folders() if look_at(Path(run) / name)[0].removed]
    return sorted(int(name.removeprefix("iter_")) for name in found)


def test_the_model_stays_bit_for_bit_and_each_command_says_so(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old, new = run / name_of(100), run / name_of(300)
    before = all_but_optimizer(old)
    (old / "integrity.json").write_text("{}")  # sums of files that are going to be others
    assert "2 of 3 checkpoints to make model-only" in output_of("prune", run, "--optimizer-last", "1")
    assert not model_only(run)
    assert main(["prune", str(run), "--optimizer-last", "1", "--yes"]) == 0
    assert model_only(run) == [100, 200]
    assert all_but_optimizer(old) == before
    left = {"common.pt", "metadata.json", METADATA_FILE, *index_files(read_index(old))}
    assert {path.name for path in old.iterdir()} == left
    for words, said in (
        (["list", str(run)], "complete, model only"),
        (["inspect", str(old)], "optimizer   none: the optimizer's state ("),
        (["verify", str(old), "-q"], "model only: the optimizer's state"),
        (["diff", str(old), str(new), "-q"], "15 of 15 common tensors are the same"),
        (["cat", str(old), "optimizer.state.exp_avg.output_layer.weight"], "by mcore-ckpt prune --optimizer-last 1"),
    ):
        main(words)
        shown = "".join(capsys.readouterr())
        assert said in shown
        assert "removed on" in shown or words[0] == "list"
    assert "it is model-only already" in why(remove_optimizers(run, keep_last=1, remove=True), 100)
    assert lineage_of_run(run).departures == ()
    # Its `.metadata` is the newest file of the run, and it was not saved last.
    assert [one.checkpoint.iteration for one in prune_run(run, keep_last=1).decisions if one.keep] == [300]


def test_one_that_has_no_optimizer_counts_for_none_that_has(run: Path, tmp_path: Path) -> None:
    reshard_checkpoint(run / name_of(300), tmp_path / "weights", tp=2, pp=1, drop_optimizer=True)
    shutil.rmtree(run / name_of(300))
    (tmp_path / "weights").rename(run / name_of(300))
    remove_optimizers(run, keep_last=1, remove=True)
    assert model_only(run) == [100]


def test_a_common_state_that_waits_for_its_name_goes_with_the_model(run: Path, tmp_path: Path) -> None:
    old = run / name_of(100)
    reshard_checkpoint(old, tmp_path / "new", tp=2, pp=1)
    shutil.rmtree(old)
    (tmp_path / "new").rename(old)
    manifest = read_index(old).manifest
    assert manifest is not None
    (old / "common.pt").rename(old / pending_name(id_in_names(manifest.save_id)))
    (old / "common.pt").write_bytes(b"of the save before")
    assert verify_checkpoint(old).whole
    for later in ITERATIONS[1:]:
        os.utime(run / name_of(later) / METADATA_FILE)
    remove_optimizers(run, keep_last=2, remove=True)
    assert model_only(run) == [100]
    assert verify_checkpoint(old).whole


@pytest.mark.parametrize("refused", [True, False])
def test_one_that_cannot_be_changed_keeps_no_other_from_it(run: Path, refused: bool) -> None:

    def fail_there(storage: Any, *_: Any) -> None:
        if storage.location.endswith(name_of(100)):
            raise (SaveError if refused else OSError)("read-only file system")

    with ahead_of(Commit, "begin", fail_there):
        assert "read-only file system" in why(remove_optimizers(run, keep_last=1, remove=True), 100)
    assert model_only(run) == [200]


def test_what_a_removal_that_was_killed_has_left_goes_with_the_next(run: Path, tmp_path: Path) -> None:
    old = run / name_of(100)
    others = {"__9_0.distcp", "ema__0_0.distcp"}  # of another program, and in no index
    for name in others:
        (old / name).write_bytes(b"of another program")

    def fails(storage: LocalStorage, name: str, **how: bool) -> None:
        if (Path(storage.location) / name).exists():
            raise SaveError("the host is lost")

    with ahead_of(LocalStorage, "delete", fails):  # behind the commit
        remove_optimizers(run, keep_last=2, remove=True)
    assert read_index(old).removed is not None
    reshard_checkpoint(old, tmp_path / "made", tp=1, pp=1)
    assert read_index(tmp_path / "made").removed is None, "what is made of it was never full"
    shutil.copytree(run, tmp_path / "copy", ignore=shutil.ignore_patterns(f"{CLAIM}*"))
    assert main(["prune", str(run), "--optimizer-last", "2", "--yes"]) == 0
    of_index = {*index_files(read_index(old)), METADATA_FILE, "common.pt", "metadata.json"}
    left = {path.name for path in old.iterdir() if not path.name.startswith(CLAIM)}  # which the next save removes
    assert left == of_index | others
    for _ in range(2):  # nor does the removal of all of it leave them
        main(["prune", str(tmp_path / "copy"), "--keep-last", "2", "--yes"])
    assert {path.name for path in (tmp_path / "copy" / name_of(100)).iterdir()} == others

    with ahead_of(LocalStorage, "claim", lambda *_: os._exit(9)):
        assert exit_code(fork(lambda: remove_optimizers(run, keep_last=1, remove=True))) == 9
    (note,) = (run / name_of(200)).glob(f"{INCOMPLETE_MARKER}.*")
    assert "a save is at work in it" in why(remove_optimizers(run, keep_last=1, remove=True), 200)
    long_ago_s = note.stat().st_mtime - YOUNG_S - 1
    os.utime(note, (long_ago_s, long_ago_s))
    remove_optimizers(run, keep_last=1, remove=True)
    assert model_only(run) == [100, 200]
    assert not note.exists()


def test_files_of_a_save_at_work_in_a_model_only_checkpoint_stay(run: Path, checkpoint: Path) -> None:
    """By another saver, which calls its files as those were called that were removed."""
    old = run / name_of(100)
    remove_optimizers(run, keep_last=1, remove=True)
    names = {path.name for path in checkpoint.glob("*.distcp")}
    for name in names:
        shutil.copyfile(checkpoint / name, old / name)
        later_s = time.time() + 1.0
        os.utime(old / name, (later_s, later_s))
    main(["prune", str(run), "--keep-last", "1", "--yes"])
    assert names <= {path.name for path in old.iterdir()}


def test_what_a_conversion_reads_stays_as_it_is(run: Path, tmp_path: Path) -> None:
    found: list[str] = []
    prune = lambda *_, **__: found.append(why(prune_run(run, keep_last=2), 100))  # noqa: E731
    with ahead_of(conversion, "write_all", prune):
        reshard_checkpoint(run / name_of(100), tmp_path / "made", tp=1, pp=1)
    assert found == ["a load is reading it"]


def all_but_optimizer(directory: Path) -> dict[str, object]:
    """Bytes of all tensors, objects and the common state but the optimizer's, by key."""
    index, common = read_index(directory), stored_common_state(read_index(directory))
    found: dict[str, object] = {"common.pt": common and common.content}
    for key, tensor in read_all(directory).items():
        found[key] = tensor.dtype, tensor.shape, tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
    found |= {key: read_object(index, entry) for key, entry in index.objects.items()}
    return {key: value for key, value in found.items() if not is_optimizer_key(key)}


@pytest.mark.parametrize("version", ["0.12.3", "0.13.1", "0.14.0", "0.15.3", "0.16.1", "0.17.1", "0.19.2"])
def test_what_each_version_has_saved(version: str, tmp_path: Path) -> None:
    """To 0.15 the optimizer's state is ranges of flattened shards, from 0.19 the common state is an object."""
    for iteration in (1, 2):
        os.utime(shutil.copytree(GOLDEN / f"megatron-{version}", tmp_path / name_of(iteration)) / METADATA_FILE)
    before = all_but_optimizer(tmp_path / name_of(1))
    remove_optimizers(tmp_path, keep_last=1, remove=True)
    assert model_only(tmp_path) == [1]
    assert all_but_optimizer(tmp_path / name_of(1)) == before
    assert not any(map(is_optimizer_key, read_all(tmp_path / name_of(1))))


@pytest.mark.parametrize("command", [["repair", "{old}", "--from", "{full}"], ["copy", "{full}", "{old}"]])
def test_a_full_copy_brings_the_optimizer_back(tmp_path: Path, command: list[str]) -> None:
    run, full, old = tmp_path / "run", tmp_path / "full", tmp_path / "run" / name_of(100)
    for iteration in ITERATIONS:
        state = {key: torch.full((3,), float(iteration)) for key in ("chained_encoder.weight", "optimizer.state.step")}
        dcp.save(state, storage_writer=FileSystemWriterAsync(run / name_of(iteration)), no_dist=True)
    copy_checkpoint(old, full)
    remove_optimizers(run, keep_last=1, remove=True)
    assert read_index(old).tensors.keys() == {"chained_encoder.weight"}  # no chained optimizer's
    with pytest.raises(CheckpointExistsError):
        copy_checkpoint(full, run / name_of(200))
    assert main([word.format(old=old, full=full) for word in command]) == 0
    assert model_only(run) == [200]
    assert contents(old) == contents(full)
    with pytest.raises(CheckpointExistsError):
        copy_checkpoint(run / name_of(200), full)


def test_a_repair_compares_iteration_and_model_where_ids_do_not_tell(run: Path, tmp_path: Path) -> None:
    """As with a copy of what Megatron-Core has saved, and with one that was resharded."""
    old = run / name_of(100)
    copy, resharded = shutil.copytree(old, tmp_path / "copy"), tmp_path / "resharded"
    reshard_checkpoint(copy, resharded, tp=1, pp=1)
    write_model(tmp_path / "later", iteration=8)
    write_model(tmp_path / "other", tensors=model_tensors() | {"output_layer.weight": torch.ones(48, 16)})
    part = {key: tensor for key, tensor in model_tensors().items() if "exp_avg_sq" not in key}
    write_model(tmp_path / "part", tensors=part)
    (tmp_path / "link").symlink_to(old)
    wrong = {
        tmp_path / "part": "its optimizer had 45 tensors, and ",
        tmp_path / "link": "is the checkpoint to be repaired",
        tmp_path / "later": "has another iteration 8",
        tmp_path / "other": "has another output_layer.weight",
        run / name_of(200): "has no optimizer's state either",
    }
    for full in (copy, resharded):
        os.utime(run / name_of(300) / METADATA_FILE)  # saved last
        remove_optimizers(run, keep_last=1, remove=True)
        before = contents(old)
        for other, said in wrong.items():
            assert said in refusal_of("repair", old, "--from", other).replace("\n", " ")
        assert "would repair: " in output_of("repair", old, "--from", full, "--dry-run", "-q")
        assert contents(old) == before
        assert main(["repair", str(old), "--from", str(full)]) == 0
        assert contents(old) == contents(full)


KEEPS: dict[str, Callable[[Path], object]] = {
    "the tracker file names it": lambda run: (run / TRACKER_FILE).write_text("100"),
    "a multiple of 50": lambda run: None,
    "it is not complete": lambda run: min((run / name_of(100)).glob("*.distcp")).unlink(),
    "CRC-32": lambda run: flip_a_weight(run / name_of(100)),
    "a save is at work in it": lambda run: setattr(Commit.begin(storage_at(run / name_of(100))), "is_over", True),
}


def flip_a_weight(directory: Path) -> None:
    times = {path: path.stat() for path in directory.iterdir()}
    flip_item(read_index(directory), "output_layer.weight")
    for path, before in times.items():
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


@pytest.mark.parametrize("reason", KEEPS)
def test_what_keeps_its_optimizer_though_it_is_old(run: Path, reason: str) -> None:
    KEEPS[reason](run)
    every = 50 if "multiple" in reason else None
    before = contents(run / name_of(100))
    report = remove_optimizers(run, keep_last=1, keep_every=every, remove=True)
    assert reason in why(report, 100)
    assert model_only(run) == ([] if every else [200])
    assert contents(run / name_of(100)) == before


def test_what_a_load_reads_keeps_it_until_the_load_has_ended(run: Path) -> None:
    """The load comes after the decision."""
    old, loads = storage_at(run / name_of(100)), contextlib.ExitStack()
    with loads, ahead_of(Commit, "begin", lambda *_: loads.enter_context(old.in_use(METADATA_FILE))):
        assert "a load is reading it" in why(remove_optimizers(run, keep_last=2, remove=True), 100)
    assert not model_only(run)
    remove_optimizers(run, keep_last=2, remove=True)
    assert model_only(run) == [100]


def test_a_load_that_begins_at_the_last_moment_keeps_the_files_that_it_reads(run: Path) -> None:
    old, loads = run / name_of(100), contextlib.ExitStack()
    files = index_files(read_index(old))
    with loads, ahead_of(LocalStorage, "claim", lambda self, *_: loads.enter_context(self.in_use(METADATA_FILE))):
        remove_optimizers(run, keep_last=2, remove=True)
        assert model_only(run) == [100]
        assert files <= names(old)
    remove_optimizers(run, keep_last=2, remove=True)
    assert names(old) == {*index_files(read_index(old)), METADATA_FILE, "common.pt", "metadata.json"}


def test_a_save_that_begins_meanwhile_comes_first(run: Path) -> None:
    with ahead_of(model_only_module, "write_all", lambda *_, **__: save_flat(run / name_of(100), 5.0)):
        assert "it has been saved again" in why(remove_optimizers(run, keep_last=2, remove=True), 100)
    index = read_index(run / name_of(100))
    assert any(map(is_optimizer_key, index.tensors))
    assert {name for name in names(run / name_of(100)) if name.endswith(".distcp")} == index_files(index)


def test_owner_and_mode_stay(run: Path) -> None:
    owner = 1000 if os.getuid() == 0 else os.getuid()
    for path in (run / name_of(100)).iterdir():
        os.chown(path, owner, -1)
        path.chmod(0o664)
    before = os.umask(0o077)
    try:
        remove_optimizers(run, keep_last=2, remove=True)
    finally:
        os.umask(before)
    assert model_only(run) == [100]
    found = [path.stat() for path in (run / name_of(100)).iterdir()]
    assert {(status.st_uid, status.st_mode & 0o777) for status in found} == {(owner, 0o664)}


def test_more_ranks_than_a_process_may_open_files(run: Path) -> None:
    old, ranks = run / name_of(50), 300
    old.mkdir()
    tensors = {}
    for key in ("w", "optimizer.m"):
        chunks = []
        for rank in range(ranks):
            with (old / f"__{rank}_0.distcp").open("ab") as file:
                start, item = file.tell(), stock_item(torch.full((1, 3), float(rank)))
                file.write(item)
            chunks.append(StoredChunk((rank, 0), (1, 3), StoredItem(f"__{rank}_0.distcp", start, len(item))))
        tensors[key] = TensorEntry(key, "float32", (ranks, 3), tuple(chunks))
    (old / METADATA_FILE).write_bytes(encode_metadata(CheckpointIndex(str(old), tensors, {})))

    def removed() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (200, 200))
        remove_optimizers(run, keep_last=1, remove=True)

    os.utime(run / name_of(300) / METADATA_FILE)  # saved last
    assert exit_code(fork(removed)) == 0
    assert model_only(run) == [50, 100, 200]
    assert verify_checkpoint(old).whole


def test_a_job_goes_back_to_one_that_has_it(run: Path) -> None:
    """Of a damaged checkpoint without an index, nothing tells whether the job asks for an optimizer."""
    pytest.importorskip("megatron.core.dist_checkpointing", reason="Megatron's loads go back")
    from mcore_ckpt.megatron.serialization import _newest_older

    (run / TRACKER_FILE).write_text("100")
    remove_optimizers(run, keep_last=1, remove=True)
    assert model_only(run) == [200]
    (run / name_of(300) / METADATA_FILE).write_bytes(b"no index")
    assert _newest_older(run / name_of(300), "it is damaged", LoadOptions()) == run / name_of(100)


def save_flat(directory: str | Path, value: float) -> None:
    state = {"model": {"w": torch.full((300, 100), value)}, "optimizer": {"m": torch.ones(300, 100), "step": 3}}
    storage_at(directory).ensure()
    dcp.save(state, storage_writer=FileSystemWriterAsync(directory), no_dist=True)


def test_a_run_in_an_object_store(object_directory: ObjectDirectory) -> None:
    run = f"{object_directory.url}/run"
    for iteration in (1, 2):
        save_flat(f"{run}/{name_of(iteration)}", iteration)
    save_id = read_index(f"{run}/{name_of(1)}").manifest.save_id  # type: ignore[union-attr]
    assert main(["prune", run, "--optimizer-last", "1", "--yes"]) == 0
    index = read_index(f"{run}/{name_of(1)}")
    assert index.removed is not None
    assert [*index.tensors, *index.objects] == ["model.w"] == [*index.planner_data]
    assert index.manifest is not None
    assert index.manifest.save_id == save_id
    found = {"model": {"w": torch.zeros(300, 100)}}
    dcp.load(found, storage_reader=FileSystemReader(f"{run}/{name_of(1)}"), no_dist=True)
    assert torch.equal(found["model"]["w"], torch.full((300, 100), 1.0))
    names = [name for name in object_directory.names() if name_of(1) in name]
    assert len(names) == 1 + len(index_files(index))
    assert verify_checkpoint(f"{run}/{name_of(1)}").whole


def test_with_a_second_tier_a_checkpoint_keeps_it_until_it_is_there(tmp_path: Path) -> None:
    run, second = tmp_path / "run", tmp_path / "second"
    for iteration in (1, 2):
        save_flat(run / name_of(iteration), iteration)
    manifest = read_index(run / name_of(1)).manifest
    assert manifest is not None
    note = DrainNote(id_in_names(manifest.save_id), str(second / name_of(1)), done=True)
    note.write(run / name_of(1))
    assert NOT_COPIED in why(remove_optimizers(run, keep_last=1, remove=True), 1)
    copy_checkpoint(run / name_of(1), second / name_of(1))
    remove_optimizers(run, keep_last=1, remove=True)
    assert model_only(run) == [1]
    assert look_at(run / name_of(1))[0].drain == note
    assert look_at(second / name_of(1))[0].removed is None
    copy_checkpoint(second / name_of(1), run / name_of(1))
    for path in (run / name_of(1)).iterdir():
        os.utime(path, (1e9, 1e9))
    save_flat(second / name_of(2), 2)
    remove_optimizers(second, keep_last=1, remove=True)
    assert NOT_COPIED in why(prune_run(run, keep_last=1), 1), "what is there has lost its optimizer"
    assert main(["verify", "-q", str(second / name_of(1))]) == 0


def test_a_record_that_cannot_be_is_refused(run: Path) -> None:
    save_flat(run / "c", 1.0)
    index = replace(read_index(run / "c"), removed=Removed("said", 5))
    assert parse_index(encode_metadata(index), "c").removed == index.removed
    for record in ({"said": "no time"}, {"said": "", "saved_at_ns": float("nan"), "files": []}, 3):
        with mock.patch("mcore_ckpt.format.metadata_write.asdict", return_value=record):
            content = encode_metadata(index)
        with pytest.raises(CorruptCheckpointError, match="details"):
            parse_index(content, "c")


# --- jobs of Megatron


# Shape, parallel layout, whether the optimizer's state is in flat buckets.
JOBS: dict[str, tuple[ModelShape, Parallel, bool]] = {
    "flat": (replace(GATED, hidden=128), Parallel(tensor=2), True),
    "reshardable": (replace(GATED, hidden=128), Parallel(), False),
    "layer-wise": (replace(GATED, layer_wise=True), Parallel(tensor=2), False),
    "layer-wise with experts": (replace(MOE_SEQUENTIAL, layer_wise=True), Parallel(expert=2), False),
    "chained": (MOE_SEQUENTIAL, Parallel(expert=2), True),
    "chained, reshardable": (MOE_SEQUENTIAL, Parallel(expert=2), False),
}


def train(rank: int, runs: Path) -> None:
    """Save iterations 1 and 2 of each job; keep the model's weights of the first."""
    mcore_ckpt.install()
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing import ShardedObject

    for name, (shape, layout, flat_buckets) in JOBS.items():
        training = build_training(shape, layout)
        for iteration in (1, 2):
            training.train(1)
            state = training.sharded_state_dict(flat_buckets=flat_buckets)
            state["rng_state"] = ShardedObject("rng_state", [rank, iteration], (2,), (rank,))
            dist_checkpointing.save(state, made(runs / name / name_of(iteration)))
            if iteration == 1:
                torch.save(training.model[0].module.state_dict(), runs / name / f"{rank}.pt")


def resume(rank: int, runs: Path) -> None:
    """Load the first iteration with the optimizer, which is refused, and without."""
    mcore_ckpt.install()
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing import ShardedObject

    from mcore_ckpt.megatron import other_division

    said = r"(?s)(?=.*was removed on)(?=.*by mcore-ckpt prune --optimizer-last 1, and this job asks).*--no-load-optim"
    for name, (shape, layout, flat_buckets) in JOBS.items():
        training = build_training(shape, layout, 99)
        directory = str(runs / name / name_of(1))
        for strict in ("assume_ok_unexpected", "log_all"):
            state = training.sharded_state_dict(is_loading=True, flat_buckets=flat_buckets)
            with pytest.raises(MissingKeyError, match=said):
                dist_checkpointing.load(state, directory, strict=strict)
        state = training.sharded_state_dict(is_loading=True, flat_buckets=flat_buckets)
        del state["optimizer"]
        state["rng_state"] = ShardedObject("rng_state", None, (2,), (rank,))
        loaded = dist_checkpointing.load(state, directory)
        assert loaded["rng_state"] == [rank, 1]
        training.model[0].module.load_state_dict(loaded["model"])
        kept = torch.load(runs / name / f"{rank}.pt", weights_only=False)
        for key, value in training.model[0].module.state_dict().items():
            assert not torch.is_tensor(value) or torch.equal(value, kept[key]), key
        if name == "flat":  # Megatron-LM, which refuses these buckets under another TP, comes to ask for them
            common = dist_checkpointing.load_common_state_dict(directory)
            with mock.patch.object(other_division, "parallel_sizes", return_value=(1, 1)):
                declared = other_division.declared_reshardable(common, Path(directory))
            assert declared["content_metadata"]["distrib_optim_sharding_type"] == "fully_reshardable"


@pytest.mark.timeout(400)
def test_a_job_starts_from_the_model_and_is_told_what_else_there_was(tmp_path: Path) -> None:
    pytest.importorskip("megatron.core.dist_checkpointing", reason="the jobs are Megatron's")
    run_megatron_ranks(train, 2, tmp_path, deadline_s=150)
    for name in JOBS:
        old = tmp_path / name / name_of(1)
        before, stays = sum(path.stat().st_size for path in old.iterdir()), all_but_optimizer(old)
        assert main(["prune", str(tmp_path / name), "--optimizer-last", "1", "--yes"]) == 0
        share = sum(path.stat().st_size for path in old.iterdir()) / before
        assert all_but_optimizer(old) == stays
        assert share <= 0.16 or JOBS[name][0].hidden < 128
        assert not any(map(is_optimizer_key, (*read_index(old).tensors, *read_index(old).objects)))
        assert verify_checkpoint(old).whole
    run_megatron_ranks(resume, 2, tmp_path, deadline_s=150)

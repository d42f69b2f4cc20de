"""Resharding: the same tensors bit for bit under any layout, nothing half done, and an interrupted run goes on."""

import os
import re
import resource
import shutil
import signal
import subprocess
import sys
from argparse import Namespace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st

from mcore_ckpt.commands.cli import main
from mcore_ckpt.core.boxes import Box
from mcore_ckpt.core.errors import CheckpointExistsError, ChecksumError, CorruptCheckpointError, OptionError
from mcore_ckpt.dcp.reader import FileSystemReader
from mcore_ckpt.format.index import CheckpointIndex, StoredChunk, StoredItem, TensorEntry
from mcore_ckpt.format.metadata_read import encode_config, read_index
from mcore_ckpt.reshard import conversion, plan
from mcore_ckpt.reshard.options import PartitionRule, parse_partition_rules
from mcore_ckpt.reshard.reshard import reshard_checkpoint
from mcore_ckpt.tools.checkpoint import open_checkpoint
from mcore_ckpt.tools.keys import data_file_rank
from mcore_ckpt.tools.runs import Places
from mcore_ckpt.tools.verify import repair_checkpoint, verify_checkpoint
from tests.support.command import document_of, output_of, refusal_of
from tests.support.local_files import contents, flip
from tests.support.meanwhile import behind, interrupted_at
from tests.support.model_like import LAYERS, assert_same, model_tensors, read_all, write_model
from tests.support.processes import until
from tests.support.stored_layouts import StoredTensor, flip_item, tilings, whole, write_checkpoint

ROOT = Path(__file__).resolve().parents[2]


def grid(index: CheckpointIndex, key: str) -> list[tuple[tuple[int, ...], tuple[int, ...], int | None]]:
    return sorted((chunk.offsets, chunk.sizes, data_file_rank(chunk.item.file)) for chunk in index.tensors[key].chunks)


@pytest.mark.parametrize(
    "options",
    [
        {"tp": 8, "pp": 2, "workers": 3},
        {"tp": 1, "pp": 2},
        {"tp": 2, "pp": 1, "workers": 1},
        {"tp": 4, "pp": 1, "verify": False, "memory_bytes": 384 * 1024**2},
    ],
    ids=str,
)
def test_the_same_tensors_under_another_layout(checkpoint: Path, tmp_path: Path, options: dict[str, Any]) -> None:
    before = contents(checkpoint)
    report = reshard_checkpoint(checkpoint, tmp_path / "target", **options)
    assert_same(read_all(tmp_path / "target"), model_tensors())
    assert verify_checkpoint(tmp_path / "target").whole
    assert contents(checkpoint) == before
    assert report.guesses == 0
    assert not (tmp_path / "target.partial").exists()
    index = read_index(tmp_path / "target")
    items = [chunk.item for entry in index.tensors.values() for chunk in entry.chunks]
    items += [entry.item for entry in index.objects.values()]
    assert {path.name for path in (tmp_path / "target").glob("*.distcp")} == {item.file for item in items}


def test_workers_beyond_all_work_make_no_files(checkpoint: Path, tmp_path: Path) -> None:
    reshard_checkpoint(checkpoint, tmp_path / "t", tp=1, workers=100_000)
    assert len([*(tmp_path / "t").glob("*.distcp")]) <= 32


def test_each_rank_finds_its_shards_whole_in_its_own_files(checkpoint: Path, tmp_path: Path) -> None:
    reshard_checkpoint(checkpoint, tmp_path / "t", tp=4, pp=2)
    index = read_index(tmp_path / "t")
    for layer in range(LAYERS):
        stage = 4 * layer  # two layers, two stages, four ranks each
        prefix = f"decoder.layers.{layer}"
        assert grid(index, f"{prefix}.self_attention.linear_qkv.weight") == [
            ((12 * rank, 0), (12, 16), stage + rank) for rank in range(4)
        ]
        assert grid(index, f"optimizer.state.exp_avg.{prefix}.mlp.linear_fc2.weight") == [
            ((0, 8 * rank), (16, 8), stage + rank) for rank in range(4)
        ]
        # A gated first layer: rank r has the r-th part of either half.
        assert grid(index, f"{prefix}.mlp.linear_fc1.weight") == [
            ((32 * half + 8 * rank, 0), (8, 16), stage + rank) for half in range(2) for rank in range(4)
        ]
        assert grid(index, f"{prefix}.mlp.linear_fc1.layer_norm_weight") == [((0,), (16,), stage)]
    assert [rank for _, _, rank in grid(index, "embedding.word_embeddings.weight")] == [0, 1, 2, 3]
    assert [rank for _, _, rank in grid(index, "output_layer.weight")] == [4, 5, 6, 7]


def test_only_and_drop(checkpoint: Path, tmp_path: Path) -> None:
    reshard_checkpoint(checkpoint, tmp_path / "a", tp=1, pp=1, drop_optimizer=True)
    assert_same(read_all(tmp_path / "a"), model_tensors(optimizer=False))
    reshard_checkpoint(checkpoint, tmp_path / "b", tp=1, pp=1, only="decoder.layers.1.*")
    wanted = {key: value for key, value in model_tensors().items() if key.startswith("decoder.layers.1.")}
    assert_same(read_all(tmp_path / "b"), wanted)
    assert not read_index(tmp_path / "b").objects
    # A common state among the objects is carried whatever the pattern.
    tensors = {"w": whole(torch.ones(4))}
    write_checkpoint(tmp_path / "s", tensors, {"common_state/shard_0_1": [{"iteration": 7}], "rng/shard_0_1": [1]})
    (tmp_path / "s" / "metadata.json").write_bytes(encode_config())
    reshard_checkpoint(tmp_path / "s", tmp_path / "t", tp=1, pp=1, only="w")
    assert list(read_index(tmp_path / "t").objects) == ["common_state/shard_0_1"]


def test_dtype_converts_the_model_and_not_the_optimizer(checkpoint: Path, tmp_path: Path) -> None:
    reshard_checkpoint(checkpoint, tmp_path / "t", tp=4, pp=1, dtype="float32")
    expected = {key: value.float() for key, value in model_tensors().items()}
    assert_same(read_all(tmp_path / "t"), expected)
    reshard_checkpoint(tmp_path / "t", tmp_path / "back", tp=1, pp=1, dtype="bfloat16")
    assert_same(read_all(tmp_path / "back"), model_tensors())


def test_what_lies_beside_the_data_is_carried(tmp_path: Path) -> None:
    write_model(tmp_path / "run" / "iter_0000007")
    source = tmp_path / "run" / "iter_0000007"
    (tmp_path / "run" / "latest_checkpointed_iteration.txt").write_text("7")
    (source / "modelopt_state" / "deep").mkdir(parents=True)
    (source / "modelopt_state" / "deep" / "common.pt").write_bytes(b"x")
    (source / "integrity.json").write_text("{}")
    assert main(["reshard", str(tmp_path / "run"), str(tmp_path / "new"), "--tp", "1", "--pp", "1"]) == 0
    target = tmp_path / "new" / "iter_0000007"
    assert (tmp_path / "new" / "latest_checkpointed_iteration.txt").read_text() == "7"
    for name in ("common.pt", "metadata.json", "modelopt_state/deep/common.pt"):
        assert (target / name).read_bytes() == (source / name).read_bytes()
    assert not (target / "integrity.json").exists()
    assert torch.load(target / "common.pt", weights_only=False)["iteration"] == 7
    source_objects, objects = read_index(source).objects, read_index(target).objects
    assert objects.keys() == source_objects.keys()
    # The tracker comes along for an iteration given by name, too.
    reshard_checkpoint(source, tmp_path / "named" / "iter_0000007", tp=1, pp=1)
    assert (tmp_path / "named" / "latest_checkpointed_iteration.txt").read_text() == "7"


SHAPE = st.lists(st.integers(1, 9), min_size=1, max_size=3).map(tuple)


@settings(max_examples=25)
@given(
    data=st.data(), shape=SHAPE, dtype=st.sampled_from([torch.bfloat16, torch.float64, torch.uint8, torch.complex64])
)
def test_any_chunks_to_any_layout(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    directory = tmp_path_factory.mktemp("any")
    tensor = torch.arange(int(torch.tensor(shape).prod())).reshape(shape).to(dtype)
    other = torch.randn(4, 6).to(dtype)
    boxes = data.draw(tilings(shape))
    write_checkpoint(
        directory / "s",
        {"a.weight": StoredTensor(tensor, boxes), "b.weight": StoredTensor(other, data.draw(tilings((4, 6))))},
        {"object": {"x": 1}},
        files=2,
    )
    axis = data.draw(st.integers(0, len(shape) - 1))
    rules = tuple(
        parse_partition_rules(f"^a {axis} x{data.draw(st.integers(1, 2))}\n^b {data.draw(st.integers(0, 1))}", "r")
    )
    tp, workers = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 2))
    made = {"tp": tp, "rules": rules, "workers": workers}
    reshard_checkpoint(directory / "s", directory / "t", allow_whole=True, **made)
    assert_same(read_all(directory / "t"), {"a.weight": tensor, "b.weight": other})


def test_halves_that_are_read_in_turn(tmp_path: Path) -> None:
    """A file is written front to back. Halves of columns come row by row, so each is in a file of its own."""
    tensor = torch.randn(64, 32 * 1024)  # of more than one slab
    write_checkpoint(tmp_path / "s", {"a.weight": whole(tensor)})
    rules = tuple(parse_partition_rules("^a 1 x2", "r"))
    reshard_checkpoint(tmp_path / "s", tmp_path / "t", tp=2, pp=1, rules=rules, workers=1)
    assert_same(read_all(tmp_path / "t"), {"a.weight": tensor})
    chunks = read_index(tmp_path / "t").tensors["a.weight"].chunks
    assert sorted(chunk.item.file for chunk in chunks) == [
        f"__{rank}_{n}.distcp" for rank in range(2) for n in range(2)
    ]
    assert verify_checkpoint(tmp_path / "t").whole


class TestRefusals:
    def test_flat_optimizer_buckets_stay_in_their_layout_or_are_dropped(self, tmp_path: Path) -> None:
        key = "optimizer.distributed.dp_group_idx_0.gbuf_idx_0.dtype_(a, b).bucket_idx_0.exp_avg"
        tensors = {**model_tensors(optimizer=False), key: torch.randn(100)}
        arguments = {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 1}
        write_model(tmp_path / "s", tensors=tensors, arguments=arguments)
        reshard_checkpoint(tmp_path / "s", tmp_path / "t", tp=2, pp=1)
        assert_same(read_all(tmp_path / "t"), tensors)
        with pytest.raises(OptionError, match="--optimizer-layout fully_reshardable"):
            reshard_checkpoint(tmp_path / "s", tmp_path / "u", tp=1, pp=1)
        reshard_checkpoint(tmp_path / "s", tmp_path / "u", tp=1, pp=1, drop_optimizer=True)
        assert_same(read_all(tmp_path / "u"), model_tensors(optimizer=False))

    @pytest.mark.parametrize(("dtype", "verify"), [(None, False), ("float16", True)])
    def test_damage_is_seen_whatever_becomes_of_the_elements(
        self, tmp_path: Path, dtype: str | None, verify: bool
    ) -> None:
        flip_item(write_model(tmp_path / "s"), "output_layer.weight")
        options = {"tp": 2, "pp": 1, "dtype": dtype, "verify": verify}
        with pytest.raises(ChecksumError, match=r"output_layer\.weight"):
            reshard_checkpoint(tmp_path / "s", tmp_path / "t", **options)
        assert not (tmp_path / "t").exists()

    def test_damaged_objects_and_common_state(self, tmp_path: Path) -> None:
        index = write_model(tmp_path / "s")
        torch.save({"state": torch.full((100,), 7, dtype=torch.uint8)}, tmp_path / "s" / "common.pt")
        key, entry = next(iter(index.objects.items()))
        options = {"tp": 1, "pp": 1, "restart": True}
        path = tmp_path / "s" / entry.item.file
        sound = path.read_bytes()
        flip(path, sound.index(b"rank", entry.item.offset))
        with pytest.raises(ChecksumError, match=key):
            reshard_checkpoint(tmp_path / "s", tmp_path / "t", **options)
        path.write_bytes(sound)
        common = (tmp_path / "s" / "common.pt").read_bytes()
        (tmp_path / "s" / "common.pt").write_bytes(common.replace(b"\7" * 100, b"\7" * 99 + b"\6"))
        with pytest.raises(ChecksumError, match=r"common\.pt"):
            reshard_checkpoint(tmp_path / "s", tmp_path / "t", **options)
        assert not (tmp_path / "t").exists()
        (tmp_path / "s" / "common.pt").write_bytes(common)
        reshard_checkpoint(tmp_path / "s", tmp_path / "t", **options)
        assert (tmp_path / "t" / "common.pt").read_bytes() == common


def test_dry_run_shows_each_decision_and_writes_nothing(tmp_path: Path) -> None:
    write_model(tmp_path / "s", tp=1)
    arguments = ["reshard", str(tmp_path / "s"), str(tmp_path / "t"), "--tp", "2", "--pp", "1", "--dry-run"]
    shown = output_of(*arguments)
    assert "table (guess)" in shown
    rows = {row["source"]: row for row in document_of(*arguments)["keys"]}
    assert rows.keys() == model_tensors().keys()
    qkv = rows["decoder.layers.0.self_attention.linear_qkv.weight"]
    assert (qkv["transform"], qkv["decided_by"], qkv["guess"]) == ("axis 0, 1 -> 2 chunks", "table", True)
    gated = rows["decoder.layers.0.mlp.linear_fc1.weight"]
    assert (gated["transform"], gated["decided_by"]) == ("axis 0 x2, 2 -> 4 chunks", "grid")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["s"]


def test_what_does_not_divide_is_said(tmp_path: Path) -> None:
    """Of 4 heads, 3 ranks have none in equal parts, whether or not their rows divide by 3."""
    tensors = {
        "decoder.layers.0.self_attention.linear_qkv.weight": torch.ones(48, 16),
        "decoder.layers.0.self_attention.linear_proj.weight": torch.ones(16, 16),
    }
    write_model(tmp_path / "s", tp=1, tensors=tensors, arguments={"num_attention_heads": 4})
    command = ["reshard", str(tmp_path / "s"), str(tmp_path / "t"), "--tp", "3"]
    not_divided = "in one piece, since tensor-parallel ranks do not divide them: linear_proj.weight (axis of 16)"
    for dry_run in ([], ["--dry-run"]):
        assert not_divided in refusal_of(*command, *dry_run)
    assert not (tmp_path / "t").exists()
    shown = output_of(*command, "--allow-whole")
    assert "TP 3 PP 1 EP 1 (3 ranks), not all of it divided, " in shown
    assert "4 attention heads do not divide among TP 3" in shown
    assert not_divided in shown


@pytest.mark.parametrize(
    ("sizes", "says"),
    [({"pp": 3}, "2 layers for PP 3"), ({"tp": 1, "ep": 2}, "no experts for EP 2"), ({"tp": 5}, r"qkv.weight \(axis")],
)
def test_a_division_that_cannot_be_made_is_an_error(
    checkpoint: Path, tmp_path: Path, sizes: dict[str, int], says: str
) -> None:
    with pytest.raises(OptionError, match=f"cannot be divided as .*{says}"):
        reshard_checkpoint(checkpoint, tmp_path / "t", **sizes)  # type: ignore[arg-type]
    report = reshard_checkpoint(checkpoint, tmp_path / "t", allow_whole=True, **sizes)  # type: ignore[arg-type]
    assert "not all of it divided" in report.target_layout
    assert_same(read_all(tmp_path / "t"), model_tensors())


def test_tensors_that_nothing_tells_how_to_divide(tmp_path: Path) -> None:
    dcp.save({f"net.{n}.kernel": torch.ones(16, 16) for n in range(3)}, checkpoint_id=tmp_path / "s", no_dist=True)
    with pytest.raises(OptionError, match=r"nothing tells how they are divided: 0\.kernel, .*--rules"):
        reshard_checkpoint(tmp_path / "s", tmp_path / "t", tp=2)
    rules = [PartitionRule(re.compile("kernel"), 0)]
    reshard_checkpoint(tmp_path / "s", tmp_path / "t", tp=2, rules=rules)
    assert {len(entry.chunks) for entry in read_index(tmp_path / "t").tensors.values()} == {2}


class TestInterruption:
    """A run that was stopped leaves DST.partial; the same command finishes it."""

    @pytest.fixture
    def big(self, tmp_path: Path) -> dict[str, torch.Tensor]:
        tensors = {f"decoder.layers.{n}.mlp.linear_fc2.weight": torch.randn(512, 1024) for n in range(24)}
        write_model(tmp_path / "s", tensors=tensors)
        return tensors

    @staticmethod
    def interrupt(tmp_path: Path) -> None:
        """A run that ends when everything is written, and nothing is compared."""
        with interrupted_at(conversion, "check_all"):
            reshard_checkpoint(tmp_path / "s", tmp_path / "t", tp=1, pp=1)

    def test_a_source_that_changed_is_not_taken_for_the_same(
        self, tmp_path: Path, big: dict[str, torch.Tensor]
    ) -> None:
        self.interrupt(tmp_path)
        os.utime(tmp_path / "s" / "__0_0.distcp", (1, 1))
        with pytest.raises(OptionError, match=r"another source.*--restart"):
            reshard_checkpoint(tmp_path / "s", tmp_path / "t", tp=1, pp=1)
        assert not reshard_checkpoint(tmp_path / "s", tmp_path / "t", tp=1, pp=1, restart=True).resumed
        assert_same(read_all(tmp_path / "t"), big)

    def test_a_target_without_its_tracker_file_gets_it(self, tmp_path: Path, big: dict[str, torch.Tensor]) -> None:
        target, tracker = tmp_path / "run" / "iter_0000007", tmp_path / "run" / "latest_checkpointed_iteration.txt"
        with interrupted_at(Places, "finish"):
            reshard_checkpoint(tmp_path / "s", target, tp=1, pp=1)
        made = contents(target)
        assert not tracker.exists()
        with pytest.raises(CheckpointExistsError):  # other work
            reshard_checkpoint(tmp_path / "s", target, tp=2, pp=1)
        with pytest.raises(CheckpointExistsError):
            reshard_checkpoint(tmp_path / "s", target, tp=1, pp=1, restart=True)
        file = next(target.glob("*.distcp"))
        file.rename(tmp_path / "aside")
        with pytest.raises(CorruptCheckpointError, match=f"{file.name}.*has changed since"):
            reshard_checkpoint(tmp_path / "s", target, tp=1, pp=1)
        (tmp_path / "aside").rename(file)
        assert reshard_checkpoint(tmp_path / "s", target, tp=1, pp=1).resumed
        assert tracker.read_text() == "7"
        assert contents(target) == made
        assert sorted(os.listdir(tmp_path / "run")) == [target.name, tracker.name]
        with pytest.raises(CheckpointExistsError):
            reshard_checkpoint(tmp_path / "s", target, tp=1, pp=1)

    def test_what_differs_is_named_and_threads_do_not_count(self, tmp_path: Path, big: dict[str, torch.Tensor]) -> None:
        self.interrupt(tmp_path)
        command = ["reshard", str(tmp_path / "s"), str(tmp_path / "t")]
        said = refusal_of(*command, "--tp", "2", "--drop-optimizer")
        assert "left by a run with another --drop-optimizer (False, now True), --tp (1, now 2);" in said
        shutil.copytree(tmp_path / "s", tmp_path / "u")
        with pytest.raises(OptionError, match=r"another source \(.*/s, files \w+, now .*/u, files"):
            reshard_checkpoint(tmp_path / "u", tmp_path / "t", tp=1)
        assert reshard_checkpoint(tmp_path / "s", tmp_path / "t", tp=1, workers=5, memory_bytes="2GiB").resumed
        assert_same(read_all(tmp_path / "t"), big)

    @pytest.mark.parametrize("fault", ["cut", "changed", "removed"])
    def test_what_has_come_to_harm_meanwhile_is_written_again(
        self, tmp_path: Path, big: dict[str, torch.Tensor], fault: str
    ) -> None:
        self.interrupt(tmp_path)
        file = tmp_path / "t.partial" / "__0_1.distcp"
        middle = file.stat().st_size // 2
        if fault == "removed":
            file.unlink()
        elif fault == "cut":
            os.truncate(file, middle)
        else:
            flip(file, middle)
        assert reshard_checkpoint(tmp_path / "s", tmp_path / "t", tp=1, pp=1, verify=False).resumed
        assert_same(read_all(tmp_path / "t"), big)
        assert verify_checkpoint(tmp_path / "t").whole

    @pytest.mark.parametrize("stop", [signal.SIGKILL, signal.SIGINT], ids=lambda stop: stop.name)
    def test_a_process_that_is_stopped(
        self,
        tmp_path: Path,
        big: dict[str, torch.Tensor],
        stop: signal.Signals,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        monkeypatch.setattr(plan, "_PART_BYTES", 4 * 1024**2)
        code = (
            "import sys, time\nfrom mcore_ckpt.reshard import conversion, plan\n"
            f"plan._PART_BYTES = {plan._PART_BYTES}\n"
            "original = conversion._write_part\n"
            "def slow(*given):\n    time.sleep(0.2)\n    original(*given)\n"
            "conversion._write_part = slow\n"
            "from mcore_ckpt.commands.cli import main\nsys.exit(main(sys.argv[1:]))"
        )
        arguments = ["reshard", str(tmp_path / "s"), str(tmp_path / "t"), "--tp", "1", "--pp", "1"]
        running = subprocess.Popen(
            [sys.executable, "-c", code, *arguments],
            cwd=ROOT,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        journals = lambda: [path.read_text() for path in tmp_path.glob("t.partial.journal")]  # noqa: E731
        until(lambda: running.poll() is not None or any(text.count("\n") > 2 for text in journals()))
        running.send_signal(stop)
        _, errors = running.communicate(timeout=60)
        assert running.returncode == (130 if stop == signal.SIGINT else -signal.SIGKILL), errors
        if stop == signal.SIGINT:
            kept = tmp_path / "t.partial"
            assert f"interrupted: {kept} keeps what is done; the same command resumes it" in errors
        assert not (tmp_path / "t").exists()
        assert document_of(*arguments)["resumed"]
        assert_same(read_all(tmp_path / "t"), big)
        assert verify_checkpoint(tmp_path / "t").whole


def test_a_target_that_is_not_what_was_written_does_not_appear(checkpoint: Path, tmp_path: Path) -> None:
    """A disk that loses a write: nobody notices but the verification."""

    def damage(planned: Any, payloads: Any, target: Any, **_: Any) -> None:
        items = [chunk.item for entry in planned.index.tensors.values() for chunk in entry.chunks]
        largest = max(items, key=lambda item: item.length)
        flip(target.folder / largest.file, largest.offset + largest.length // 2)

    damaging = behind(conversion, "write_all", damage)
    with damaging, pytest.raises(CorruptCheckpointError, match="run the command again"):
        reshard_checkpoint(checkpoint, tmp_path / "t", tp=1, pp=1)
    assert not (tmp_path / "t").exists()
    assert not reshard_checkpoint(checkpoint, tmp_path / "t", tp=1, pp=1).resumed
    assert_same(read_all(tmp_path / "t"), model_tensors())


@pytest.mark.parametrize("boxes", [[(0, 8)], [(0, 8), (8, 8), (12, 4)]], ids=["missing", "twice"])
def test_chunks_that_do_not_make_up_their_tensor_are_not_carried(tmp_path: Path, boxes: list[tuple[int, int]]) -> None:
    """Nothing afterwards would notice: the target's own chunks would be whole."""
    tensor = torch.arange(64.0).reshape(16, 4)
    stored = StoredTensor(tensor, [Box((start, 0), (size, 4)) for start, size in boxes])
    write_checkpoint(tmp_path / "s", {"w": stored})
    for command in (
        ["reshard", str(tmp_path / "s"), str(tmp_path / "t"), "--tp", "1", "--pp", "1"],
        ["export", str(tmp_path / "s"), str(tmp_path / "t")],
        ["import", str(tmp_path / "s"), str(tmp_path / "t")],
    ):
        assert "do not make up the tensor" in refusal_of(*command)
    assert [path.name for path in tmp_path.iterdir()] == ["s"]


def test_more_files_than_the_process_may_open(tmp_path: Path) -> None:
    """The usual limit is 1024; a mixture of experts for a thousand ranks needs more."""
    tensors = {f"w{n}": StoredTensor(torch.arange(64.0).reshape(32, 2), [Box((0, 0), (32, 2))]) for n in range(2)}
    write_checkpoint(tmp_path / "s", tensors)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 40, hard))
        rules = tuple(parse_partition_rules("w 0", "r"))
        reshard_checkpoint(tmp_path / "s", tmp_path / "t", tp=32, pp=1, rules=rules)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert_same(read_all(tmp_path / "t"), {key: stored.tensor for key, stored in tensors.items()})


def test_to_tell_a_plan_from_others_names_each_tensor_once_however_many_chunks_it_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    chunks = tuple(StoredChunk((row, 0), (1, 4), StoredItem("file", 100 * row, 100)) for row in range(20))
    entry = TensorEntry("w", "float32", (20, 4), chunks)
    tensors = [plan.DividedTensor(entry, "w", [Box(chunk.offsets, chunk.sizes) for chunk in chunks], [0] * 20)]
    planned = plan.plan_torch_dist(CheckpointIndex("source", {"w": entry}, {}), tensors, [], 1)
    named = list[StoredChunk]()
    monkeypatch.setattr(StoredChunk, "__repr__", lambda chunk: named.append(chunk) or "a chunk")
    planned.fingerprint()
    assert named == list(chunks)


def test_scalars_and_empty_tensors(tmp_path: Path) -> None:
    """The step count of DCP's optimizers is a tensor without axes."""
    tensors = {
        "optim.state.w.step": torch.tensor(3.5),
        "decoder.layers.0.flag": torch.tensor(True),
        "mlp.experts.experts.amax": torch.tensor(1.0),
        "w": torch.arange(12.0).reshape(6, 2),
        "none": torch.empty(0, 4),
    }
    write_checkpoint(tmp_path / "s", {key: whole(tensor) for key, tensor in tensors.items()})
    for name, sizes in (("a", {"tp": 1, "pp": 1}), ("b", {"tp": 4, "pp": 2, "ep": 2})):
        reshard_checkpoint(tmp_path / "s", tmp_path / name, allow_whole=True, **sizes)
        assert_same(read_all(tmp_path / name), tensors)
        assert verify_checkpoint(tmp_path / name).whole


def test_a_target_is_another_save_than_its_source(checkpoint: Path, tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    reshard_checkpoint(checkpoint, first, tp=2, pp=1)
    reshard_checkpoint(first, second, tp=2, pp=1, dtype="float16")
    for into, other in ((first, second), (second, first)):
        index = read_index(into)
        assert index.manifest is not None
        assert (index.storage_meta or {})["save_id"] == index.manifest.save_id.hex()
        for name in {chunk.item.file for entry in index.tensors.values() for chunk in entry.chunks}:
            own = (into / name).read_bytes()
            (into / name).write_bytes((other / name).read_bytes())
            assert not verify_checkpoint(into).whole
            assert not repair_checkpoint(verify_checkpoint(into), other).repaired
            with pytest.raises(dcp.CheckpointException, match="mixed"):
                read_all(into, FileSystemReader)
            (into / name).write_bytes(own)
        assert verify_checkpoint(into).whole


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", ["file", "pipe"])
def test_no_link_or_pipe_beside_the_data_is_followed(checkpoint: Path, tmp_path: Path, kind: str) -> None:
    linked, outside = tmp_path / "linked", tmp_path / "outside"
    shutil.copytree(checkpoint, linked)
    outside.mkdir()
    (outside / "secret").write_text("secret")
    (linked / "extra").mkdir()
    if kind == "pipe":
        os.mkfifo(linked / "extra" / "a")
    else:
        (linked / "extra" / "a").symlink_to(outside / "secret")
    with pytest.raises(CorruptCheckpointError, match=r"extra/a: expected a regular file .*\(cp -rL"):
        reshard_checkpoint(linked, tmp_path / "t", tp=1, pp=1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["linked", "outside"]


# --- HybridModel


def as_hybrid(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A GPTModel's tensors under the names of a HybridModel with the layers `*-*-`."""

    def renamed(found: re.Match[str]) -> str:
        return f"layers.{2 * int(found[1]) + (found[2] == 'mlp')}.{found[2]}"

    names = {key: re.sub(r"layers\.(\d+)\.(mlp|self_attention)", renamed, key) for key in tensors}
    return {names[key].replace("final_layernorm", "final_norm"): tensor for key, tensor in tensors.items()}


def stacked(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """With a tensor for all layers, as GPTModel has them."""
    found: dict[str, list[torch.Tensor]] = {}
    for key, tensor in tensors.items():
        found.setdefault(re.sub(r"layers\.\d+\.", "layers.", key), []).append(tensor)
    return {key: torch.stack(all_of) if ".layers." in key else all_of[0] for key, all_of in found.items()}


def test_a_gpt_model_becomes_a_hybrid_model_and_back(tmp_path: Path) -> None:
    names = {"hybrid_layer_pattern": None, "hybrid_override_pattern": None, "spec": None, "swiglu": True}
    write_model(tmp_path / "gpt", arguments={"num_layers": LAYERS, "tensor_model_parallel_size": 2, **names})
    conversions = {
        "hybrid": ("gpt", "gpt-to-hybrid", {"tp": 4, "pp": 2}, as_hybrid(model_tensors()), (4, "*-*-")),
        "back": ("hybrid", "hybrid-to-gpt", {}, stacked(model_tensors()), (2, None)),
        "again": ("back", "gpt-to-hybrid", {"tp": 1}, as_hybrid(model_tensors()), (4, "*-*-")),
    }
    for name, (source, direction, sizes, expected, arguments) in conversions.items():
        report = reshard_checkpoint(tmp_path / source, tmp_path / name, convert_model=direction, **sizes)
        assert_same(read_all(tmp_path / name), expected)
        assert verify_checkpoint(tmp_path / name).whole
        with open_checkpoint(tmp_path / name) as checkpoint:
            told = checkpoint.common_state()["args"]
            assert ("output_layer._extra_state/shard_0_1" in checkpoint.objects) is (name != "back")
        assert (told.num_layers, told.hybrid_layer_pattern, told.hybrid_override_pattern) == (*arguments, None)
        assert any("--hybrid-layer-pattern '*-*-'" in note for note in report.notes) is (name != "back")
    second = grid(read_index(tmp_path / "hybrid"), "decoder.layers.3.mlp.linear_fc1.weight")
    assert second == [((32 * half + 8 * rank, 0), (8, 16), 4 + rank) for half in range(2) for rank in range(4)]


def test_mixed_layers_are_told_and_one_of_two_decoders_is_none(tmp_path: Path) -> None:
    arguments = {"num_layers": 4, "moe_layer_freq": 1, "hybrid_layer_pattern": "*-*E"}
    tensors = {"embedding.word_embeddings.weight": torch.randn(8, 4)}
    names = {"*": "self_attention.linear_proj.weight", "-": "mlp.linear_fc2.weight", "E": "mlp.router.weight"}
    tensors |= {f"decoder.layers.{n}.{names[kind]}": torch.randn(4, 4) for n, kind in enumerate("*-*E")}
    objects = {"common_state/shard_0_1": [{"args": Namespace(**arguments)}]}
    for name in ("hybrid", "two"):
        write_checkpoint(tmp_path / name, {key: whole(tensor) for key, tensor in tensors.items()}, objects)
        (tmp_path / name / "metadata.json").write_bytes(encode_config())
        tensors["vision_model.decoder.layers.0.mlp.linear_fc2.weight"] = torch.randn(4, 4)
    convert = partial(reshard_checkpoint, tp=1, pp=1, ep=1, convert_model="hybrid-to-gpt")
    convert(tmp_path / "hybrid", tmp_path / "gpt")
    with open_checkpoint(tmp_path / "gpt") as checkpoint:
        assert checkpoint.common_state()["args"].moe_layer_freq == [0, 1]
    with pytest.raises(OptionError, match=r"vision_model.*is nothing that both models have"):
        convert(tmp_path / "two", tmp_path / "gpt2")


def test_experts_and_layers_of_mamba(tmp_path: Path) -> None:
    """Experts come along with their objects, Mamba's layers do not; the optimizer's state is left out."""
    tensors = {"embedding.word_embeddings.weight": torch.randn(8, 4)}
    objects: dict[str, Any] = {"common_state/shard_0_1": [{"iteration": 7}]}
    for layer, kind in enumerate("M*EM*E"):
        names = {"M": "mixer.A_log", "*": "self_attention.linear_proj.weight", "E": "mlp.router.weight"}
        tensors[f"decoder.layers.{layer}.{names[kind]}"] = torch.randn(4, 4)
        tensors[f"optimizer.state.exp_avg.decoder.layers.{layer}.{names[kind]}"] = torch.randn(4, 4)
        if kind == "E":
            experts = f"decoder.layers.{layer}.mlp.experts.experts.linear_fc2"
            tensors[f"{experts}.weight"] = torch.randn(2, 4, 4)
            objects |= {f"{experts}._extra_state/shard_{n}_2": [layer, n] for n in range(2)}
            objects[f"decoder.layers.{layer}.pre_mlp_layernorm._extra_state/shard_0_1"] = [layer]
    write_checkpoint(tmp_path / "hybrid", {key: whole(tensor) for key, tensor in tensors.items()}, objects)
    (tmp_path / "hybrid" / "metadata.json").write_bytes(encode_config())
    options = {"tp": 1, "pp": 1, "ep": 2, "convert_model": "hybrid-to-gpt"}
    with pytest.raises(OptionError, match="no optimizer state for Mamba's layers; give --drop-optimizer"):
        reshard_checkpoint(tmp_path / "hybrid", tmp_path / "gpt", **options)
    report = reshard_checkpoint(tmp_path / "hybrid", tmp_path / "gpt", drop_optimizer=True, **options)
    assert report.left_out == ("Mamba's layers (2 items), which GPTModel has not",)
    left = {key: value for key, value in tensors.items() if "optimizer" not in key and "mixer" not in key}
    assert_same(read_all(tmp_path / "gpt"), stacked(left))
    with open_checkpoint(tmp_path / "gpt") as checkpoint:
        experts = "decoder.layers.mlp.experts.experts.linear_fc2._extra_state/shard_"
        found = {key: checkpoint.objects[key] for key in checkpoint.objects}
        assert {found[f"{experts}{at}.{n}_2.2"][1] for at in range(2) for n in range(2)} == {0, 1}
        assert found["decoder.layers.pre_mlp_layernorm._extra_state/shard_1_2"] == [5]
        assert len(found) == 7
    report = reshard_checkpoint(tmp_path / "gpt", tmp_path / "hybrid2", tp=1, convert_model="gpt-to-hybrid")
    assert any("'*E*E'" in note for note in report.notes)
    places = {"1": "0", "2": "1", "4": "2", "5": "3"}
    assert_same(
        read_all(tmp_path / "hybrid2"),
        {re.sub(r"(?<=layers\.)\d", lambda found: places[found[0]], key): value for key, value in left.items()},
    )


@pytest.mark.parametrize(
    ("direction", "more", "what"),
    [
        ("hybrid-to-gpt", [], r"the layers are \*- \*-; hybrid-to-gpt expects \*, -, E or M"),
        (
            "gpt-to-hybrid",
            ["decoder.layers.0.cross_attention.linear_q.weight"],
            "cross_attention.* is nothing that both",
        ),
        ("gpt-to-hybrid", ["mtp.layers.0.mlp.linear_fc1.weight"], r"mtp\.layers.* is nothing that both models have"),
        ("gpt-to-hybrid", ["decoder.layers.2.mlp.linear_fc2.weight"], r"the layers are \*- \*- -;"),
        ("gpt-to-hybrid", ["optimizer.distributed.dp_group_idx_0.gbuf_idx_0.bucket_idx_0.param"], "--optimizer-layout"),
        ("gpt-to-hybrid", ["decoder.final_norm.weight"], "two stored names would become one"),
        ("sideways", [], "expected one of gpt-to-hybrid, hybrid-to-gpt"),
    ],
)
def test_what_has_no_place_in_the_other_model_is_refused(
    tmp_path: Path, direction: Any, more: list[str], what: str
) -> None:
    tensors = model_tensors(optimizer=False) | {key: torch.ones(4, 4) for key in more}
    write_model(tmp_path / "c", tensors=tensors)
    with pytest.raises(OptionError, match=what):
        reshard_checkpoint(tmp_path / "c", tmp_path / "t", tp=1, convert_model=direction)
    assert not (tmp_path / "t").exists()

"""Averages of checkpoints: each element rounded once, of the same bits whatever the layouts, and of one model alone."""

import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from mcore_ckpt import ChecksumError, OptionError, merge_checkpoints, verify_checkpoint
from mcore_ckpt.core.boxes import Box
from mcore_ckpt.format.metadata_read import encode_config, read_index
from mcore_ckpt.reshard import merge
from mcore_ckpt.tools.keys import read_plain_state
from mcore_ckpt.tools.payloads import StoredPayloads
from tests.support.command import document_of, output_of
from tests.support.gloo_ranks import run_stock_ranks
from tests.support.local_files import contents
from tests.support.meanwhile import interrupted_at
from tests.support.model_like import assert_same, model_tensors, read_all, write_model
from tests.support.models import GATED, Parallel, build_training
from tests.support.stored_layouts import StoredTensor, flip_item, whole, write_checkpoint

SEEDS = range(3)
Tensors = dict[str, torch.Tensor]


def write_three(
    directory: Path, layouts: Sequence[int] = (1, 2, 4), tensors: Callable[[int], Tensors] = model_tensors
) -> list[Path]:
    """Three checkpoints of one model, saved at these tensor parallel sizes."""
    for seed, tp in zip(SEEDS, layouts, strict=True):
        write_model(directory / f"{seed}", tp, tensors=tensors(seed))
    return [directory / f"{seed}" for seed in SEEDS]


def to_bfloat16(values: np.ndarray[Any, Any]) -> torch.Tensor:
    """To nearest, ties to even, in integers of 64 bits: not by way of float32, as numpy and torch do."""
    bits = values.view(np.uint64)
    bits = (bits + (2**44 - 1) + (bits >> 45 & 1)) >> 45 << 45
    return torch.from_numpy(bits.view(np.float64).astype(np.float32)).bfloat16()


def average(of: Callable[[int], Tensors], weights: Sequence[float], sums: type[Any] = np.float32) -> Tensors:
    stored = [of(seed) for seed in SEEDS]
    found = {}
    for key in stored[0]:
        values = [
            tensors[key].float().numpy().astype(sums) * weight for tensors, weight in zip(stored, weights, strict=True)
        ]
        mean = (values[0] + values[1] + values[2]) / math.fsum(weights)
        assert mean.dtype == sums
        found[key] = to_bfloat16(mean.astype(np.float64))
    return found


def models(seed: int) -> Tensors:
    return model_tensors(seed, optimizer=False)


ROOT = [math.sqrt(n / 3) for n in range(4)]


@pytest.mark.parametrize(
    ("options", "weights"),
    [
        ({}, (1, 1, 1)),
        ({"weights": "0.5,3,-1"}, (0.5, 3, -1)),
        ({"weights": "minus-sqrt"}, (ROOT[1] - ROOT[0], ROOT[2] - ROOT[1], ROOT[3] - ROOT[2])),
        ({"ema": 0.75}, (0.75**2, 0.25 * 0.75, 0.25)),
    ],
    ids=str,
)
def test_each_element_is_the_average_rounded_once(
    tmp_path: Path, options: dict[str, Any], weights: tuple[float, ...]
) -> None:
    sources = write_three(tmp_path)
    before = [contents(source) for source in sources]
    report = merge_checkpoints(sources, tmp_path / "m" / "release", **options)
    assert report.verified
    assert_same(read_all(tmp_path / "m" / "release"), average(models, weights))
    assert verify_checkpoint(tmp_path / "m").whole  # a tracker file names it
    assert [contents(source) for source in sources] == before


def test_float32_errs_by_what_is_said_of_it_and_sums_no_weights_that_cancel() -> None:
    generator, weights = np.random.default_rng(0), (0.3, 0.5, 0.7, -0.1)
    sources = generator.integers(0x3F00, 0x4000, (4, 1000), np.uint16)  # bits of bfloat16 from 0.5 to 2
    out = memoryview(bytearray(2000))

    def merged(weights: Sequence[float]) -> tuple[torch.Tensor, np.ndarray[Any, Any]]:
        merge.weighted_average([(source.data.cast("B"), "bfloat16") for source in sources], weights, "bfloat16", out)
        values = (sources.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
        mean = (values * np.array(weights)[:, None]).sum(0) / math.fsum(weights)
        return torch.frombuffer(out, dtype=torch.bfloat16), mean

    found, mean = merged(weights)
    error = 7 / 2**23 * 2
    assert ((found >= to_bfloat16(mean - error)) & (found <= to_bfloat16(mean + error))).all()
    found, mean = merged((1, 1, -1, -0.996))
    torch.testing.assert_close(found, to_bfloat16(mean), rtol=0, atol=0)


@pytest.mark.parametrize("weights", [(1, 1), (2e-19, 1e-19), (1e30, 3e30)], ids=str)
@pytest.mark.parametrize("value", [float(torch.finfo(torch.bfloat16).min), 2.0**-90])
def test_elements_at_the_ends_of_their_range_have_an_average(value: float, weights: Sequence[float]) -> None:
    source = torch.full((8,), value, dtype=torch.bfloat16)
    out = torch.zeros_like(source)
    content, into = (memoryview(one.view(torch.uint8).numpy()) for one in (source, out))
    merge.weighted_average([(content, "bfloat16")] * 2, weights, "bfloat16", into)
    assert torch.equal(out, source)


def test_what_float32_takes_for_half_way_is_rounded_to_the_nearer() -> None:
    near, half = 2.0**-40, 1 + 2.0**-8
    values = np.array([half - near, half, half + near, half + 2.0**-7 - near, -half - near])
    out = memoryview(bytearray(2 * len(values)))
    merge.weighted_average([(memoryview(values).cast("B"), "float64")], (1.0,), "bfloat16", out)
    assert torch.equal(torch.frombuffer(out, dtype=torch.bfloat16), to_bfloat16(values))


@pytest.mark.parametrize(
    ("layouts", "options"),
    [((4, 4, 4), {"tp": 1}), ((2, 1, 1), {"workers": 3, "tp": 2, "pp": 2}), ((1, 4, 2), {"memory_bytes": "384MiB"})],
    ids=str,
)
def test_no_bit_depends_on_layouts_or_on_how_it_is_read(
    tmp_path: Path, layouts: tuple[int, ...], options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(merge, "_BATCH_ELEMS", 7)
    monkeypatch.setattr(merge, "_LEAST_READ_BYTES", 50)
    monkeypatch.setattr(merge, "_MOST_READ_BYTES", 50)  # rows are read in parts
    report = merge_checkpoints(write_three(tmp_path, layouts), tmp_path / "t", weights=(1, 2, 4), **options)
    assert_same(read_all(tmp_path / "t"), average(models, (1, 2, 4)))
    sizes = options.get("tp", layouts[-1]), options.get("pp", 1)
    assert report.target_layout.startswith("TP {} PP {} ".format(*sizes))


def test_masters_are_rounded_once(tmp_path: Path) -> None:
    def masters(seed: int) -> Tensors:
        stored = model_tensors(seed)
        return {key: stored[f"optimizer.state.param.{key}"] for key in models(seed)}

    def consistent(seed: int) -> Tensors:
        return {**model_tensors(seed), **{key: value.bfloat16() for key, value in masters(seed).items()}}

    sources = write_three(tmp_path, tensors=consistent)
    merge_checkpoints(sources, tmp_path / "t", masters=True, tp=2)
    assert_same(read_all(tmp_path / "t"), average(masters, (1, 1, 1), np.float64))
    merge_checkpoints(sources[:1], tmp_path / "one", masters=True, dtype="fp32")
    assert_same(read_all(tmp_path / "one"), masters(0))
    write_model(tmp_path / "without", tensors=models(0))
    with pytest.raises(OptionError, match="without: no copies in the optimizer"):
        merge_checkpoints([*sources, tmp_path / "without"], tmp_path / "n", masters=True)
    write_model(tmp_path / "other", tensors={**consistent(0), **models(0)})
    with pytest.raises(OptionError, match=r"other: the optimizer's copy of .* is not what the model has"):
        merge_checkpoints([tmp_path / "other"], tmp_path / "n", masters=True)


def stored(directory: Path, tensors: Tensors, objects: dict[str, Any] | None = None) -> Path:
    write_checkpoint(directory, {key: whole(tensor) for key, tensor in tensors.items()}, objects)
    (directory / "metadata.json").write_bytes(encode_config())
    torch.save({"iteration": 5, "rng_state": [1], "args": {"hidden_size": 4}, "ours": 3}, directory / "common.pt")
    return directory


def test_what_has_no_average_is_the_last_ones_or_left_out(tmp_path: Path) -> None:
    extra = "a._extra_state/shard_0_1"
    sources = [
        stored(
            tmp_path / f"{n}",
            {"a": torch.full((2,), float(n)), "count": torch.tensor([n])},
            {extra: [n], "rng/shard_0_1": [n]},
        )
        for n in range(2)
    ]
    report = merge_checkpoints(sources, tmp_path / "t")
    assert_same(read_all(tmp_path / "t"), {"a": torch.full((2,), 0.5), "count": torch.tensor([1])})
    index = read_index(tmp_path / "t")
    assert list(index.objects) == [extra]
    assert read_plain_state(index) == {"args": {"hidden_size": 4}, "ours": 3}
    assert report.left_out == ("rng/shard_0_1", "iteration of the common state", "rng_state of the common state")
    assert f"2 keys as in {sources[1]}, the first count" in report.notes


ONES = torch.ones(8, 4)
OUTPUT = {"embedding.word_embeddings.weight": ONES, "output_layer.weight": ONES}


@pytest.mark.parametrize(
    ("tensors", "others", "match"),
    [
        ({"a": ONES}, {"b": ONES}, "a is float32 .8, 4. and missing"),
        ({"a": ONES}, {"a": ONES[:4]}, r"a is float32 \[8, 4\] and float32 \[4, 4\]"),
        ({"a": ONES}, {"a": ONES.bfloat16()}, "a is float32 .* and bfloat16 .*--dtype"),
        (OUTPUT, {"embedding.word_embeddings.weight": ONES}, "output_layer.weight is .* missing: one model ties its"),
        (OUTPUT, {**OUTPUT, "embedding.word_embeddings.weight": ONES[:4]}, "embedding.* other vocabularies"),
        ({"a": ONES.to(torch.float8_e4m3fn)}, None, "a is float8_e4m3fn .*no average"),
        ({"a": ONES.to(torch.uint8)}, None, "a is uint8 .*no average"),
    ],
)
def test_another_model_is_refused_by_name(tmp_path: Path, tensors: Tensors, others: Tensors | None, match: str) -> None:
    sources = [stored(tmp_path / "1", tensors), stored(tmp_path / "2", others or tensors)]
    with pytest.raises(OptionError, match=match):
        merge_checkpoints(sources, tmp_path / "t")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1", "2"]


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"weights": (1, 2)}, "got 2 numbers, expected 3"),
        ({"weights": "1,-1,0"}, "nor their sum 0"),
        ({"weights": "1,nan,0"}, "none is to be 0"),
        ({"weights": "cosine"}, "expected uniform, minus-sqrt"),
        ({"ema": 1}, "above 0 and below 1"),
        ({"ema": 0.5, "weights": "minus-sqrt"}, "no --weights"),
        ({"hf_config": "x"}, "not with --to torch_dist"),
        ({"weights": "1e38,-1e38,1e-3", "dtype": "fp16"}, "too large for float16"),
    ],
)
def test_options_that_make_no_average_are_refused(tmp_path: Path, options: dict[str, Any], match: str) -> None:
    sources = write_three(tmp_path)
    with pytest.raises(OptionError, match=match):
        merge_checkpoints(sources, tmp_path / "t", **options)
    assert not list(tmp_path.glob("t*"))
    with pytest.raises(OptionError, match="lies inside the source"):
        merge_checkpoints(sources, sources[0] / "t")


def test_an_interrupted_merge_is_resumed_and_what_it_had_read_is_compared(tmp_path: Path) -> None:
    sources = write_three(tmp_path)
    with interrupted_at(StoredPayloads, "check_rest"):
        merge_checkpoints(sources, tmp_path / "t")
    assert not (tmp_path / "t").exists()
    with pytest.raises(OptionError, match="another --weights"):
        merge_checkpoints(sources, tmp_path / "t", weights="minus-sqrt")
    index, before = sources[0] / ".metadata", (sources[0] / ".metadata").stat()
    os.utime(index)
    with pytest.raises(OptionError, match=rf"another source 1 \({sources[0]}, files .*, now {sources[0]}, "):
        merge_checkpoints(sources, tmp_path / "t")
    os.utime(index, ns=(before.st_atime_ns, before.st_mtime_ns))
    read = mock.Mock(wraps=StoredPayloads.read_into)
    with mock.patch.object(StoredPayloads, "read_into", lambda *given: read(*given)):
        assert merge_checkpoints(sources, tmp_path / "t").resumed
    nbytes = sum(tensor.nbytes for tensor in models(0).values())
    assert sum(len(view) for *_, view in (call.args for call in read.call_args_list)) == 3 * nbytes
    assert_same(read_all(tmp_path / "t"), average(models, (1, 1, 1)))


def test_a_damaged_source_makes_nothing(tmp_path: Path) -> None:
    sources = write_three(tmp_path)
    flip_item(read_index(sources[1]), "output_layer.weight")
    with pytest.raises(ChecksumError, match=r"output_layer\.weight"):
        merge_checkpoints(sources, tmp_path / "t")
    assert not list(tmp_path.glob("t*"))


def test_memory_depends_on_neither_tensors_nor_checkpoints(tmp_path: Path) -> None:
    """What is read at once of many sources: of a matrix by columns and of one by rows, no more than some rows."""
    matrix = torch.ones(4096, 4096, dtype=torch.bfloat16)
    halves = [Box((0, 0), (4096, 2048)), Box((0, 2048), (4096, 2048))]
    for n, boxes in enumerate((halves, [Box((0, 0), (4096, 4096))])):
        write_checkpoint(tmp_path / f"{n}", {"a": StoredTensor(matrix, boxes)})
    read, largest = merge.MergedPayloads._read, []

    def watched(self: merge.MergedPayloads, *given: Any) -> Any:
        found = read(self, *given)
        largest.append(sum(len(content) for content, _ in found))
        return found

    with mock.patch.object(merge.MergedPayloads, "_read", watched):
        merge_checkpoints([tmp_path / "0", tmp_path / "1"] * 8, tmp_path / "t", memory_bytes="384MiB", workers=4)
    assert max(largest) <= 384 * 1024**2 / 8 / 4
    assert sum(largest) == 16 * matrix.nbytes  # each byte is read once
    assert_same(read_all(tmp_path / "t"), {"a": matrix})


def test_the_command(tmp_path: Path) -> None:
    sources = [str(source) for source in write_three(tmp_path)]
    shown = output_of("merge", tmp_path / "t", *sources, "--ema", "0.5", "--dry-run")
    assert "output_layer.weight" in shown
    assert f"note: 0.5 x {sources[2]}" in shown
    assert not (tmp_path / "t").exists()
    report = document_of("merge", tmp_path / "t", *sources, "--weights", "1,2,4", "--tp", "2", "-q")
    assert report["target_layout"].startswith("TP 2 ")
    assert_same(read_all(tmp_path / "t"), average(models, (1, 2, 4)))


# --- a model of Megatron


def save_at(rank: int, parallel: Parallel, steps: int, directory: Path, *, flat_buckets: bool) -> None:
    from megatron.core import dist_checkpointing

    training = build_training(GATED, parallel)
    training.train(steps)
    directory.mkdir(exist_ok=True)
    dist_checkpointing.save(training.sharded_state_dict(flat_buckets=flat_buckets), directory)


def logits_of(rank: int, sources: Sequence[Path], targets: Sequence[Path]) -> list[torch.Tensor]:
    """Of the average that torch makes of the models as they are loaded, then of each target."""
    from megatron.core import dist_checkpointing

    model = build_training(GATED, Parallel()).model[0].module

    def loaded(directory: Path) -> dict[str, Any]:
        state = dist_checkpointing.load({"model": model.sharded_state_dict()}, directory)["model"]
        return {key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in state.items()}

    def run(state: dict[str, Any]) -> torch.Tensor:
        model.load_state_dict(state)
        tokens = torch.arange(8).unsqueeze(0)
        with torch.no_grad():
            output: torch.Tensor = model(tokens, tokens, torch.ones(1, 1, 8, 8).triu(1).bool())
        return output

    first, second = map(loaded, sources)
    mean = {
        key: ((value.double() + second[key].double()) / 2).to(value.dtype) if isinstance(value, torch.Tensor) else value
        for key, value in first.items()
    }
    return [run(mean), run(second), *(run(loaded(target)) for target in targets)]


@pytest.mark.long
@pytest.mark.timeout(600)
def test_megatron_computes_with_the_average(tmp_path: Path) -> None:
    sources = [tmp_path / "tp2", tmp_path / "tp1"]
    run_stock_ranks(save_at, 2, Parallel(tensor=2), 1, sources[0], flat_buckets=False)
    run_stock_ranks(save_at, 1, Parallel(), 3, sources[1], flat_buckets=True)
    targets = [tmp_path / "average", tmp_path / "of_masters", tmp_path / "masters"]
    merge_checkpoints(sources, targets[0], tp=4, pp=2)
    merge_checkpoints(sources, targets[1], masters=True)
    merge_checkpoints(sources[1:], targets[2], masters=True)
    ((mean, second, *found),) = run_stock_ranks(logits_of, 1, sources, targets)
    assert torch.equal(found[0], mean)
    assert not torch.equal(mean, second)
    torch.testing.assert_close(found[1], mean, rtol=0.02, atol=0.02)
    assert torch.equal(found[2], second)  # rounded, the flat buckets' copies are the model

"""Files of `--ckpt-format torch`, built by hand as Megatron builds them, come out as the tensors that they are of."""

from __future__ import annotations

import os
import re
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from mcore_ckpt.commands.cli import main
from mcore_ckpt.core.errors import CheckpointError, ChecksumError, CorruptCheckpointError, OptionError
from mcore_ckpt.format.metadata_read import read_index
from mcore_ckpt.format.safe_pickle import load_object
from mcore_ckpt.models.conversions import export_checkpoint, import_checkpoint
from mcore_ckpt.tools.checkpoint import open_checkpoint
from mcore_ckpt.tools.verify import verify_checkpoint
from tests.models.test_conversions import refused as import_refused
from tests.support.gloo_ranks import run_pretending_ranks as run_ranks
from tests.support.legacy_files import EMBEDDING, FFN, HEADS, HIDDEN, LAYER, LAYERS, ROWS, Model
from tests.support.local_files import flip
from tests.support.shared_groups import share_groups


def imported(model: Model, place: Path, optimizer: str = "none", **more: Any) -> Path:
    """A checkpoint of a model's files, which lie next to it in `iter_0000007`."""
    source = model.save(place / "iter_0000007", optimizer, **more)
    import_checkpoint(source, place / "first", kind="megatron-legacy")
    return place / "first"


refused = partial(import_refused, kind="megatron-legacy")


def exported(checkpoint: Path, *options: str) -> int:
    """Export by the command to `other`; its exit code."""
    target = str(checkpoint.with_name("other"))
    return main(["export", str(checkpoint), target, "--to", "megatron-legacy", "--quiet", *options])


def states_in(directory: Path) -> list[dict[str, Any]]:
    return [torch.load(path, weights_only=False) for path in sorted(directory.glob("*/model_optim_rng.pt"))]


def assert_holds(directory: Path, expected: dict[str, torch.Tensor]) -> None:
    with open_checkpoint(directory) as checkpoint:
        assert sorted(checkpoint.index.tensors) == sorted(expected)
        for key, tensor in expected.items():
            stored = checkpoint[key][...]
            assert stored.dtype == tensor.dtype, key
            assert torch.equal(stored, tensor), key


MAIN = {"none": "model alone", "plain": "fp32_param", "distributed": "param"}


@pytest.mark.parametrize(
    ("tp", "pp", "vpp", "ep", "dtype", "optimizer"),
    [
        (2, 1, 1, 0, torch.float32, "plain"),
        (2, 2, 1, 0, torch.bfloat16, "plain"),
        (2, 2, 1, 0, torch.bfloat16, "distributed"),
        (1, 2, 2, 0, torch.bfloat16, "distributed"),
        (1, 1, 1, 1, torch.bfloat16, "none"),
        (2, 1, 1, 2, torch.bfloat16, "plain"),
        (1, 2, 2, 2, torch.bfloat16, "distributed"),
    ],
)
def test_ranks_files_become_whole_tensors_and_come_back(
    tp: int, pp: int, vpp: int, ep: int, dtype: torch.dtype, optimizer: str, tmp_path: Path, capsys: Any
) -> None:
    model = Model(tp, pp, dtype, vpp=vpp, ep=ep)
    source, target, back = model.save(tmp_path / "iter_0000007", optimizer), tmp_path / "first", tmp_path / "other"
    assert not import_checkpoint(source, target, kind="megatron-legacy").left_out
    assert_holds(target, model.expected(None if dtype == torch.float32 else MAIN[optimizer]))
    assert verify_checkpoint(target).whole

    common = load_object((target / "common.pt").read_bytes())
    assert common["iteration"] == 7
    assert common["opt_param_scheduler"] == {"num_steps": 3}
    assert (common["args"].num_layers, common["args"].ckpt_format) == (LAYERS, "torch_dist")
    assert common["args"].params_dtype == dtype
    settings = common.get("optimizer", {})
    settings = settings.get(0, settings)  # experts on several ranks have one of their own
    inner = settings.get("optimizer", settings)
    assert [group["wd_mult"] for group in inner.get("param_groups", ())] == ([] if optimizer == "none" else [1.0, 0.0])
    assert not any("params" in group for group in inner.get("param_groups", ()))
    is_distributed = settings.get("param_state_sharding_type") == "fully_reshardable"
    assert is_distributed is (optimizer == "distributed")
    assert optimizer != "plain" or inner["state"]["common_step"] == 7
    objects = read_index(target).objects
    random = {key for key in objects if key.startswith("rng_state")}
    assert random == {
        f"rng_state/shard_{p}.{t}{f'.{e}' if ep > 1 else ''}_{pp}.{tp}{f'.{ep}' if ep > 1 else ''}"
        for p in range(pp)
        for t in range(tp)
        for e in range(max(1, ep))
    }
    assert "decoder.layers.self_attention.linear_qkv._extra_state/shard_0_4" in objects

    assert exported(target, f"--tp={tp}", f"--pp={pp}", f"--vpp={vpp}", f"--ep={model.ep}") == 0
    assert ("--ckpt-convert-format torch" in capsys.readouterr().out) is (optimizer != "none")
    files = sorted(path.relative_to(source) for path in source.rglob("model_optim_rng.pt"))
    assert files == sorted(path.relative_to(back) for path in back.rglob("*.pt"))
    for file, before, after in zip(files, states_in(source), states_in(back), strict=True):
        before.pop("optimizer", None)
        for chunk in (value for key, value in after.items() if key.startswith("model")):
            assert chunk.pop("output_layer._extra_state", None) is None
        assert vars(before.pop("args")).items() <= vars(after.pop("args")).items()
        assert _same(before, after), file


def test_another_layout_and_the_model_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = Model(2, 2, torch.bfloat16)
    source = model.save(tmp_path / "iter_0000007", "distributed")
    arguments = [str(source), str(tmp_path / "target"), "--from", "megatron-legacy", "--drop-optimizer"]
    assert main(["import", *arguments, "--tp", "4", "--pp", "1", "--dry-run"]) == 0
    assert not (tmp_path / "target").exists()
    lines = capsys.readouterr().out.splitlines()
    row = next(line for line in lines if "  decoder.layers.mlp.linear_fc1.weight " in line)
    assert row.split()[0] == "decoder.layers.*.mlp.linear_fc1.weight"
    assert "joined along axis 0, each half by itself, stacked" in row
    assert main(["import", *arguments, "--tp", "4", "--pp", "1", "--dtype", "fp32", "--quiet"]) == 0
    wanted = {key: tensor.float() for key, tensor in model.expected(None).items() if not key.startswith("optimizer")}
    assert_holds(tmp_path / "target", wanted)
    assert len(read_index(tmp_path / "target").tensors[EMBEDDING].chunks) == 4


def _load_into_megatron(rank: int, legacy: Path, checkpoint: Path, ep: int) -> list[str]:
    """Load a rank's file into Megatron's own model, and the checkpoint into another by stock; what differs in them."""
    share_groups()
    from megatron.core import dist_checkpointing, parallel_state

    from mcore_ckpt.reshard.parameter_orders import build_gpt_model

    arguments = vars(load_object((checkpoint / "common.pt").read_bytes())["args"])
    state = []
    for _ in range(2):
        model = build_gpt_model(arguments, tensor=2, expert=ep, padded_vocabulary=ROWS)
        state.append({key: value for key, value in model.state_dict().items() if isinstance(value, torch.Tensor)})
        for tensor in state[-1].values():
            tensor.detach().fill_(torch.nan)
        if len(state) == 1:
            name = f"mp_rank_{parallel_state.get_tensor_model_parallel_rank():02d}"
            name += f"_{parallel_state.get_expert_model_parallel_rank():03d}"
            file = torch.load(legacy / name / "model_optim_rng.pt", weights_only=False)
            model.load_state_dict(file["model"], strict=True)
        else:
            sharded = model.sharded_state_dict(metadata={"singleton_local_shards": False})
            sharded = {key: shard for key, shard in sharded.items() if not key.endswith("_extra_state")}
            model.load_state_dict(dist_checkpointing.load(sharded, str(checkpoint)), strict=False)
    assert state[0].keys() == state[1].keys()
    return [key for key, tensor in state[0].items() if not torch.equal(tensor, state[1][key])]


@pytest.mark.long
def test_megatrons_own_model_takes_experts_beside_tensor_parallel_layers(tmp_path: Path) -> None:
    """Which no launch can train without a GPU."""
    sizes = {"num_attention_heads": HEADS, "ffn_hidden_size": FFN, "moe_ffn_hidden_size": FFN, "moe_router_topk": 2}
    how = {"normalization": "RMSNorm", "add_bias_linear": False, "add_qkv_bias": True, "softmax_type": "learnable"}
    where = {"position_embedding_type": "rope", "max_position_embeddings": 16}
    checkpoint = imported(Model(1, 1, torch.float32, ep=1), tmp_path, **sizes, **how, **where)
    export_checkpoint(checkpoint, tmp_path / "files", to="megatron-legacy", tp=2, ep=2, etp=1)
    found = run_ranks(_load_into_megatron, 2, tmp_path / "files", checkpoint, 2, deadline_s=240)
    assert found == [[], []]


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return set(one) == set(other) and all(_same(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(_same, one, other))
    return bool(one == other)


def test_a_run_becomes_a_run_on_both_ways(tmp_path: Path) -> None:
    """Which a job takes by `--load`: there is a tracker file, and what it names."""
    model = Model(1, 1, torch.bfloat16)
    checkpoint = imported(model, tmp_path)
    run = tmp_path / "run"
    run.mkdir()
    checkpoint.rename(run / "iter_0000007")
    (run / "latest_checkpointed_iteration.txt").write_text("7")
    export_checkpoint(run, tmp_path / "files", to="megatron-legacy")
    import_checkpoint(tmp_path / "files", tmp_path / "again", kind="megatron-legacy")
    for made, name in (("files", "mp_rank_00"), ("again", ".metadata")):
        assert (tmp_path / made / "latest_checkpointed_iteration.txt").read_text() == "7"
        assert (tmp_path / made / "iter_0000007" / name).exists()


@pytest.mark.parametrize("to", [["--ep", "1"], ["--tp", "2", "--ep", "4", "--etp", "1"], ["--tp", "2", "--ep", "2"]])
def test_experts_at_another_layout_and_here_again(to: list[str], tmp_path: Path) -> None:
    model = Model(1, 1, torch.bfloat16, ep=2)
    assert exported(imported(model, tmp_path), *to) == 0
    if "--etp" in to:  # ranks count through experts and tensor parallel ranks at once
        assert sorted(path.name for path in (tmp_path / "other").iterdir()) == [
            f"mp_rank_0{number % 2}_00{number}" for number in (0, 2, 1, 3)
        ]
    import_checkpoint(tmp_path / "other", tmp_path / "second", kind="megatron-legacy", tp=1, ep=1)
    assert_holds(tmp_path / "second", model.expected("model alone"))


@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        (["--ep", "3"], "4 experts do not divide among 3"),
        (["--pp", "2", "--vpp", "4"], "4 layers do not divide into 2 stages of 4 chunks"),
    ],
)
def test_sizes_that_cannot_be_are_refused(
    sizes: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exported(imported(Model(1, 1, torch.float32, ep=1), tmp_path), *sizes) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize(("name", "tp"), [("mixer.in_proj.weight", 1), ("self_attention.conv1d.weight", 2)])
def test_what_ranks_keep_several_tensors_in_is_refused(
    name: str, tp: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(LAYER, name, ((8 * HEADS, HIDDEN), 0, False))
    source = Model(tp, 1, torch.float32).save(tmp_path / "iter_0000007", "none")
    refused(source, OptionError, rf"{re.escape(name)}: layers of Mamba and of linear attention")


@pytest.mark.parametrize(
    ("said", "tp", "rows"),
    [
        ({"vocab_size": 13}, 4, 32),
        ({"vocab_size": 8, "tokenizer_type": "NullTokenizer", "padded_vocab_size": None}, 1, 16),
        # Not what a launch would have made of it: somebody has said how many.
        ({"vocab_size": 3, "make_vocab_size_divisible_by": 4}, 1, 16),
    ],
)
def test_the_vocabulary_is_padded_as_a_launch_pads_it(said: dict[str, Any], tp: int, rows: int, tmp_path: Path) -> None:
    model = Model(2, 1, torch.bfloat16)
    checkpoint = imported(model, tmp_path, **{"make_vocab_size_divisible_by": 8, **said})
    assert not export_checkpoint(checkpoint, tmp_path / "other", to="megatron-legacy", tp=tp).notes
    states = states_in(tmp_path / "other")
    assert {state["args"].padded_vocab_size for state in states} == {rows}
    parts = [state["model"][EMBEDDING] for state in states]
    assert [part.shape for part in parts] == [(rows // tp, HIDDEN)] * tp
    whole = torch.cat(parts)
    assert torch.equal(whole[:ROWS], model.outer[EMBEDDING].model[:rows])
    assert not whole[ROWS:].any()


def _changed(source: Path, folder: str, change: Any, file: str = "model_optim_rng.pt") -> None:
    state = torch.load(source / folder / file, weights_only=False)
    change(state)
    torch.save(state, source / folder / file)


def test_what_all_ranks_hold_has_to_be_the_same(tmp_path: Path) -> None:
    source = Model(2, 1, torch.float32).save(tmp_path / "iter_0000007", "none")

    def change(state: dict[str, Any]) -> None:
        state["model"]["decoder.layers.2.input_layernorm.weight"][5] += 1

    _changed(source, "mp_rank_01", change)
    refused(source, CorruptCheckpointError, r"layer_norm_weight.*mp_rank_00.*mp_rank_01.*element \[5\]")


@pytest.mark.parametrize("optimizer", ["plain", "distributed"])
def test_an_order_that_the_weights_contradict_is_refused(optimizer: str, tmp_path: Path) -> None:
    source = Model(1, 1, torch.bfloat16).save(tmp_path / "iter_0000007", optimizer)

    def swap(state: dict[Any, Any]) -> None:
        if optimizer == "plain":
            copies = state["optimizer"]["fp32_from_fp16_params"][0]
            copies[2], copies[6] = copies[6], copies[2]
        else:
            state[0][torch.bfloat16, torch.float32]["param"][0:8] += 1

    _changed(source, "mp_rank_00", swap, "model_optim_rng.pt" if optimizer == "plain" else "distrib_optim.pt")
    refused(source, CorruptCheckpointError, "does not round to the parameter")


class _Harm:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


FILE = "mp_rank_01/model_optim_rng.pt"


def _without_a_layer(state: dict[str, Any]) -> None:
    state["model"] = {key: value for key, value in state["model"].items() if ".layers.3." not in key}


def _with(key: str, value: Any, ranks: str = "mp_rank_01") -> Any:
    """These ranks hold this in the model."""
    return _changing(lambda state: state["model"].update({key: value}), ranks)


def _changing(change: Any, ranks: str = "mp_rank_*") -> Any:
    def spoil(source: Path) -> None:
        for folder in source.glob(ranks):
            _changed(source, folder.name, change)

    return spoil


def _counting(**more: int) -> Any:
    """A stranger's file of kilobytes may say that there are billions of something."""

    def change(state: dict[str, Any]) -> None:
        vars(state["args"]).update(more)
        state["model"]["decoder.layers.0.mlp.experts.linear_fc1._extra_state"] = None

    return _changing(change)


@pytest.mark.parametrize(
    "spoil",
    [
        _counting(num_experts=10**9),
        _counting(tensor_model_parallel_size=10**9),
        lambda source: shutil.rmtree(source / "mp_rank_01"),
        lambda source: os.truncate(source / FILE, (source / FILE).stat().st_size - 500),
        _changing(lambda state: state.update(iteration=8), "mp_rank_01"),
        _with(EMBEDDING, torch.zeros(3, HIDDEN)),
        _changing(_without_a_layer, "mp_rank_01"),
        _with("language_model", {"encoder": {}}),  # from before Megatron-Core
    ],
    ids=[
        *("counts experts", "counts ranks"),
        *("no rank", "truncated", "other iteration", "other shape", "no layer", "old"),
    ],
)
def test_files_that_are_not_one_checkpoint_end_in_errors_of_ours(spoil: Any, tmp_path: Path) -> None:
    source = Model(2, 1, torch.float32).save(tmp_path / "iter_0000007", "none")
    spoil(source)
    refused(source, CheckpointError, f"{source}|mp_rank_0")


def test_nothing_that_a_file_names_is_called_or_carried(tmp_path: Path) -> None:
    source = Model(1, 1, torch.float32).save(tmp_path / "iter_0000007", "none", odd=_Harm(tmp_path / "made"))
    report = import_checkpoint(source, tmp_path / "target", kind="megatron-legacy")
    assert report.left_out == ("the argument odd (of a class that is not known here)",)
    assert not hasattr(load_object((tmp_path / "target" / "common.pt").read_bytes())["args"], "odd")
    _changed(source, "mp_rank_00", lambda state: state.update(rng_state=[_Harm(tmp_path / "more")]))
    (tmp_path / "made").rmdir()  # which torch.load has made just now
    (tmp_path / "more").rmdir() if (tmp_path / "more").exists() else None
    refused(source, OptionError, "mkdir")
    assert not (tmp_path / "made").exists()
    assert not (tmp_path / "more").exists()


def test_a_damaged_buffer_is_noticed_though_it_is_read_in_parts(tmp_path: Path) -> None:
    source = Model(1, 1, torch.bfloat16).save(tmp_path / "iter_0000007", "distributed")
    path = source / "mp_rank_00" / "distrib_optim.pt"
    second = torch.load(path, weights_only=False)[0][torch.bfloat16, torch.float32]["exp_avg"]
    at = path.read_bytes().index(second.numpy().tobytes()[:64]) + 4 * second.numel() // 2
    flip(path, at)
    refused(source, ChecksumError, r"distrib_optim\.pt")

"""Hugging Face models to `torch_dist` and back without `transformers` or Megatron: keys, bytes, refusals."""

import json
import os
import shutil
from argparse import Namespace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from mcore_ckpt.commands.cli import main
from mcore_ckpt.core.errors import (
    CheckpointError,
    CheckpointExistsError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    OptionError,
)
from mcore_ckpt.format.metadata_read import read_index
from mcore_ckpt.models import _foreign
from mcore_ckpt.models._families import family_named
from mcore_ckpt.models._table import Naming, relate
from mcore_ckpt.models.conversions import export_checkpoint, import_checkpoint, merge_checkpoints
from mcore_ckpt.tools.checkpoint import open_checkpoint
from mcore_ckpt.tools.verify import verify_checkpoint
from tests.models.test_conversions import read_by_definition
from tests.models.test_conversions import refused as import_refused
from tests.models.test_table import CONFIGS, LLAMA3
from tests.support.command import output_of
from tests.support.local_files import contents
from tests.support.model_like import assert_same, read_all

HIDDEN, FFN, HEADS, GROUPS, HEAD, LAYERS, VOCABULARY = 16, 24, 4, 2, 8, 2, 50
CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "intermediate_size": FFN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": GROUPS,
    "head_dim": HEAD,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 32,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
}


def model_tensors(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def make(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).bfloat16()

    found = {"model.embed_tokens.weight": make(VOCABULARY, HIDDEN), "lm_head.weight": make(VOCABULARY, HIDDEN)}
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}"
        found |= {
            f"{prefix}.input_layernorm.weight": make(HIDDEN),
            f"{prefix}.self_attn.q_proj.weight": make(HEADS * HEAD, HIDDEN),
            f"{prefix}.self_attn.k_proj.weight": make(GROUPS * HEAD, HIDDEN),
            f"{prefix}.self_attn.v_proj.weight": make(GROUPS * HEAD, HIDDEN),
            f"{prefix}.self_attn.o_proj.weight": make(HIDDEN, HEADS * HEAD),
            f"{prefix}.post_attention_layernorm.weight": make(HIDDEN),
            f"{prefix}.mlp.gate_proj.weight": make(FFN, HIDDEN),
            f"{prefix}.mlp.up_proj.weight": make(FFN, HIDDEN),
            f"{prefix}.mlp.down_proj.weight": make(HIDDEN, FFN),
        }
    return found | {"model.norm.weight": make(HIDDEN)}


def write_hf(directory: Path, tensors: dict[str, torch.Tensor], config: dict[str, Any] = CONFIG) -> Path:
    directory.mkdir(parents=True)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def exported(checkpoint: Path, target: Path, **options: Any) -> dict[str, torch.Tensor]:
    """The tensors of a checkpoint that is exported to Hugging Face."""
    export_checkpoint(checkpoint, target, to="hf", **options)
    return read_by_definition(target / "model.safetensors")


refused = partial(import_refused, kind="hf")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_hf(tmp_path_factory.mktemp("hf") / "llama", model_tensors())


@pytest.fixture(scope="module")
def checkpoint(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("ckpt") / "llama"
    import_checkpoint(model, target, kind="hf", tp=2, pp=2)
    return target


def test_each_parameter_is_where_megatron_wants_it(model: Path, checkpoint: Path) -> None:
    """By the definition of Megatron's layouts, written down once more with torch."""
    given, found = model_tensors(), read_all(checkpoint)
    per_group = HEADS // GROUPS * HEAD
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}"
        q, k, v = (given[f"{prefix}.self_attn.{name}_proj.weight"] for name in "qkv")
        parts = []
        for group in range(GROUPS):
            parts += [q[group * per_group : (group + 1) * per_group], *(x[group * HEAD :][:HEAD] for x in (k, v))]
        assert torch.equal(found["decoder.layers.self_attention.linear_qkv.weight"][layer], torch.cat(parts))
        gate, up = given[f"{prefix}.mlp.gate_proj.weight"], given[f"{prefix}.mlp.up_proj.weight"]
        assert torch.equal(found["decoder.layers.mlp.linear_fc1.weight"][layer], torch.cat([gate, up]))
        down = given[f"{prefix}.mlp.down_proj.weight"]
        assert torch.equal(found["decoder.layers.mlp.linear_fc2.weight"][layer], down)
    embedding = found["embedding.word_embeddings.weight"]
    assert embedding.shape == (256, HIDDEN)  # a multiple of 128 for each of two ranks
    assert torch.equal(embedding[:VOCABULARY], given["model.embed_tokens.weight"])
    assert not embedding[VOCABULARY:].any()
    index = read_index(checkpoint)
    assert {chunk.sizes for chunk in index.tensors["decoder.layers.mlp.linear_fc1.weight"].chunks} == {(1, 12, HIDDEN)}
    assert verify_checkpoint(checkpoint).whole
    assert json.loads((checkpoint / "metadata.json").read_bytes())["sharded_backend"] == "torch_dist"


def test_what_a_launch_asks_for_is_there(checkpoint: Path) -> None:
    with open_checkpoint(checkpoint) as opened:
        assert opened["decoder.layers.self_attention.linear_qkv._extra_state/shard_1_2"] in (None, [None])
    common = torch.load(checkpoint / "common.pt", weights_only=False)
    arguments = common["args"]
    assert isinstance(arguments, Namespace)
    assert (arguments.num_layers, arguments.num_query_groups, arguments.kv_channels) == (LAYERS, GROUPS, HEAD)
    assert (arguments.vocab_size, arguments.padded_vocab_size, arguments.bf16) == (VOCABULARY, 256, True)
    assert (common["iteration"], common["checkpoint_version"]) == (0, 3.0)
    objects = {key.partition("/")[0].rpartition("decoder.")[2] for key in read_index(checkpoint).objects}
    assert objects == {
        "final_layernorm._extra_state",
        *(f"layers.self_attention.{name}._extra_state" for name in ("linear_qkv", "linear_proj", "core_attention")),
        *(f"layers.mlp.{name}._extra_state" for name in ("linear_fc1", "linear_fc2")),
    }


@pytest.mark.parametrize("config", [True, False])
def test_the_same_model_comes_back(model: Path, checkpoint: Path, tmp_path: Path, config: bool) -> None:
    beside = tmp_path / "original"
    if config:  # as that of a model whose weights were quantized; those that are written are not
        shutil.copytree(model, beside)
        document = json.loads((model / "config.json").read_bytes()) | {"quantization_config": {"quant_method": "fp8"}}
        (beside / "config.json").write_text(json.dumps(document))
        for name in ("tokenizer.json", "generation_config.json", "notes.txt"):
            (beside / name).write_text(name)
    how = {"hf_config": beside if config else None, "max_shard_bytes": 3000}
    report = export_checkpoint(checkpoint, tmp_path / "back", to="hf", **how)
    tensors: dict[str, torch.Tensor] = {}
    for file in report.files:
        tensors |= read_by_definition(tmp_path / "back" / file)
    assert_same(tensors, model_tensors())
    written = json.loads((tmp_path / "back" / "config.json").read_bytes())
    assert {name: written[name] for name in CONFIG} == CONFIG
    assert "quantization_config" not in written
    assert written["torch_dtype"] == "bfloat16"
    assert written["architectures"] == ["LlamaForCausalLM"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["back", "original"][: 1 + config]
    others = {path.name for path in (tmp_path / "back").iterdir()} - {*report.files, "model.safetensors.index.json"}
    assert others == {"config.json", "generation_config.json", *(["tokenizer.json"] if config else [])}
    generation = (tmp_path / "back" / "generation_config.json").read_text()
    assert (generation == "generation_config.json") is config
    left = ["quantization_config of config.json (the weights are plain)", f"notes.txt of {beside} (only"]
    assert report.notes == ()
    assert [line[: len(text)] for line, text in zip(report.left_out, left[: 2 * config], strict=True)] == left[
        : 2 * config
    ]


def test_parts_of_several_dtypes_become_one_by_dtype(tmp_path: Path) -> None:
    tensors = {
        key: tensor.float() if "k_proj" in key else tensor.half() if "layers.1.mlp.up" in key else tensor
        for key, tensor in model_tensors().items()
    }
    source = write_hf(tmp_path / "m", tensors)
    refused(source, OptionError, r"linear_qkv\.weight is made of .*bfloat16, float32; .*--dtype")
    for dtype in ("float32", "bfloat16"):
        import_checkpoint(source, tmp_path / dtype, kind="hf", dtype=dtype)
        back = exported(tmp_path / dtype, tmp_path / "back" / dtype)
        assert_same(back, {key: tensor.to(getattr(torch, dtype)) for key, tensor in tensors.items()})


@pytest.mark.parametrize(("dtype", "value"), [("float16", 65536.0), ("bfloat16", 3.4e38)])
def test_what_a_narrower_dtype_cannot_hold_is_no_infinity(tmp_path: Path, dtype: str, value: float) -> None:
    tensors = {key: tensor.float() for key, tensor in model_tensors().items()}
    tensors["model.layers.1.mlp.up_proj.weight"][3, 4] = value
    source = write_hf(tmp_path / "m", tensors)
    refused(source, OptionError, rf"linear_fc1\.weight.*too large for {dtype}", dtype=dtype)
    import_checkpoint(source, tmp_path / "c", kind="hf")
    with pytest.raises(OptionError, match=rf"layers\.1\.mlp\.up_proj\.weight.*too large for {dtype}"):
        export_checkpoint(tmp_path / "c", tmp_path / "e", to="hf", dtype=dtype)
    tensors["model.layers.1.mlp.up_proj.weight"][3, 4] = float("-inf")
    import_checkpoint(write_hf(tmp_path / "i", tensors), tmp_path / "j", kind="hf", dtype=dtype)


def test_torch_files_and_a_tied_copy(tmp_path: Path) -> None:
    source, tensors = tmp_path / "m", model_tensors()
    source.mkdir()
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    torch.save({**tensors, "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}, source / "pytorch_model.bin")
    (source / "config.json").write_text(json.dumps({**CONFIG, "tie_word_embeddings": True}))
    report = import_checkpoint(source, tmp_path / "c", kind="hf")
    assert [line.split()[0] for line in report.left_out] == [
        "lm_head.weight",
        "model.layers.0.self_attn.rotary_emb.inv_freq",
    ]
    export_checkpoint(tmp_path / "c", tmp_path / "e", to="hf")
    del tensors["lm_head.weight"]
    assert_same(read_by_definition(tmp_path / "e" / "model.safetensors"), tensors)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"model.layers.1.adapter.weight": torch.ones(2)}, r"no row .* covers: model\.layers\.1\.adapter\.w"),
        ({"model.layers.1.mlp.up_proj.weight": None}, r"not stored: model\.layers\.1\.mlp\.up_proj\.weight"),
        (
            {"model.norm.weight": torch.ones(HIDDEN + 1).bfloat16()},
            r"model\.norm\.weight has the shape \[17\], expected \[16\]",
        ),
    ],
    ids=["extra", "missing", "shape"],
)
def test_keys_and_shapes_that_are_not_the_familys_are_named(tmp_path: Path, change: dict[str, Any], match: str) -> None:
    tensors = {key: tensor for key, tensor in {**model_tensors(), **change}.items() if tensor is not None}
    refused(write_hf(tmp_path / "m", tensors), OptionError, match)


def test_an_export_accounts_for_every_tensor(model: Path, tmp_path: Path) -> None:
    import_checkpoint(model, tmp_path / "c", kind="hf")
    export_checkpoint(tmp_path / "c", tmp_path / "files")
    stored = read_by_definition(tmp_path / "files" / "model.safetensors")

    def again(name: str, tensors: dict[str, torch.Tensor]) -> Path:
        source = write_hf(tmp_path / f"{name}-files", tensors)
        (source / "config.json").unlink()
        import_checkpoint(source, tmp_path / name, common=tmp_path / "c" / "common.pt")
        return tmp_path / name

    extra = again("extra", {**stored, "decoder.layers.mlp.adapter.weight": torch.ones(2, 3)})
    with pytest.raises(OptionError, match=r"covers: decoder\.layers\.mlp\.adapter\.weight"):
        export_checkpoint(extra, tmp_path / "e", to="hf")
    less = dict(stored)
    del less["decoder.final_layernorm.weight"]
    with pytest.raises(OptionError, match=r"not stored: decoder\.final_layernorm\.weight"):
        export_checkpoint(again("less", less), tmp_path / "e", to="hf")
    optimizer = {**stored, "optimizer.state.exp_avg.output_layer.weight": torch.ones(128, HIDDEN)}
    report = export_checkpoint(again("trained", optimizer), tmp_path / "e", to="hf")
    assert report.left_out == ("1 keys of the optimizer's state",)
    assert_same(read_by_definition(tmp_path / "e" / "model.safetensors"), model_tensors())


HALVED = {**CONFIG, "num_attention_heads": 2 * HEADS, "num_key_value_heads": 2 * GROUPS, "head_dim": HEAD // 2}


@pytest.mark.parametrize(
    ("config", "error", "match"),
    [
        (
            {**CONFIG, "intermediate_size": FFN + 1},
            OptionError,
            r"linear_fc1.weight has the shape \[2, 48, 16\], expected \[2, 50, 16\]",
        ),
        (HALVED, OptionError, "num_attention_heads is 4"),  # of the same shapes, and yet another
        # A sibling's, which differs in nothing that has a shape.
        ({**CONFIG, "rope_theta": 500000.0}, OptionError, "where the checkpoint's stored argument"),
        ({**CONFIG, "model_type": "mistral", "sliding_window": 8}, OptionError, "the checkpoint's stored argument"),
        (None, CheckpointNotFoundError, r"config\.json"),
    ],
    ids=["shape", "heads", "rotary base", "window", "no file"],
)
def test_a_configuration_of_another_model_is_refused(
    checkpoint: Path, tmp_path: Path, config: Any, error: type[Exception], match: str
) -> None:
    if config is not None:
        (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(error, match=match):
        export_checkpoint(checkpoint, tmp_path / "e", to="hf", hf_config=tmp_path)


def with_arguments(checkpoint: Path, target: Path, **arguments: Any) -> Path:
    """A copy with other stored arguments; `...`: without that one."""
    shutil.copytree(checkpoint, target)
    common = torch.load(target / "common.pt", weights_only=False)
    common["args"] = Namespace(**{k: v for k, v in {**vars(common["args"]), **arguments}.items() if v is not ...})
    torch.save(common, target / "common.pt")
    assert main(["repair", "--accept-common-state", str(target), "-q"]) == 0
    return target


def test_an_export_states_the_rotary_factor_that_the_job_has_built(checkpoint: Path, tmp_path: Path) -> None:
    """`pretrain_gpt.py` parses --rope-scaling-factor, and never gives it to the model."""
    job = str(with_arguments(checkpoint, tmp_path / "c", use_rope_scaling=True, rope_scaling_factor=32.0, world_size=2))
    original = tmp_path / "original"
    original.mkdir()
    (original / "config.json").write_text(json.dumps({**CONFIG, "rope_scaling": {**LLAMA3, "factor": 32.0}}))
    for target, words, factor in (("plain", (), 8.0), ("forwarded", ("--rope-forwarded", "--hf-config"), 32.0)):
        given = [str(original)] if "--hf-config" in words else []
        shown = output_of("export", job, tmp_path / target, "--to", "hf", *words, *given)
        assert json.loads((tmp_path / target / "config.json").read_text())["rope_scaling"]["factor"] == factor
        assert ("rope_scaling_factor is 32.0; config.json says 8.0" in shown) is (factor == 8.0)
    with pytest.raises(OptionError, match=r"says 32\.0 where .* rope_scaling_factor is 8\.0 .*--rope-forwarded"):
        export_checkpoint(job, tmp_path / "refused", to="hf", hf_config=original)


@pytest.mark.parametrize(
    ("stored", "said", "words"),
    [
        ({}, 48, "48, and the checkpoint has 50 tokens in 256 rows: rows of tokens would be lost.*--vocab-size 50"),
        ({}, 64, "rows of padding would become tokens"),
        ({}, 300, "300, and the checkpoint has 50"),
        # A job with a tokenizer stores no number; Megatron pads it to the next multiple.
        ({"vocab_size": ..., "make_vocab_size_divisible_by": 32}, 192, "has 193 tokens or more in 256 rows"),
        ({"vocab_size": ..., "make_vocab_size_divisible_by": 32}, 200, ""),
        ({}, 50, ""),
    ],
)
def test_rows_of_the_vocabulary_are_not_lost_or_made(
    checkpoint: Path, tmp_path: Path, stored: dict[str, Any], said: int, words: str
) -> None:
    source, original = with_arguments(checkpoint, tmp_path / "c", **stored), tmp_path / "original"
    original.mkdir()
    (original / "config.json").write_text(json.dumps({**CONFIG, "vocab_size": said}))
    if words:
        with pytest.raises(OptionError, match=words):
            export_checkpoint(source, tmp_path / "e", to="hf", hf_config=original)
        if said > 256:
            return
    meant = {"vocab_size": said} if words else {}
    report = export_checkpoint(source, tmp_path / "e", to="hf", hf_config=original, **meant)
    tensors = read_by_definition(tmp_path / "e" / "model.safetensors")
    assert tensors["lm_head.weight"].shape == tensors["model.embed_tokens.weight"].shape == (said, HIDDEN)
    assert json.loads((tmp_path / "e" / "config.json").read_text())["vocab_size"] == said
    assert bool(report.notes) is (bool(stored) and not words)


def test_what_belongs_to_the_weights_goes_along_and_the_rest_is_named(checkpoint: Path, tmp_path: Path) -> None:
    original, code = tmp_path / "original", {"AutoConfig": "own.Config", "AutoTokenizer": ["own.Slow", None]}
    (original / "additional_chat_templates").mkdir(parents=True)
    config = {**CONFIG, "auto_map": code, "num_nextn_predict_layers": 1, "transformers_weights": "other.safetensors"}
    (original / "config.json").write_text(json.dumps(config))
    (original / "tokenizer_config.json").write_text(json.dumps({"a": 1, "auto_map": {"AutoTokenizer": "gone.Own"}}))
    taken = (
        "tokenizer.json qwen.tiktoken tekken.json sentencepiece.bpe.model tokenizer.model.v3 merges.txt own.py other.py"
    )
    taken_too = "additional_chat_templates/tool_use.jinja preprocessor_config.json"
    left = "README.md model.safetensors ._tokenizer.json training_args.bin"
    for name in f"{taken} {taken_too} {left}".split():
        (original / name).write_text("{}")
    (original / "added_tokens.json").symlink_to("a blob that is not in the cache")
    (original / "additional_chat_templates" / "gone.jinja").symlink_to("nor this one")
    (original / "vocab.json").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 7\n")
    report = export_checkpoint(checkpoint, tmp_path / "e", to="hf", hf_config=original)
    found = {str(path.relative_to(tmp_path / "e")) for path in (tmp_path / "e").rglob("*") if path.is_file()}
    made = {"config.json", "generation_config.json", WHOLE, INDEX, "tokenizer_config.json"}
    assert found == {*f"{taken} {taken_too}".split(), *made}
    written = json.loads((tmp_path / "e" / "config.json").read_text())
    assert written["auto_map"] == code
    assert not {"num_nextn_predict_layers", "transformers_weights"} & written.keys()
    assert json.loads((tmp_path / "e" / "tokenizer_config.json").read_text()) == {"a": 1}
    assert [line.partition(" (")[0].partition(" of ")[0] for line in report.left_out] == [
        "num_nextn_predict_layers",
        "transformers_weights",
        "added_tokens.json, additional_chat_templates/gone.jinja",
        "auto_map",
        "vocab.json",
        "README.md",
    ]
    (original / "own.py").unlink()
    export_checkpoint(checkpoint, tmp_path / "without", to="hf", hf_config=original)
    assert "auto_map" not in json.loads((tmp_path / "without" / "config.json").read_text())
    assert not list((tmp_path / "without").glob("*.py"))


WHOLE, FIRST, SECOND = "model.safetensors", "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
INDEX, BIN = f"{WHOLE}.index.json", "pytorch_model.bin"


@pytest.mark.parametrize(
    ("right", "beside", "taken"),
    [
        ([WHOLE], [INDEX, FIRST], WHOLE),  # a stale index
        ([FIRST, SECOND, INDEX], [BIN], INDEX),  # a whole file beside an index
        ([BIN], ["training_args.bin", "optimizer.pt", "scheduler.pt", "rng_state.pth"], BIN),
        ([WHOLE], ["adapter_model.safetensors", "adapter_model.bin"], WHOLE),
        ([WHOLE], ["consolidated.safetensors", "consolidated.00.pth"], WHOLE),
        ([WHOLE], ["model.fp16.safetensors", "pytorch_model.fp16.bin"], WHOLE),
        ([FIRST, SECOND, INDEX], ["model.fp16.safetensors.index.json", f"{BIN}.index.json"], INDEX),
        ([WHOLE], [f"._{WHOLE}", f"._{INDEX}"], WHOLE),
        (["own.safetensors"], ["._own.safetensors", "optimizer.safetensors"], "own.safetensors"),
    ],
    ids="stale whole training adapter consolidated precision indexes apple unusual".split(),
)
def test_the_files_of_a_model_are_those_that_transformers_takes(
    tmp_path: Path, right: list[str], beside: list[str], taken: str
) -> None:
    source, tensors = tmp_path / "m", model_tensors()
    source.mkdir()
    (source / "config.json").write_text(json.dumps(CONFIG))
    for name in beside:  # another model's, or what cannot be read at all
        if name.endswith(".safetensors") and not name.startswith("._"):
            write_hf(tmp_path / name, model_tensors(1))
            shutil.copy(tmp_path / name / WHOLE, source / name)
        else:
            (source / name).write_text(json.dumps({"weight_map": {"model.norm.weight": FIRST}}))
    keys, halves = list(tensors), [name for name in right if name != INDEX]
    mapped = {key: halves[number % len(halves)] for number, key in enumerate(keys)}
    for name in halves:
        own = {key: tensors[key] for key in keys if mapped[key] == name}
        if name == BIN:
            torch.save(own, source / name)
        else:
            write_hf(tmp_path / name, own)
            shutil.copy(tmp_path / name / WHOLE, source / name)
    if INDEX in right:
        (source / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": mapped}))
    report = import_checkpoint(source, tmp_path / "c", kind="hf")
    assert report.left_out == (f"{', '.join(sorted(beside))} (the model is in {taken})",)
    assert_same(exported(tmp_path / "c", tmp_path / "e"), tensors)


@pytest.mark.parametrize("name", ["other.safetensors", "folder/other.safetensors"])
def test_a_configuration_names_the_file_for_transformers(tmp_path: Path, name: str) -> None:
    source = write_hf(tmp_path / "m", model_tensors(1), {**CONFIG, "transformers_weights": name})
    refused(source, CheckpointNotFoundError, f"the weights are in '{name}' .*which is no file here")
    (source / name).parent.mkdir(exist_ok=True)
    shutil.copy(write_hf(tmp_path / "other", model_tensors()) / WHOLE, source / name)
    report = import_checkpoint(source, tmp_path / "c", kind="hf")
    assert report.left_out == (f"{WHOLE} (the model is in {name})",)
    assert_same(exported(tmp_path / "c", tmp_path / "e"), model_tensors())


@pytest.mark.parametrize("name", ["adapter_model.safetensors", "optimizer.pt"])
def test_what_lies_next_to_a_model_is_none(tmp_path: Path, name: str) -> None:
    source = write_hf(tmp_path / "m", model_tensors(1))
    (source / WHOLE).rename(source / name)
    if name == "optimizer.pt":
        torch.save(model_tensors(1), source / name)
    refused(source, CheckpointNotFoundError, f"nothing to import: .*found {name}")
    torch.save(model_tensors(), source / "weights.pth")  # of a kind that is looked for later
    import_checkpoint(source, tmp_path / "c", kind="hf")
    assert_same(exported(tmp_path / "c", tmp_path / "e"), model_tensors())


@pytest.mark.parametrize("name", [WHOLE, INDEX, BIN, "config.json"])
def test_a_pointer_in_place_of_a_file_is_called_that(tmp_path: Path, name: str) -> None:
    source = write_hf(tmp_path / "m", model_tensors())
    if name != "config.json":
        (source / WHOLE).unlink()
    (source / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:4d7a2146\nsize 4976698672\n")
    refused(source, CorruptCheckpointError, f"{name}: is a text file, .*git-lfs.*: a pointer of Git LFS")


@pytest.mark.timeout(60)
def test_files_of_a_stranger(model: Path, checkpoint: Path, tmp_path: Path) -> None:
    """Nested without end, named twice, pipes: each ends in an error of ours with the name."""
    shutil.copytree(model, tmp_path / "m")
    config = tmp_path / "m" / "config.json"
    for text in ("[" * 100_000, '{"model_type": "llama", "model_type": "gpt2"}', "9" * 5000):
        config.write_text(text)
        refused(tmp_path / "m", CorruptCheckpointError, r"config\.json")
    config.unlink()
    os.mkfifo(config)
    refused(tmp_path / "m", CheckpointError, r"config\.json")
    (tmp_path / "tokens").mkdir()
    (tmp_path / "tokens" / "config.json").write_text(json.dumps(CONFIG))
    os.mkfifo(tmp_path / "tokens" / "tokenizer.json")  # not taken along, and waited for by nobody
    export_checkpoint(checkpoint, tmp_path / "e", to="hf", hf_config=tmp_path / "tokens")
    assert not (tmp_path / "e" / "tokenizer.json").exists()


def test_nothing_is_overwritten_and_a_named_target_gets_a_tracker(
    model: Path, checkpoint: Path, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointExistsError):
        import_checkpoint(model, checkpoint, kind="hf")
    with pytest.raises(CheckpointExistsError):
        export_checkpoint(checkpoint, model, to="hf")
    for name, told in (("release", "release"), ("iter_0000000", "0"), ("plain", None)):
        import_checkpoint(model, tmp_path / told / name if told else tmp_path / name, kind="hf")
        tracker = tmp_path / (told or "") / "latest_checkpointed_iteration.txt"
        assert tracker.read_text() == told if told else not tracker.exists()


def test_a_dry_run_lists_every_key(model: Path, checkpoint: Path) -> None:
    imported = import_checkpoint(model, "unused", kind="hf", dry_run=True)
    exported = export_checkpoint(checkpoint, "unused", to="hf", dry_run=True)
    assert {key.source for key in imported.keys} == model_tensors().keys()
    assert {key.target for key in exported.keys} == model_tensors().keys()
    text = output_of("import", model, "unused", "--from", "hf", "--tp", "2", "--dry-run")
    assert all(key in text for key in model_tensors())
    assert "grouped qkv" in text
    assert "decoder.layers.self_attention.linear_qkv.weight[1]" in text
    assert "nothing was written" in text
    assert not Path("unused").exists()


def test_an_output_layer_that_is_to_be_tied_and_is_another_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_foreign, "_COMPARED_BYTES", 8 * 8 * HIDDEN)
    tensors, config = model_tensors(), {**CONFIG, "tie_word_embeddings": True}
    copy = tensors["model.embed_tokens.weight"].clone()
    import_checkpoint(
        write_hf(tmp_path / "same", {**tensors, "lm_head.weight": copy}, config), tmp_path / "a", kind="hf"
    )
    copy[33, 5] += 1
    other = write_hf(tmp_path / "other", {**tensors, "lm_head.weight": copy}, config)
    refused(other, OptionError, r"lm_head\.weight is not model\.embed_tokens\.weight \(first in the slice at \[32, 0\]")


def test_a_tokenizer_is_stored_only_where_there_is_one(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job with `--use-checkpoint-args` takes the stored tokenizer in the place of its own, in any directory."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(model, "bare")
    (tmp_path / "bare" / "special_tokens_map.json").write_text("{}")
    shutil.copytree("bare", "llama")
    (tmp_path / "llama" / "tokenizer.json").write_text("{}")
    expected = {"tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": str(tmp_path / "llama")}
    for target, source, hf_config, stored in (("none", "bare", None, {}), ("given", "bare", "llama", expected)):
        import_checkpoint(source, target, kind="hf", hf_config=hf_config)
        arguments = vars(torch.load(f"{target}/common.pt", weights_only=False)["args"])
        assert {name: value for name, value in arguments.items() if name.startswith("tokenizer")} == stored, target


TABLE = """
name = "ours"
architecture = "OursForCausalLM"
groups = ["decoder", "rotary", "attention", "mlp"]
"""
TENSORS = {
    "embedding.word_embeddings.weight": ("tokens [vocab, hidden]", "vocabulary"),
    "output_layer.weight": ("head [vocab, hidden]", "vocabulary"),
    "decoder.final_layernorm.weight": ("model.norm.weight [hidden]", "same"),
}


def test_a_user_brings_a_family_in_a_file(tmp_path: Path) -> None:
    """Read both ways, and a model of which it says too little or too much is refused with the names."""
    rows = [f"[[tensors]]\nmegatron='{key}'\nparts=['{part}']\nhow='{how}'" for key, (part, how) in TENSORS.items()]
    (tmp_path / "ours.toml").write_text("\n".join([TABLE, *rows]))
    (tmp_path / "less.toml").write_text("\n".join([TABLE, *rows[:-1]]))
    names = {"model.embed_tokens.weight": "tokens", "lm_head.weight": "head"}
    tensors = {names.get(key, key): tensor for key, tensor in model_tensors().items()}
    config = {**CONFIG, "model_type": "ours"}
    source = write_hf(tmp_path / "m", tensors, config)
    refused(source, OptionError, r"model_type 'ours' is not known .*--arch FILE")
    refused(source, OptionError, r"1 that no row .* covers: model\.norm\.weight\.", arch=str(tmp_path / "less.toml"))
    few = write_hf(tmp_path / "few", {key: tensors[key] for key in tensors if "layers.1." not in key}, config)
    layer = r"model\.layers\.1\.input_layernorm\.weight, .* and 4 more"
    refused(few, OptionError, f"9 that the model has are not stored: {layer}", arch=str(tmp_path / "ours.toml"))
    import_checkpoint(source, tmp_path / "c", kind="hf", tp=2, arch=tmp_path / "ours.toml")
    assert_same(exported(tmp_path / "c", tmp_path / "e", arch=tmp_path / "ours.toml"), tensors)
    assert json.loads((tmp_path / "e" / "config.json").read_text())["architectures"] == ["OursForCausalLM"]
    with pytest.raises(FileNotFoundError):
        export_checkpoint(tmp_path / "c", tmp_path / "n", to="hf", arch=tmp_path / "none.toml")


def predicting_model(config: dict[str, Any]) -> dict[str, torch.Tensor]:
    """DeepSeek-V3's tensors, with the names of its published index, and those of a layer behind the last one."""
    deepseek = family_named("deepseek-v3")
    relation = relate(deepseek, deepseek.model(config), Naming(stacked_layers=False), config["vocab_size"])
    tensors = {key: torch.randn(shape).bfloat16() for key, shape in relation.hf.items()}
    return tensors | {copy: tensors[key].clone() for copy, key in relation.copies.items()}


def test_layers_that_predict_further_tokens_come_and_go(tmp_path: Path) -> None:
    config = {**CONFIGS["deepseek-v3"], "model_type": "deepseek_v3", "num_nextn_predict_layers": 1}
    tensors, behind = predicting_model(config), f"model.layers.{config['num_hidden_layers']}."
    alone = {key.removeprefix(behind) for key in tensors if key.startswith(behind)}
    as_others = {key.removeprefix("model.layers.2.") for key in tensors if key.startswith("model.layers.2.")}
    own = "embed_tokens enorm hnorm eh_proj shared_head.norm shared_head.head".split()
    assert alone == as_others | {f"{name}.weight" for name in own}
    source = write_hf(tmp_path / "m", tensors, config)
    report = import_checkpoint(source, tmp_path / "c", kind="hf", tp=2)
    assert report.arguments["mtp_num_layers"] == 1
    assert report.left_out == tuple(
        f"{behind}{copy}.weight (as {key}.weight)"
        for copy, key in (("embed_tokens", "model.embed_tokens"), ("shared_head.head", "lm_head"))
    )
    keys = read_all(tmp_path / "c").keys()
    assert {"mtp.layers.0.eh_proj.weight", "mtp.layers.0.transformer_layer.mlp.router.expert_bias"} <= keys
    assert_same(exported(tmp_path / "c", tmp_path / "e"), tensors)
    assert_same(exported(tmp_path / "c", tmp_path / "with", hf_config=source), tensors)

    rest = {key: tensor for key, tensor in tensors.items() if not key.startswith(behind)}
    without = export_checkpoint(tmp_path / "c", tmp_path / "without", to="hf", mtp=False)
    count = sum(key.startswith("mtp.") for key in keys)
    assert without.left_out == (f"{count} tensors of layers that predict further tokens (--no-mtp)",)
    assert_same(read_by_definition(tmp_path / "without" / "model.safetensors"), rest)
    report = import_checkpoint(source, tmp_path / "none", kind="hf", mtp=False)
    assert len(report.left_out) == len(alone)
    assert_same(exported(tmp_path / "none", tmp_path / "back"), rest)
    assert json.loads((tmp_path / "back" / "config.json").read_text())["num_nextn_predict_layers"] == 0

    # As `transformers` saves the model; one that is there in part, or that no configuration tells of.
    report = import_checkpoint(write_hf(tmp_path / "m2", rest, config), tmp_path / "c2", kind="hf")
    assert report.left_out[0].startswith("1 layers that predict further tokens (not in the files of")
    few = {key: tensor for key, tensor in tensors.items() if key != f"{behind}hnorm.weight"}
    refused(write_hf(tmp_path / "few", few, config), OptionError, rf"1 that .* not stored: {behind}hnorm")
    untold = write_hf(tmp_path / "untold", tensors, {**config, "num_nextn_predict_layers": 0})
    refused(untold, OptionError, rf"covers: {behind}")
    tensors[f"{behind}embed_tokens.weight"][3, 1] += 1
    refused(write_hf(tmp_path / "other", tensors, config), OptionError, r"embed_tokens\.weight is not model\.embed_tok")


def test_the_vocabulary_is_as_stored_where_nothing_tells_it(model: Path, tmp_path: Path) -> None:
    import_checkpoint(model, tmp_path / "as_imported", kind="hf")
    untold = {"vocab_size": None, "spec": ["layers", "made_elsewhere"]}
    source = with_arguments(tmp_path / "as_imported", tmp_path / "c", **untold)
    report = export_checkpoint(source, tmp_path / "e", to="hf")
    assert "128 rows" in report.notes[0]
    assert "made_elsewhere" in report.notes[1]
    assert read_by_definition(tmp_path / "e" / "model.safetensors")["lm_head.weight"].shape == (128, HIDDEN)
    assert_same(exported(source, tmp_path / "k", hf_config=model), model_tensors())
    source = with_arguments(source, tmp_path / "d", rotary_percent=0.5)
    with pytest.raises(OptionError, match=r"rotary_percent=0\.5 changes what the model computes"):
        export_checkpoint(source, tmp_path / "not", to="hf")


def test_matrices_of_8_bit_floats_arrive_as_what_they_stand_for(tmp_path: Path) -> None:
    """Values times the factor of their block, in blocks that do not divide the matrices; some tensors are plain."""
    rows, columns = 12, 7
    plain, stored = model_tensors(), model_tensors()
    for key, tensor in model_tensors().items():
        if key.endswith("_proj.weight"):
            factors = torch.rand(-(-tensor.shape[0] // rows), -(-tensor.shape[1] // columns)) + 0.5
            spread = factors.repeat_interleave(rows, 0).repeat_interleave(columns, 1)
            spread = spread[: tensor.shape[0], : tensor.shape[1]]
            codes = (tensor.float() / spread).to(torch.float8_e4m3fn)
            plain[key] = (codes.float() * spread).bfloat16()
            stored |= {key: codes, f"{key}_scale_inv": factors}
    settings = {"quant_method": "fp8", "weight_block_size": [rows, columns]}
    config = {**CONFIG, "quantization_config": settings}
    quantized = write_hf(tmp_path / "fp8", stored, config)
    refused(quantized, OptionError, r"stored as float8_e4m3fn .*--dtype bf16")
    import_checkpoint(quantized, tmp_path / "target", kind="hf", tp=2, dtype="bf16", memory_bytes=384 * 1024**2)
    import_checkpoint(write_hf(tmp_path / "plain", plain), tmp_path / "expected", kind="hf", tp=2)
    assert_same(read_all(tmp_path / "target"), read_all(tmp_path / "expected"))
    scales = {key for key in stored if key.endswith("_scale_inv")}
    for number, gone in enumerate(({"model.layers.1.mlp.down_proj.weight_scale_inv"}, scales)):
        rest = {key: tensor for key, tensor in stored.items() if key not in gone}
        lost = write_hf(tmp_path / f"lost{number}", rest, config)
        refused(lost, OptionError, r"_proj\.weight is stored as float8_e4m3fn, without factors", dtype="bf16")
    refused(lost, OptionError, r"_proj\.weight is stored as float8_e4m3fn, without factors")
    stored["model.layers.0.mlp.up_proj.weight_scale_inv"] = torch.ones(1, 1)
    wrong = write_hf(tmp_path / "wrong", stored, config)
    expected = r"up_proj\.weight_scale_inv: float32 \[1, 1\] .* expected float32 or bfloat16 \[2, 3\]"
    refused(wrong, OptionError, expected, dtype="bf16")


def test_an_average_is_exported_as_it_is_merged(model: Path, checkpoint: Path, tmp_path: Path) -> None:
    other = {key: tensor * 3 for key, tensor in model_tensors().items()}
    import_checkpoint(write_hf(tmp_path / "hf", other), tmp_path / "other", kind="hf", tp=2)
    sources = [checkpoint, tmp_path / "other"]
    report = merge_checkpoints(sources, tmp_path / "at_once", to="hf", hf_config=str(model))
    assert f"0.5 x {checkpoint}" in report.notes
    merge_checkpoints(sources, tmp_path / "merged")
    found = read_by_definition(tmp_path / "at_once" / "model.safetensors")
    assert_same(found, exported(tmp_path / "merged", tmp_path / "after"))
    assert contents(tmp_path / "at_once")[INDEX] == contents(tmp_path / "after")[INDEX]  # the checksums, too
    assert_same(found, {key: tensor * 2 for key, tensor in model_tensors().items()})

"""Hugging Face models through a checkpoint of Megatron-Core and back: the same logits, then the same bits.

Random small models of `transformers` are imported, loaded into real Megatron models on one and two ranks (strictly, by
stock and by our strategy) and run; what Megatron saves is exported, and run by `transformers`.
"""

import json
import os
import shutil
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from mcore_ckpt.commands.cli import main
from mcore_ckpt.models import _families
from mcore_ckpt.models._families import FAMILIES, family_named
from mcore_ckpt.models._table import Naming, relate
from mcore_ckpt.models.conversions import export_checkpoint, import_checkpoint
from mcore_ckpt.tools.verify import verify_checkpoint
from tests.models import test_table as table
from tests.models.test_table import EXPERTS
from tests.support.command import document_of, output_of
from tests.support.gloo_ranks import run_megatron_ranks as run_ranks
from tests.support.hf_models import (
    SMALL,
    HfCase,
    fsdp_to_megatron,
    further_logits,
    hf_logits,
    keys_of,
    load_and_run,
    make_hf_model,
    save_and_run,
    the_transformers,
    tokens,
    weights,
)
from tests.support.model_like import assert_same
from tests.support.models import Parallel

# (Not by importing it, which takes each process of the tests a second.)
NO_MODELS = pytest.mark.skipif(find_spec("transformers") is None, reason="pip install 'mcore-ckpt[dev]' to make models")
pytestmark = [pytest.mark.timeout(900), NO_MODELS]  # the processes have their own, shorter deadline
long = pytest.mark.long
DEADLINE_S = 400
VOCABULARY = SMALL["vocab_size"]
# Of the largest logit: what rounding in another order makes of float32.
TOLERANCE = 1e-5

LLAMA3 = {**table.LLAMA3, "rope_theta": 500000.0}
LATENT = {**SMALL, **table.LATENT_ATTENTION, "first_k_dense_replace": 1, "q_lora_rank": 24}
YARN = {**table.YARN, "rope_type": "yarn", "rope_theta": 10000.0}
GPT_OSS = {
    **SMALL,
    "head_dim": 16,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "sliding_window": 8,
    "swiglu_limit": 0.5,
    "rope_parameters": {**table.YARN_32, "rope_theta": 150000.0},
}
GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": VOCABULARY, "n_positions": 64}
CASES = [
    HfCase("llama", "LlamaConfig", SMALL),
    HfCase("llama-tied-scaled", "LlamaConfig", {**SMALL, "tie_word_embeddings": True, "rope_parameters": LLAMA3}),
    HfCase("mistral", "MistralConfig", {**SMALL, "sliding_window": 8, "head_dim": 16}),
    HfCase("qwen2", "Qwen2Config", {**SMALL, "tie_word_embeddings": True}),
    HfCase("qwen3", "Qwen3Config", {**SMALL, "head_dim": 16}),
    HfCase("gpt2", "GPT2Config", GPT2),
    HfCase("mixtral", "MixtralConfig", {**SMALL, "num_local_experts": 4}),
    HfCase("qwen2-moe", "Qwen2MoeConfig", {**SMALL, **EXPERTS, "shared_expert_intermediate_size": 24}),
    HfCase("qwen3-moe", "Qwen3MoeConfig", {**SMALL, **EXPERTS, "head_dim": 16, "norm_topk_prob": True}),
    HfCase("qwen3-moe-dense-layer", "Qwen3MoeConfig", {**SMALL, **EXPERTS, "mlp_only_layers": [0]}),
    HfCase(  # all of its groups are chosen, which Megatron-Core has no groups for
        "deepseek-v2",
        "DeepseekV2Config",
        {**LATENT, "q_lora_rank": None, "topk_method": "group_limited_greedy", "n_group": 2, "topk_group": 2},
    ),
    HfCase("deepseek-v3", "DeepseekV3Config", {**LATENT, "n_group": 4, "topk_group": 2, "rope_parameters": YARN}),
    HfCase(
        "deepseek-v3-whole-queries", "DeepseekV3Config", {**LATENT, "n_group": 1, "topk_group": 1, "q_lora_rank": None}
    ),
    HfCase("gemma", "GemmaConfig", {**SMALL, "head_dim": 16}),
    HfCase("deepseek-v3-fp8", "DeepseekV3Config", {**LATENT, "n_group": 4, "topk_group": 2}, "fp8"),
    HfCase("gpt-oss", "GptOssConfig", GPT_OSS),
    HfCase("starcoder2", "Starcoder2Config", {**SMALL, "sliding_window": 8}),
    # Tables in files.
    HfCase("arcee", "ArceeConfig", SMALL),
    HfCase("dots1", "Dots1Config", {**SMALL, **table.SIGMOIDS, "norm_topk_prob": True}),
    HfCase("ernie4-5", "Ernie4_5Config", {**SMALL, "head_dim": 16}),
    HfCase("glm4-moe", "Glm4MoeConfig", {**SMALL, **table.SIGMOIDS, "attention_bias": True, "use_qk_norm": True}),
    HfCase("phi3", "Phi3Config", {**SMALL, "sliding_window": 8, "pad_token_id": 0}),
    HfCase("seed-oss", "SeedOssConfig", {**SMALL, "head_dim": 16}),
    HfCase("smollm3", "SmolLM3Config", {**SMALL, "no_rope_layers": [1, 0], "pad_token_id": 0}),
    HfCase("gpt-oss-mxfp4", "GptOssConfig", {**GPT_OSS, "hidden_size": 64, "intermediate_size": 32}, "mxfp4"),
]
# What the cases have not: embeddings tied or not the other way round, as many keys as queries, other kinds of layers,
# other routers. On one rank, with a tensor for each layer.
SCALED = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}
LONG = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 16}
OTHERS = [
    HfCase("llama-ungrouped", "LlamaConfig", {**SMALL, "num_key_value_heads": 4, "rope_parameters": SCALED}),
    HfCase("qwen2-untied", "Qwen2Config", {**SMALL, "tie_word_embeddings": False, "rope_parameters": LONG}),
    HfCase(
        "gpt2-untied",
        "GPT2Config",
        {**GPT2, "n_inner": 40, "tie_word_embeddings": False, "activation_function": "gelu"},
    ),
    HfCase("deepseek-v2-greedy", "DeepseekV2Config", {**LATENT, "topk_method": "greedy", "tie_word_embeddings": True}),
]
# One family alone, while it is being written: the tests of all take minutes.
ONLY = os.environ.get("MCORE_CKPT_TEST_FAMILY", "")
CASES, OTHERS = ([case for case in cases if case.name.startswith(ONLY)] for cases in (CASES, OTHERS))
CASE_BY_NAME = {case.name: case for case in CASES}
NORMS_OF_QUERIES = "megatron.core.transformer.mla_qk_norm_config"
LAYOUTS = [Parallel(), Parallel(tensor=2), Parallel(pipeline=2), Parallel(expert=2)]


def layouts_of(case: HfCase) -> list[Parallel]:
    if case in OTHERS:
        return [Parallel()]
    has_experts = any("experts" in name for name in case.settings)
    return [layout for layout in LAYOUTS if layout.expert == 1 or has_experts]


def megatron_builds(case: HfCase) -> bool:
    """Not queries without a rank, ahead of which it puts a norm that they have not since 0.19."""
    return case.settings.get("q_lora_rank", 1) is not None or find_spec(NORMS_OF_QUERIES) is None


def arch_of(case: HfCase) -> str:
    """What an export is to be told, where stored arguments do not tell the family from one before it."""
    return next((family.name for family in FAMILIES if case.name.startswith(family.name) and not family.traits), "auto")


def imported(case: HfCase, layout: Parallel, root: Path) -> Path:
    return root / case.name / f"tp{layout.tensor}-pp{layout.pipeline}-ep{layout.expert}"


def assert_close(logits: torch.Tensor, expected: torch.Tensor, where: object) -> None:
    scale = expected.abs().max()
    assert scale > 0.1
    difference = (logits - expected).abs().max() / scale
    assert difference < TOLERANCE, f"{where}: {difference}"


def test_a_model_with_experts_computes_the_same_on_two_ranks_and_comes_back(tmp_path: Path) -> None:
    """One for all of those below: another family and layout each time would cost minutes."""
    case = next(case for case in CASES if case.name == "qwen3-moe")
    make_hf_model(case, tmp_path / "hf")
    import_checkpoint(tmp_path / "hf", tmp_path / "c", kind="hf", tp=2, etp=1, transformer_impl="local")
    expected = hf_logits(tmp_path / "hf", VOCABULARY)
    jobs = {(case.name, "TP 2"): (tmp_path / "c", Parallel(tensor=2))}
    computed = [
        found for rank in run_ranks(load_and_run, 2, jobs, VOCABULARY, deadline_s=DEADLINE_S) for found in rank.items()
    ]
    assert {key[-1] for key, _ in computed} == {"stock", "ours"}
    for key, logits in computed:
        assert_close(logits, expected, key)
    export_checkpoint(tmp_path / "c", tmp_path / "back", to="hf")
    assert_same(weights(tmp_path / "back"), weights(tmp_path / "hf"))


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of each case in `CASE/hf`, and its checkpoints of each layout beside it."""
    root = tmp_path_factory.mktemp("models")
    for case in CASES + OTHERS:
        make_hf_model(case, root / case.name / "hf")
        for layout in layouts_of(case):
            report = import_checkpoint(
                root / case.name / "hf",
                imported(case, layout, root),
                kind="hf",
                tp=layout.tensor,
                pp=layout.pipeline,
                ep=layout.expert,
                etp=1,
                transformer_impl="local",
                dtype="fp32" if case.quantized else None,
                numbered_layers=case in OTHERS,
            )
            assert case.name.startswith(report.family)
    return root


@long
def test_megatron_computes_the_same_logits(models: Path) -> None:
    expected = {case.name: hf_logits(models / case.name / "hf", VOCABULARY) for case in CASES + OTHERS}
    for world in (1, 2):
        jobs = {
            (case.name, str(layout)): (imported(case, layout, models), layout)
            for case in CASES + OTHERS
            for layout in layouts_of(case)
            if max(layout.tensor * layout.pipeline, layout.expert) == world and megatron_builds(case)
        }
        for found in run_ranks(load_and_run, world, jobs, VOCABULARY, deadline_s=DEADLINE_S):
            for (name, layout, strategy), logits in found.items():
                assert_close(logits, expected[name], (name, layout, strategy))
                jobs.pop((name, layout), None)
        assert not jobs


@long
@pytest.mark.parametrize("case", CASES + OTHERS, ids=lambda case: case.name)
def test_the_same_bits_come_back(models: Path, tmp_path: Path, case: HfCase) -> None:
    original, dtype = weights(models / case.name / "hf"), "fp32" if case.quantized else None
    for number, layout in enumerate(layouts_of(case)):
        checkpoint = imported(case, layout, models)
        assert verify_checkpoint(checkpoint).whole
        config = str(models / case.name / "hf") if number % 2 else None
        options = {"hf_config": config, "arch": arch_of(case), "max_shard_bytes": 60_000}
        export_checkpoint(checkpoint, tmp_path / f"{number}", to="hf", **options)
        assert_same(weights(tmp_path / f"{number}"), original)
    # Names of Transformer Engine's layers, which cannot run here.
    numbered = len(case.name) % 2 == 0
    engine = tmp_path / "engine"
    import_checkpoint(models / case.name / "hf", engine, kind="hf", numbered_layers=numbered, tp=2, dtype=dtype)
    export_checkpoint(engine, tmp_path / "engine-hf", to="hf", arch=arch_of(case))
    assert_same(weights(tmp_path / "engine-hf"), original)
    assert torch.equal(hf_logits(tmp_path / "0", VOCABULARY), hf_logits(models / case.name / "hf", VOCABULARY))


@long
def test_what_megatron_saves_computes_the_same_in_transformers(models: Path, tmp_path: Path) -> None:
    """Weights that Megatron has made, saved by stock Megatron-Core from two ranks, in each naming that it has, and
    NeMo's."""
    jobs = {}
    for case in (case for case in CASES if not case.quantized and megatron_builds(case)):
        layout = layouts_of(case)[-1] if "qwen3" in case.name else Parallel(tensor=2)
        # Of NeMo's names one of a family will do.
        twice = case.name in ("llama", "qwen3-moe", "deepseek-v2", "deepseek-v3-whole-queries")
        for naming in ("default", "numbered") if twice else ("default", "numbered", "nemo"):
            jobs[case.name, naming] = (
                imported(case, layouts_of(case)[0], models),
                layout,
                tmp_path / case.name / naming,
            )
    for _, _, target in jobs.values():
        target.mkdir(parents=True)
    computed = run_ranks(save_and_run, 2, jobs, VOCABULARY, deadline_s=DEADLINE_S)
    expected = {key: logits for found in computed for key, logits in found.items()}
    assert expected.keys() == jobs.keys()
    for (name, naming), (_, _, checkpoint) in jobs.items():
        target = tmp_path / name / f"{naming}-hf"
        told = models / name / "hf" if naming == "nemo" else None
        export_checkpoint(checkpoint, target, to="hf", hf_config=told, arch=arch_of(CASE_BY_NAME[name]))
        assert_close(hf_logits(target, VOCABULARY), expected[name, naming], (name, naming))


@long
def test_models_that_fsdp2_has_sharded_compute_the_same(models: Path, tmp_path: Path) -> None:
    """Saved by plain DCP under the names that the model has in memory, where experts are in one tensor."""
    layouts = {
        "llama": Parallel(tensor=2),
        "qwen2": Parallel(pipeline=2),  # its output layer is the embedding
        "gpt2": Parallel(tensor=2),
        "mixtral": Parallel(expert=2),
        "qwen2-moe": Parallel(tensor=2),
        "qwen3-moe-dense-layer": Parallel(expert=2),
        "deepseek-v2": Parallel(tensor=2),
        "deepseek-v3": Parallel(expert=2),
        "gpt-oss": Parallel(expert=2),
    }
    jobs = {
        name: (models / name / "hf", tmp_path / name, layout)
        for name, layout in layouts.items()
        if megatron_builds(CASE_BY_NAME[name])
    }
    found = {}
    for computed in run_ranks(fsdp_to_megatron, 2, jobs, VOCABULARY, deadline_s=DEADLINE_S):
        found |= computed
    assert found.keys() == jobs.keys()
    for name, logits in found.items():
        assert_close(logits, hf_logits(models / name / "hf", VOCABULARY), name)


def with_further_layer(case: HfCase, directory: Path) -> torch.Tensor:
    """Save a model whose last layer predicts the token behind the next one; its logits, as DeepSeek-V3's report has it:
    `shared_head.norm(layer(eh_proj([enorm(embedding of the next token), hnorm(hidden state)])))`.
    """
    from safetensors.torch import save_file

    make_hf_model(case, directory)
    tensors, config = weights(directory), json.loads((directory / "config.json").read_text())
    model = the_transformers().AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager"
    )
    last, hidden = config["num_hidden_layers"] - 1, config["hidden_size"]
    norms = {name: 1 + 0.1 * torch.randn(hidden) for name in ("enorm", "hnorm", "shared_head.norm")}
    project = 0.2 * torch.randn(hidden, 2 * hidden)
    embedding = tensors["model.embed_tokens.weight"]
    own = {**norms, "eh_proj": project, "embed_tokens": embedding, "shared_head.head": tensors["lm_head.weight"]}
    tensors |= {f"model.layers.{last}.{name}.weight": tensor.clone() for name, tensor in own.items()}
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    config |= {"num_hidden_layers": last, "num_nextn_predict_layers": 1}
    (directory / "config.json").write_text(json.dumps(config))

    def normed(name: str, given: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.rms_norm(given, (hidden,), norms[name], config["rms_norm_eps"])

    ids, decoder = tokens(VOCABULARY), model.model
    layer = decoder.layers[last]
    with torch.no_grad():
        model.config.num_hidden_layers, decoder.layers = last, decoder.layers[:last]
        states = decoder(ids, use_cache=False).last_hidden_state
        model.config.num_hidden_layers, decoder.layers = 1, torch.nn.ModuleList([layer])
        decoder.norm.weight.copy_(norms["shared_head.norm"])
        joined = torch.cat((normed("enorm", embedding[ids.roll(-1, 1)]), normed("hnorm", states)), -1)
        logits: torch.Tensor = model(inputs_embeds=joined @ project.T, use_cache=False).logits
    return logits


@long
@pytest.mark.parametrize("name", ["deepseek-v3", "glm4-moe"])
def test_a_layer_that_predicts_further_tokens_computes_what_it_ought_to(name: str, tmp_path: Path) -> None:
    """All but the last token, behind which there is none."""
    case = CASE_BY_NAME[name]
    case = HfCase(case.name, case.config, {**case.settings, "num_hidden_layers": 3})
    expected = with_further_layer(case, tmp_path / "hf")
    import_checkpoint(tmp_path / "hf", tmp_path / "c", kind="hf", tp=2, transformer_impl="local")
    (logits,) = run_ranks(further_logits, 1, tmp_path / "c", VOCABULARY, deadline_s=DEADLINE_S)
    assert_close(logits[:, :-1], expected[:, :-1], name)
    export_checkpoint(tmp_path / "c", tmp_path / "back", to="hf")
    assert_same(weights(tmp_path / "back"), weights(tmp_path / "hf"))


@long
def test_layers_that_predict_further_tokens_have_the_names_of_megatrons() -> None:
    """Of one and of two; `tests/models/test_huggingface.py` converts them."""
    asked = [(family_named(name), number) for name in ("deepseek-v3", "glm4-moe") for number in (1, 2)]
    configs = [{**table.CONFIGS[family.name], "num_nextn_predict_layers": number} for family, number in asked]
    given = [family.arguments(config) for (family, _), config in zip(asked, configs, strict=True)]
    (found,) = run_ranks(keys_of, 1, given, deadline_s=DEADLINE_S)
    for (family, _), config, keys in zip(asked, configs, found, strict=True):
        assert relate(family, family.model(config), Naming(stacked_layers=False), 128).megatron == keys


@long
def test_a_routers_bias_keeps_its_precision(models: Path, tmp_path: Path) -> None:
    source = models / "deepseek-v3-fp8" / "hf"
    import_checkpoint(source, tmp_path / "c", kind="hf", numbered_layers=True, dtype="bf16")
    export_checkpoint(tmp_path / "c", tmp_path / "e", to="hf", dtype="bf16")
    given, back = weights(source), weights(tmp_path / "e")
    biases = {key for key, tensor in back.items() if tensor.dtype == torch.float32}
    assert biases == {"model.layers.1.mlp.gate.e_score_correction_bias"}
    for key, tensor in back.items():
        assert torch.equal(tensor, given[key] if key in biases else given[key].bfloat16())


@long
def test_a_user_can_check_a_conversion_of_his_own(models: Path, tmp_path: Path) -> None:
    """Of layers named as Transformer Engine's are, in which all is rounded, and of a model with other settings."""
    source = str(models / "gpt-oss-mxfp4" / "hf")
    words = ["import", source, str(tmp_path / "imported"), "--from", "hf", "--tp", "2", "--numbered-layers"]
    check = document_of(*words, "--dtype", "bf16", "--check-logits")["check"]
    assert check["same"]
    assert check["scale"] > 1
    assert check["difference"] < TOLERANCE * check["scale"]

    table = (tmp_path / "own.toml", imported(CASE_BY_NAME["smollm3"], Parallel(), models))
    shutil.copy(Path(_families.__file__).parent / "families" / "smollm3.toml", table[0])
    words = ["export", str(table[1]), str(tmp_path / "own"), "--to", "hf", "--arch", str(table[0]), "--check-logits"]
    assert "the same model" in output_of(*words)

    config = json.loads((models / "llama" / "hf" / "config.json").read_text())
    config["rope_parameters"] = {"rope_type": "default", "rope_theta": 500.0}
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "config.json").write_text(json.dumps(config))
    # One that does not say what it was trained with: its arguments cannot contradict the settings.
    checkpoint = str(tmp_path / "silent")
    shutil.copytree(imported(CASES[0], Parallel(), models), checkpoint)
    common = torch.load(tmp_path / "silent" / "common.pt", weights_only=False)
    del common["args"].rotary_base
    torch.save(common, tmp_path / "silent" / "common.pt")
    assert main(["repair", "--accept-common-state", checkpoint, "-q"]) == 0
    other = ["--hf-config", str(tmp_path / "other")]
    assert "NOT the same model" in output_of(
        "export", checkpoint, tmp_path / "exported", "--to", "hf", "--check-logits", *other, code=1
    )

"""Small but real Megatron-Core models with real Megatron optimizers, on the CPU.

parallel = Parallel(tensor=2, pipeline=2)
training = build_training(DENSE, parallel, seed=1)      # on every rank of a gloo world
training.train(steps=2)
state_dict = training.sharded_state_dict()
"""

from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Literal

import torch

from tests.support.cpu_megatron import FusedAdam, pretend_cuda


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What the model is, whatever the parallel layout."""

    layers: int = 2
    hidden: int = 64  # a quarter of it is one head
    gated: bool = False  # SwiGLU: the first MLP weight is stored in two halves
    experts: int = 0  # for each layer
    grouped_experts: bool = False  # one module that holds all local experts, as grouped GEMM does
    vocabulary: int = 128
    sequence: int = 16
    dtype: Literal["float32", "bfloat16"] = "bfloat16"  # bfloat16 has fp32 main parameters in the optimizer
    tied: bool = False  # the output layer has the weight of the embedding, on the last stage of a pipeline a copy
    frozen: tuple[int, ...] = ()  # layers, from 1 on
    dropout: float = 0.0
    layer_wise: bool = False  # Megatron's layer-wise optimizer, with SGD and its momentum in the place of Muon
    offload: Literal["", "fp32", "bfloat16"] = ""  # optimizer on the host, over parameters of that dtype


DENSE = ModelShape()
GATED = ModelShape(gated=True)
MOE_SEQUENTIAL = ModelShape(gated=True, experts=4)
MOE_GROUPED = ModelShape(experts=4, grouped_experts=True)


@dataclass(frozen=True, slots=True)
class Parallel:
    """Sizes of the parallel groups; what is left of the world is data-parallel."""

    tensor: int = 1
    pipeline: int = 1
    expert: int = 1

    def __str__(self) -> str:
        return f"TP={self.tensor} PP={self.pipeline}" + (f" EP={self.expert}" if self.expert > 1 else "")


@dataclass(slots=True)
class Training:
    """A model chunk of this rank with its optimizer."""

    shape: ModelShape
    parallel: Parallel
    model: list[Any]
    optimizer: Any
    step: int = 0

    def train(self, steps: int) -> list[float]:
        """Run optimizer steps on seeded random tokens; returns the losses, on ranks of the last pipeline stage."""
        from megatron.core import parallel_state
        from megatron.core.pipeline_parallel import get_forward_backward_func

        micro_batches, micro_batch_size = 2, 1
        losses: list[float] = []
        for _ in range(steps):
            self.step += 1
            for chunk in self.model:
                chunk.zero_grad_buffer()
            self.optimizer.zero_grad()
            reported = get_forward_backward_func()(
                forward_step_func=_forward_step,
                data_iterator=self._batches(micro_batch_size, parallel_state.get_data_parallel_rank()),
                model=self.model,
                num_microbatches=micro_batches,
                seq_length=self.shape.sequence,
                micro_batch_size=micro_batch_size,
                forward_only=False,
            )
            self.optimizer.step()
            losses += [float(torch.stack([micro["loss"] for micro in reported]).mean())] if reported else []
        return losses

    def sharded_state_dict(self, is_loading: bool = False, flat_buckets: bool = False) -> dict[str, Any]:
        """Model and optimizer as `dist_checkpointing.save` and `load` take them; `flat_buckets`: the optimizer's state
        as launches save it unless told otherwise (and a layer-wise one always), not reshardable in full.
        """
        flat_buckets = flat_buckets or self.shape.layer_wise
        model = self.model[0].module.sharded_state_dict()
        layout: dict[str, Any] = _optimizer_layout()
        others: dict[str, Any] = {"arguments": {"hidden": self.shape.hidden}}
        if flat_buckets:
            layout = {"metadata": {"distrib_optim_sharding_type": "dp_reshardable", "chained_optim_avoid_prefix": True}}
            others |= {"content_metadata": dict(layout["metadata"]), "args": self._arguments()}
        optimizer = self.optimizer.sharded_state_dict(model, is_loading=is_loading, **layout)
        return {"model": model, "optimizer": optimizer, "iteration": self.step, **others}

    def _arguments(self) -> Namespace:
        """What the arguments of a launch would say of this model."""
        shape = self.shape
        return Namespace(
            num_layers=shape.layers,
            hidden_size=shape.hidden,
            num_attention_heads=4,
            ffn_hidden_size=2 * shape.hidden,
            swiglu=shape.gated,
            add_bias_linear=not shape.gated and not shape.experts,
            normalization="LayerNorm",
            padded_vocab_size=shape.vocabulary,
            max_position_embeddings=shape.sequence,
            position_embedding_type="rope",
            untie_embeddings_and_output_weights=True,
            tensor_model_parallel_size=self.parallel.tensor,
            pipeline_model_parallel_size=self.parallel.pipeline,
        )

    def load(self, state_dict: dict[str, Any]) -> None:
        self.model[0].module.load_state_dict(state_dict["model"])
        self.optimizer.load_state_dict(state_dict["optimizer"])
        self.step = state_dict["iteration"]

    def _batches(self, batch: int, data_rank: int) -> Iterator[torch.Tensor]:
        generator = torch.Generator().manual_seed(1000 * self.step + data_rank)
        while True:
            yield torch.randint(self.shape.vocabulary, (batch, self.shape.sequence + 1), generator=generator)


def build_training(
    shape: ModelShape, parallel: Parallel, seed: int = 1, bucket_elements: int | None = None
) -> Training:
    """Set up Megatron's groups for this world and build the model of `shape` with a distributed Adam.

    Collective over the default process group. Models of different seeds differ in every weight. With `bucket_elements`
    gradients are reduced in buckets of about so many; by default in one.
    """
    pretend_cuda()
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.transformer import TransformerConfig

    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=parallel.tensor,
        pipeline_model_parallel_size=parallel.pipeline,
        expert_model_parallel_size=parallel.expert,
    )
    tensor_parallel.model_parallel_cuda_manual_seed(seed)
    torch.manual_seed(seed)
    dtype = getattr(torch, shape.dtype)
    # Without Transformer Engine 0.12 takes this for an FP8 optimizer with too old an engine, though nothing is FP8.
    if megatron_version() < (0, 13):
        vars(import_module("megatron.core.fp8_utils"))["_quantize_param_shard_impl"] = lambda *_: None
    extra: dict[str, Any] = {}
    if shape.experts:
        # 0.16 asks for this name without Transformer Engine, too, where it has never been defined.
        vars(import_module("megatron.core.transformer.moe.moe_utils")).setdefault("te_general_gemm", None)
        extra = {
            "num_moe_experts": shape.experts,
            "moe_router_topk": 2,
            "moe_router_dtype": "fp32",
            "moe_token_dispatcher_type": "allgather",
            "moe_grouped_gemm": shape.grouped_experts,
            "moe_ffn_hidden_size": 2 * shape.hidden,
        }
    config = TransformerConfig(
        num_layers=shape.layers,
        hidden_size=shape.hidden,
        num_attention_heads=4,
        ffn_hidden_size=2 * shape.hidden,
        gated_linear_unit=shape.gated,
        activation_func=torch.nn.functional.silu if shape.gated else torch.nn.functional.gelu,
        add_bias_linear=not shape.gated and not shape.experts,
        tensor_model_parallel_size=parallel.tensor,
        pipeline_model_parallel_size=parallel.pipeline,
        expert_model_parallel_size=parallel.expert,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        hidden_dropout=shape.dropout,
        attention_dropout=shape.dropout,
        bias_dropout_fusion=False,
        bias_activation_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        **extra,
    )
    layer = get_gpt_layer_local_spec(num_experts=shape.experts or None, moe_grouped_gemm=shape.grouped_experts)
    chunk = GPTModel(
        config=config,
        transformer_layer_spec=layer,
        vocab_size=shape.vocabulary,
        max_sequence_length=shape.sequence,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=shape.tied,
        position_embedding_type="rope",
    )
    if dtype is torch.bfloat16:
        chunk = chunk.bfloat16()
    for one in chunk.decoder.layers:
        if one.layer_number in shape.frozen:
            one.requires_grad_(False)
    ddp_config = DistributedDataParallelConfig(
        use_distributed_optimizer=not shape.layer_wise,
        overlap_grad_reduce=bucket_elements is not None,
        bucket_size=bucket_elements,
    )
    if bucket_elements is not None:  # reductions that overlap with the backward pass have to end before the step
        config.finalize_model_grads_func = finalize_model_grads
    model = [DistributedDataParallel(config=config, ddp_config=ddp_config, module=chunk)]
    optimizer_config = OptimizerConfig(
        optimizer="adam",
        lr=1e-2,
        weight_decay=0.01,
        bf16=dtype is torch.bfloat16,
        params_dtype=dtype,
        use_distributed_optimizer=not shape.layer_wise,
        clip_grad=1.0,
        optimizer_cpu_offload=bool(shape.offload),
        optimizer_offload_fraction=1.0 if shape.offload else 0.0,
        use_precision_aware_optimizer=shape.offload == "bfloat16",
    )
    build = _layer_wise_optimizer if shape.layer_wise else get_megatron_optimizer
    return Training(shape, parallel, model, build(optimizer_config, model))


def _layer_wise_optimizer(config: Any, model: list[Any]) -> Any:
    """Megatron's own: one optimizer for the matrices, where `--optimizer muon` has Muon, and Adam for the rest."""
    from megatron.core.optimizer.layer_wise_optimizer import LayerWiseDistributedOptimizer
    from megatron.core.process_groups_config import ProcessGroupCollection

    def start(optimizer: Any, config: Any = None) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                for name in names[type(optimizer)]:
                    optimizer.state[parameter].setdefault(name, torch.zeros_like(parameter))

    names = {torch.optim.SGD: ("momentum_buffer",), FusedAdam: ("exp_avg", "exp_avg_sq")}
    trained = [parameter for parameter in model[0].parameters() if parameter.requires_grad]

    def groups_of(matrices: bool) -> list[dict[str, Any]]:
        """As Megatron groups them: what experts on several ranks have is by itself."""
        settings = {"is_decoupled_lr": False, "wd_mult": 1.0, "lr_mult": 1.0}
        own = [one for one in trained if (one.dim() == 2) is matrices]
        divided = {
            wanted: [one for one in own if getattr(one, "allreduce", True) is not wanted] for wanted in (False, True)
        }
        return [
            {"params": found, "is_expert_parallel": expert, **settings} for expert, found in divided.items() if found
        ]

    optimizers = [
        torch.optim.SGD(groups_of(True), lr=config.lr, momentum=0.9),
        FusedAdam(groups_of(False), lr=config.lr),
    ]
    groups = ProcessGroupCollection.use_mpu_process_groups()
    more = {"model_chunks": model} if megatron_version() >= (0, 17) else {}
    return LayerWiseDistributedOptimizer(optimizers, config, groups, [start, start], **more)


def megatron_version() -> tuple[int, int]:
    version = import_module("megatron.core.package_info")
    return version.MAJOR, version.MINOR


def _optimizer_layout() -> dict[str, Any]:
    """Arguments for an optimizer state that can be loaded under any other layout, as the training code gives them."""
    if megatron_version() < (0, 13):
        return {"sharding_type": "fully_sharded_model_space"}
    layout = "fully_sharded_model_space" if megatron_version() < (0, 15) else "fully_reshardable"
    # The optimizer of a model with experts is a chain of two: their keys must not depend on whether it is.
    return {"metadata": {"distrib_optim_sharding_type": layout, "chained_optim_avoid_prefix": True}}


def _forward_step(batches: Iterator[torch.Tensor], model: Any) -> tuple[torch.Tensor, Any]:
    tokens = next(batches)
    positions = torch.arange(tokens.size(1) - 1).unsqueeze(0)
    causal = torch.ones(1, 1, tokens.size(1) - 1, tokens.size(1) - 1).triu(1).bool()
    output = model(tokens[:, :-1], positions, causal, labels=tokens[:, 1:])

    def loss(per_token: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        mean = per_token.float().mean()
        return mean, {"loss": mean.detach().clone()}

    return output, loss

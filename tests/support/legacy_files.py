"""Files of all ranks as `--ckpt-format torch` writes them, built by hand, and the tensors that they are of."""

from __future__ import annotations

import itertools
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

HIDDEN, FFN, LAYERS, ROWS, HEADS = 8, 12, 4, 16, 4

EMBEDDING = "embedding.word_embeddings.weight"

# Axis along which tensor parallel ranks divide a parameter (None: all have it), and whether it has two halves.
LAYER = {
    "input_layernorm.weight": ((HIDDEN,), None, False),
    "self_attention.core_attention.softmax_offset": ((HEADS,), 0, False),
    "self_attention.linear_proj.weight": ((HIDDEN, HIDDEN), 1, False),
    "self_attention.linear_qkv.weight": ((3 * HIDDEN, HIDDEN), 0, False),
    "self_attention.linear_qkv.bias": ((3 * HIDDEN,), 0, False),
    "pre_mlp_layernorm.weight": ((HIDDEN,), None, False),
    "mlp.linear_fc1.weight": ((2 * FFN, HIDDEN), 0, True),
    "mlp.linear_fc2.weight": ((HIDDEN, FFN), 1, False),
}

EXPERTS = 4

# Layers of experts have these instead of an MLP; each expert has what `EXPERT` says.
ROUTER = {"mlp.router.weight": ((EXPERTS, HIDDEN), None, False)}

EXPERT = {name.removeprefix("mlp."): how for name, how in LAYER.items() if name.startswith("mlp.")}

AT_TARGET = {
    "input_layernorm.weight": "self_attention.linear_qkv.layer_norm_weight",
    "pre_mlp_layernorm.weight": "mlp.linear_fc1.layer_norm_weight",
}


class Parameter:
    """A parameter of the whole model, and its states."""

    def __init__(self, shape: tuple[int, ...], axis: int | None, gated: bool, dtype: torch.dtype) -> None:
        self.axis, self.gated = axis, gated
        main = torch.randn(shape)
        self.states = {"main": main, "exp_avg": torch.randn(shape), "exp_avg_sq": torch.rand(shape)}
        self.model = main.to(dtype)
        if dtype == torch.float32:
            self.states["main"] = self.model

    def part(self, tensor: torch.Tensor, rank: int, ranks: int) -> torch.Tensor:
        if self.axis is None:
            return tensor
        halves = tensor.chunk(2 if self.gated else 1, self.axis)
        return torch.cat([half.chunk(ranks, self.axis)[rank] for half in halves], self.axis).contiguous()


class Model:
    """Writes the files of all ranks, and knows what has to come of them."""

    def __init__(self, tp: int, pp: int, dtype: torch.dtype, *, vpp: int = 1, ep: int = 0) -> None:
        torch.manual_seed(tp * 10 + pp)
        self.tp, self.pp, self.vpp, self.dtype = tp, pp, vpp, dtype
        self.experts, self.ep = (EXPERTS if ep else 0), max(1, ep)
        self.outer = {
            EMBEDDING: Parameter((ROWS, HIDDEN), 0, False, dtype),
            "decoder.final_layernorm.weight": Parameter((HIDDEN,), None, False, dtype),
        }
        layer: dict[str, Any] = dict(LAYER)
        if ep:
            layer = {name: how for name, how in LAYER.items() if not name.startswith("mlp.")} | ROUTER
            names = [f"mlp.experts.local_experts.{e}." for e in range(EXPERTS)]
            layer |= {prefix + name: how for prefix in names for name, how in EXPERT.items()}
        self.kinds = layer
        self.layers = [
            {name: Parameter(shape, axis, gated, dtype) for name, (shape, axis, gated) in layer.items()}
            for _ in range(LAYERS)
        ]

    def own(self, ep: int) -> dict[str, str]:
        """What an expert parallel rank has of a layer, and what it calls that."""
        found = {}
        count = max(1, self.experts // self.ep)
        for name in self.kinds:
            parts = name.split(".")
            if parts[1] == "experts":
                number = int(parts[3])
                if number // count != ep:
                    continue
                parts[3] = str(number % count)
            found[name] = ".".join(parts)
        return found

    def chunks(self, stage: int, ep: int = 0) -> list[dict[str, Parameter]]:
        """The parameters of a stage by their local keys, in the model's order; tied, the last one has the embedding."""
        found = []
        size = LAYERS // self.pp // self.vpp
        for chunk in range(self.vpp):
            first = (chunk * self.pp + stage) * size
            state: dict[str, Parameter] = {}
            if stage == 0 and chunk == 0:
                state[EMBEDDING] = self.outer[EMBEDDING]
            for local, layer in enumerate(self.layers[first : first + size]):
                state |= {f"decoder.layers.{local}.{own}": layer[name] for name, own in self.own(ep).items()}
            if stage == self.pp - 1 and chunk == self.vpp - 1:
                state["decoder.final_layernorm.weight"] = self.outer["decoder.final_layernorm.weight"]
                if self.pp > 1:
                    state["output_layer.weight"] = self.outer[EMBEDDING]
            found.append(state)
        return found

    def arguments(self, **more: Any) -> Namespace:
        sizes = {"tensor_model_parallel_size": self.tp, "pipeline_model_parallel_size": self.pp}
        shape = {"num_layers": LAYERS, "hidden_size": HIDDEN, "swiglu": True}
        more = {"padded_vocab_size": ROWS, **more}
        how = {"transformer_impl": "local", "params_dtype": self.dtype, "accumulate_allreduce_grads_in_fp32": True}
        if self.experts:
            sizes |= {"expert_model_parallel_size": self.ep, "num_experts": EXPERTS, "data_parallel_size": self.ep}
        return Namespace(**sizes, **shape, **how, untie_embeddings_and_output_weights=False, **more)

    def save(self, directory: Path, optimizer: str, **more: Any) -> Path:
        """Write all files; the optimizer's are `"none"`, `"plain"` or `"distributed"`."""
        for stage, ep, rank in itertools.product(range(self.pp), range(self.ep), range(self.tp)):
            name = f"mp_rank_{rank:02d}" + (f"_{stage:03d}" if self.pp > 1 else "")
            folder = directory / (name + (f"_{ep:03d}" if self.ep > 1 else ""))
            folder.mkdir(parents=True)
            chunks = self.chunks(stage, ep)
            state: dict[str, Any] = {
                "args": self.arguments(**more),
                "checkpoint_version": 3.0,
                "iteration": 7,
                "opt_param_scheduler": {"num_steps": 3},
                "rng_state": [{"torch_rng_state": torch.full((4,), 10 * stage + rank, dtype=torch.uint8)}],
            }
            for number, chunk in enumerate(chunks):
                holder = torch.nn.Module()  # whose state dict carries `_metadata`, as a model's does
                saved = holder.state_dict()
                saved |= {key: p.part(p.model, rank, self.tp) for key, p in chunk.items()}
                for local in range(LAYERS // self.pp // self.vpp):
                    saved[f"decoder.layers.{local}.self_attention.linear_qkv._extra_state"] = None
                state["model" if self.vpp == 1 else f"model{number}"] = saved
            parts = self.optimizers(chunks)
            several = len(parts) > 1
            if optimizer == "plain":
                made = [self.plain_optimizer(part, rank, expert=n > 0) for n, part in enumerate(parts)]
                state["optimizer"] = made if several else made[0]
            elif optimizer == "distributed":
                decays = [(1.0, 0.0), (1.0,)]
                groups = [
                    [{"wd_mult": wd, "is_expert_parallel": n > 0, "step": 7} for wd in decays[n]]
                    for n in range(len(parts))
                ]
                made = [{"optimizer": {"param_groups": group}} for group in groups]
                state["optimizer"] = made if several else made[0]
                # The first data parallel rank has the first optimizer's.
                flat = [self.flat_buffers(part, rank) if n or not ep else None for n, part in enumerate(parts)]
                torch.save(flat if several else flat[0], folder / "distrib_optim.pt")
            torch.save(state, folder / "model_optim_rng.pt")
        return directory

    def optimizers(self, chunks: list[dict[str, Parameter]]) -> list[list[dict[str, Parameter]]]:
        """The parameters of each optimizer: experts on several ranks have one of their own."""
        if self.ep == 1:
            return [chunks]
        return [
            [{key: p for key, p in chunk.items() if (".experts." in key) is expert} for chunk in chunks]
            for expert in (False, True)
        ]

    def plain_optimizer(self, chunks: list[dict[str, Parameter]], rank: int, *, expert: bool) -> dict[str, Any]:
        parameters = [parameter for chunk in chunks for parameter in chunk.values()]
        decayed = [p for p in parameters if p.model.dim() > 1]
        groups, state, copies, number = [], {}, [], 0
        for wd, members in ((1.0, decayed), (0.0, [p for p in parameters if p.model.dim() == 1])):
            if expert and not members:
                continue
            numbers = list(range(number, number + len(members)))
            number += len(members)
            groups.append({"wd_mult": wd, "is_expert_parallel": expert, "lr": 0.1, "params": numbers})
            copies.append([p.part(p.states["main"], rank, self.tp) for p in members])
            for place, p in zip(numbers, members, strict=True):
                state[place] = {name: p.part(p.states[name], rank, self.tp) for name in ("exp_avg", "exp_avg_sq")}
                state[place]["step"] = torch.tensor(7.0)
        inner = {"state": state, "param_groups": groups}
        if self.dtype == torch.float32:
            return inner
        return {"optimizer": inner, "fp32_from_fp16_params": copies}

    def flat_buffers(self, chunks: list[dict[str, Parameter]], rank: int) -> dict[Any, Any]:
        found: dict[Any, Any] = {"buckets_coalesced": True}
        for number, chunk in enumerate(chunks):
            starts: dict[str, int] = {}
            bucket = inside = 0
            for key, parameter in reversed(chunk.items()):
                inside += -inside % 64
                alone = self.pp > 1 and parameter is self.outer[EMBEDDING]
                if alone and inside:
                    bucket, inside = bucket + inside, 0
                starts[key] = bucket + inside
                inside += parameter.part(parameter.model, rank, self.tp).numel()
                if alone:
                    bucket, inside = bucket + inside, 0
            tensors: dict[str, Any] = {"numel_unpadded": bucket + inside}
            for name, state in (("param", "main"), ("exp_avg", "exp_avg"), ("exp_avg_sq", "exp_avg_sq")):
                tensors[name] = torch.zeros(bucket + inside)
                for key, start in starts.items():
                    part = chunk[key].part(chunk[key].states[state], rank, self.tp)
                    tensors[name][start : start + part.numel()] = part.reshape(-1).float()
            found[number] = {(self.dtype, torch.float32): tensors}
        return found

    def expected(self, main: str | None) -> dict[str, torch.Tensor]:
        """The target's tensors; `main` is what it calls the optimizer's own copy, None if it has none."""
        found = {key: parameter.model for key, parameter in self.outer.items()}
        keys = {name: f"decoder.layers.{AT_TARGET.get(name, name)}" for name in self.kinds if ".experts." not in name}

        def stacked(get: Callable[[Parameter], torch.Tensor]) -> dict[str, torch.Tensor]:
            made = {key: torch.stack([get(layer[name]) for layer in self.layers]) for name, key in keys.items()}
            for name in EXPERT if self.experts else ():
                experts = [[f"mlp.experts.local_experts.{e}.{name}" for e in range(EXPERTS)]] * LAYERS
                made[f"decoder.layers.mlp.experts.experts.{name}"] = torch.stack(
                    [
                        torch.stack([get(layer[one]) for one in names])
                        for names, layer in zip(experts, self.layers, strict=True)
                    ]
                )
            return made

        found |= stacked(lambda parameter: parameter.model)
        if main == "model alone":
            return found
        for state in ("exp_avg", "exp_avg_sq", *(["main"] if main else [])):
            called = main if state == "main" else state
            found |= {f"optimizer.state.{called}.{key}": p.states[state] for key, p in self.outer.items()}
            made = stacked(lambda parameter, state=state: parameter.states[state])  # type: ignore[misc]
            found |= {f"optimizer.state.{called}.{key}": tensor for key, tensor in made.items()}
        return found

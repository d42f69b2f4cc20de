"""Files of all ranks as `--ckpt-format torch` writes them, built by hand, and the tensors that they are of."""

import itertools
from argparse import Namespace
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
    def __init__(self, shape: tuple[int, ...], axis: int | None, gated: bool, dtype: torch.dtype) -> None:
        self.axis, self.gated = axis, gated
        self.model = torch.randn(shape).to(dtype)

    def part(self, rank: int, ranks: int) -> torch.Tensor:
        if self.axis is None:
            return self.model
        halves = self.model.chunk(2 if self.gated else 1, self.axis)
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

    def save(self, directory: Path, *, has_optimizer: bool = False, **more: Any) -> Path:
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
                saved |= {key: p.part(rank, self.tp) for key, p in chunk.items()}
                for local in range(LAYERS // self.pp // self.vpp):
                    saved[f"decoder.layers.{local}.self_attention.linear_qkv._extra_state"] = None
                state["model" if self.vpp == 1 else f"model{number}"] = saved
            if has_optimizer:
                state["optimizer"] = {"optimizer": {"param_groups": [{"lr": 0.1}]}}
            torch.save(state, folder / "model_optim_rng.pt")
        return directory

    def expected(self) -> dict[str, torch.Tensor]:
        found = {key: parameter.model for key, parameter in self.outer.items()}
        for name in self.kinds:
            if ".experts." not in name:
                tensors = [layer[name].model for layer in self.layers]
                found[f"decoder.layers.{AT_TARGET.get(name, name)}"] = torch.stack(tensors)
        for name in EXPERT if self.experts else ():
            names = [f"mlp.experts.local_experts.{e}.{name}" for e in range(EXPERTS)]
            tensors = [torch.stack([layer[one].model for one in names]) for layer in self.layers]
            found[f"decoder.layers.mlp.experts.experts.{name}"] = torch.stack(tensors)
        return found

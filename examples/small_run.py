"""Make what the guides work on: python CLONE/examples/small_run.py DIRECTORY. Needs torch; run it out of a clone.

run             two checkpoints of a small model
copy            the newer one of them
Llama-small     a model as `transformers` saves it
two_tiers.py    the job of the guide to two tiers
"""

import argparse
import json
import shutil
import struct
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from tests.support.model_like import model_tensors, write_model


def write_llama(directory: Path) -> None:
    """A small random Llama, as `transformers` would have saved it."""
    hidden, inner, heads, kv_heads, vocabulary = 32, 64, 4, 2, 256
    shapes = {"model.embed_tokens.weight": (vocabulary, hidden), "model.norm.weight": (hidden,)}
    shapes["lm_head.weight"] = (vocabulary, hidden)
    for layer in range(2):
        head_size = hidden // heads
        for name, shape in {
            "self_attn.q_proj": (hidden, hidden),
            "self_attn.k_proj": (kv_heads * head_size, hidden),
            "self_attn.v_proj": (kv_heads * head_size, hidden),
            "self_attn.o_proj": (hidden, hidden),
            "mlp.gate_proj": (inner, hidden),
            "mlp.up_proj": (inner, hidden),
            "mlp.down_proj": (hidden, inner),
            "input_layernorm": (hidden,),
            "post_attention_layernorm": (hidden,),
        }.items():
            shapes[f"model.layers.{layer}.{name}.weight"] = shape
    generator = torch.Generator().manual_seed(1)
    tensors = {key: torch.randn(shape, generator=generator).bfloat16() for key, shape in shapes.items()}
    directory.mkdir()
    # safetensors: the length of a header in JSON, the header, the tensors' bytes.
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    payload = b""
    for key, tensor in tensors.items():
        content = tensor.view(torch.int16).numpy().tobytes()
        ends = [len(payload), len(payload) + len(content)]
        header[key] = {"dtype": "BF16", "shape": list(tensor.shape), "data_offsets": ends}
        payload += content
    described = json.dumps(header).encode()
    (directory / "model.safetensors").write_bytes(struct.pack("<Q", len(described)) + described + payload)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": 2,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocabulary,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
        "torch_dtype": "bfloat16",
    }
    (directory / "config.json").write_text(json.dumps(config))


def main(words: list[str] | None = None) -> None:
    """Write all of it into the directory that is named; nothing of it may be there."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path, help="where to; `.` is the current one")
    here = parser.parse_args(words).directory
    here.mkdir(parents=True, exist_ok=True)
    for name in ("run", "copy", "Llama-small"):
        if (here / name).exists():
            sys.exit(f"{here / name}: is there already; choose an empty folder")
    for iteration in (100, 200):
        write_model(here / "run" / f"iter_{iteration:07d}", tensors=model_tensors(iteration), iteration=iteration)
    (here / "run" / "latest_checkpointed_iteration.txt").write_text("200")
    shutil.copytree(here / "run" / "iter_0000200", here / "copy" / "iter_0000200")
    write_llama(here / "Llama-small")
    shutil.copy(Path(__file__).with_name("two_tiers.py"), here)


if __name__ == "__main__":
    main()

"""Measure the commands next to coreutils on the same files: reshard, verify, diff, import, export, inspect.

    make bench-tools                          a checkpoint of 4 GB and a model of 4 GB, three rounds
    make bench-tools ARGS="--gb 1 --rounds 1 --out build/bench.json"        a try, which changes no table

Pages are dropped from the page cache before each. Results go into docs/benchmark.json, and the tables of docs/tools.md
come out of it. The model is Llama's in shape, in one safetensors file; what is exported is a checkpoint of 4 ranks that
was made of it, and what comes of that is compared with the model.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import safe_open
from safetensors.torch import save_file

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks import results, tables  # noqa: E402  (found by the line above)
from benchmarks.groups import Group, Interpreter  # noqa: E402
from benchmarks.machine import drop_page_cache  # noqa: E402
from benchmarks.state import State  # noqa: E402

_RANKS = 4
_COMMAND = [sys.executable, "-m", "mcore_ckpt"]

# Runs a command, and prints its seconds, CPU seconds and MB. In a process of its own, since what a process has resident
# when it starts another counts as the other's.
_WATCH = """
import os, sys, time
started = time.perf_counter()
with open(os.devnull, "w") as nothing:
    silent = [(os.POSIX_SPAWN_DUP2, nothing.fileno(), 1)]
    pid = os.posix_spawnp(sys.argv[1], sys.argv[1:], os.environ, file_actions=silent)
_, status, usage = os.wait4(pid, 0)
print(time.perf_counter() - started, usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024)
sys.exit(os.waitstatus_to_exitcode(status))
"""

# Sizes of Llama 3.2 1B, but for the vocabulary; as many layers as fill the file.
_HIDDEN, _FFN, _HEADS, _GROUPS, _VOCABULARY = 2048, 8192, 32, 8, 32000
_HEAD = _HIDDEN // _HEADS
_LAYER = {
    "self_attn.q_proj": (_HIDDEN, _HIDDEN),
    "self_attn.k_proj": (_GROUPS * _HEAD, _HIDDEN),
    "self_attn.v_proj": (_GROUPS * _HEAD, _HIDDEN),
    "self_attn.o_proj": (_HIDDEN, _HIDDEN),
    "mlp.gate_proj": (_FFN, _HIDDEN),
    "mlp.up_proj": (_FFN, _HIDDEN),
    "mlp.down_proj": (_HIDDEN, _FFN),
    "input_layernorm": (_HIDDEN,),
    "post_attention_layernorm": (_HIDDEN,),
}


class Work(NamedTuple):
    """One thing to measure: a command, what it is compared with, and what has to be gone before it starts."""

    name: str
    command: list[str]
    compared_with: str = ""
    removed: tuple[Path, ...] = ()
    then_sync: bool = False


def _works(source: Path, many: Path, model: Path, of_model: Path, place: Path) -> list[Work]:
    copy, target, exported = place / "copy", place / "target", place / "exported"
    partial = target.with_name("target.partial")

    def reshard(tp: int, *more: str) -> list[str]:
        return [*_COMMAND, "reshard", str(source), str(target), "--tp", str(tp), "--pp", "1", *more]

    gone = (copy, target, partial)
    return [
        Work("cp -r, sync", ["cp", "-r", str(source), str(copy)], removed=gone, then_sync=True),
        *(
            Work(f"reshard TP 4 -> {tp}{note}", reshard(tp, *more), "cp -r, sync", gone)
            for note, more in ((", --no-verify", ("--no-verify",)), ("", ()))
            for tp in (1, 2)
        ),
        Work("cat", ["sh", "-c", f"cat {source}/*.distcp"]),
        Work("verify", [*_COMMAND, "verify", str(source)], "cat"),
        Work("cat of both", ["sh", "-c", f"cat {source}/*.distcp {target}/*.distcp"]),
        Work("diff, TP 4 and 2", [*_COMMAND, "diff", str(source), str(target)], "cat of both"),
        Work("cp -r of the model, sync", ["cp", "-r", str(model), str(copy)], removed=gone, then_sync=True),
        *(
            Work(
                f"import to TP 4{note}",
                [*_COMMAND, "import", str(model), str(target), "--from", "hf", "--tp", "4", *more],
                "cp -r of the model, sync",
                gone,
            )
            for note, more in ((", --no-verify", ("--no-verify",)), ("", ()))
        ),
        Work("cp -r of its ckpt, sync", ["cp", "-r", str(of_model), str(copy)], removed=gone, then_sync=True),
        Work(
            "export to hf",
            [*_COMMAND, "export", str(of_model), str(exported), "--to", "hf"],
            "cp -r of its ckpt, sync",
            (*gone, exported),
        ),
        Work("inspect, 20,000 tensors", [*_COMMAND, "inspect", str(many)]),
        Work("--help", [*_COMMAND, "--help"]),
    ]


def _write_model(folder: Path, nbytes: int) -> None:
    """A model of about so many bytes, of noise."""
    whole = {"embed_tokens": (_VOCABULARY, _HIDDEN), "norm": (_HIDDEN,)}
    layer_bytes = 2 * sum(map(math.prod, _LAYER.values()))
    layers = max(1, round((nbytes - 4 * _VOCABULARY * _HIDDEN) / layer_bytes))
    shapes = {f"model.{name}.weight": shape for name, shape in whole.items()}
    shapes |= {f"model.layers.{n}.{name}.weight": shape for n in range(layers) for name, shape in _LAYER.items()}
    shapes["lm_head.weight"] = (_VOCABULARY, _HIDDEN)
    noise = torch.Generator().manual_seed(0)
    weights = {
        name: torch.randint(-(2**15), 2**15, shape, dtype=torch.int16, generator=noise).view(torch.bfloat16)
        for name, shape in shapes.items()
    }
    folder.mkdir()
    save_file(weights, folder / "model.safetensors")
    config = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": _HIDDEN,
        "intermediate_size": _FFN, "num_attention_heads": _HEADS, "num_key_value_heads": _GROUPS, "head_dim": _HEAD,
        "vocab_size": _VOCABULARY, "num_hidden_layers": layers, "max_position_embeddings": 8192, "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))


def _same_model(one: Path, other: Path) -> bool:
    """Whether two files hold the same tensors, to the bit."""
    with safe_open(one, "pt") as first, safe_open(other, "pt") as second:
        return set(first.keys()) == set(second.keys()) and all(
            torch.equal(first.get_tensor(name).view(torch.int16), second.get_tensor(name).view(torch.int16))
            for name in first.keys()  # noqa: SIM118  (no dict)
        )


def _timed(work: Work, base: Path, environment: dict[str, str]) -> dict[str, float]:
    for path in work.removed:
        shutil.rmtree(path, ignore_errors=True)
    drop_page_cache(base)
    watch = [sys.executable, "-c", _WATCH, *work.command]
    done = subprocess.run(watch, stdout=subprocess.PIPE, text=True, env=environment, check=False)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(work.command)}: exit code {done.returncode}")
    seconds, cpu_s, mb = map(float, done.stdout.split())
    started = time.perf_counter()
    if work.then_sync:
        os.sync()
    return {"s": seconds + time.perf_counter() - started, "cpu s": cpu_s, "MB": mb}


def _environment(cache: Path) -> dict[str, str]:
    """An environment in which the package is compiled already, as it is where it has been installed."""
    environment = {**os.environ, "PYTHONPYCACHEPREFIX": str(cache), "PYTHONPATH": str(ROOT)}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    subprocess.run([sys.executable, "-m", "compileall", "-q", str(ROOT / "mcore_ckpt")], env=environment, check=True)
    return environment


def _checkpoint(path: Path, state: State, world: int) -> None:
    interpreter = Interpreter(Path(sys.executable), (ROOT,))
    group = Group(interpreter, "mcore_ckpt", world)
    group.call("save", path, state)
    group.close()
    interpreter.close()


def main() -> int:
    """Parse arguments, measure, report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gb", type=float, default=4.0, help="size of the checkpoint, in 1e9 bytes (default: 4)")
    parser.add_argument("--rounds", type=int, default=3, help="measured rounds of each (default: 3)")
    parser.add_argument("--dir", type=Path, default=ROOT, help="where to write; the file system that is measured")
    parser.add_argument("--only", default="", help="words of the works' names, with commas between them")
    parser.add_argument("--out", type=Path, default=results.FILE, help="results (default: docs/benchmark.json)")
    results.add_busy(parser)
    arguments = parser.parse_args()
    measurement = results.Measurement(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what is written is removed
    base = Path(tempfile.mkdtemp(prefix="mcore_ckpt_bench_", dir=arguments.dir))
    size_bytes = int(arguments.gb * 1e9)
    try:
        environment = _environment(base / "compiled")
        source, many, model, of_model = (base / name for name in ("dense", "small", "model", "of_model"))
        works = _works(source, many, model, of_model, base)
        chosen = [work for work in works if any(word in work.name for word in arguments.only.split(","))]
        works = [work for work in works if work in chosen or work.name in {one.compared_with for one in chosen}]
        needed = " ".join(word for work in works for word in work.command)
        if str(source) in needed:
            _checkpoint(source, State("dense", size_bytes), _RANKS)
        if str(many) in needed:
            _checkpoint(many, State("small", 10**9), 1)
        if str(model) in needed or str(of_model) in needed:
            _write_model(model, size_bytes)
            making = [*_COMMAND, "import", str(model), str(of_model), "--from", "hf", "--tp", str(_RANKS), "--quiet"]
            subprocess.run(making, env=environment, stdout=subprocess.DEVNULL, check=True)
        samples: dict[str, dict[str, list[float]]] = {}
        measurement.begin("tools")
        for turn in range(arguments.rounds):
            for work in works:
                for figure, value in _timed(work, base, environment).items():
                    samples.setdefault(figure, {}).setdefault(work.name, []).append(value)
            sys.stderr.write(f"tools: round {turn + 1} of {arguments.rounds}\n")
        exported = base / "exported" / "model.safetensors"
        if exported.exists() and not _same_model(model / "model.safetensors", exported):
            raise SystemExit("what was exported is not the model that was imported")
    finally:
        shutil.rmtree(base, ignore_errors=True)
    compared = {work.name: work.compared_with for work in works}
    measurement.put("tools", {"tools": samples}, compared_with=compared)
    sys.stdout.write(tables.everything(measurement.results | {"samples": {"tools": samples}}))
    if arguments.out == results.FILE:
        tables.write(ROOT)
    return 0


if __name__ == "__main__":
    sys.exit(main())

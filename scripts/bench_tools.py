"""Measure the commands beside coreutils on the same files: reshard, verify, diff, import, export, inspect.

    make bench-tools                          a checkpoint of 4 GB and a model of 4 GB, three rounds, some minutes
    make bench-tools ARGS="--gb 1 --rounds 1"
    make bench-tools ARGS="--only import,export"

Pages are dropped from the page cache before each. Printed are medians, their ratio to the coreutils of the same round's
work (the median of the rounds' ratios), CPU seconds, and the most resident memory that the command took. Only ratios
travel between machines. The model is Llama's in shape, in one safetensors file; what is exported is a checkpoint of 4
ranks that was made of it, and what comes of that is compared with the model.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.scenarios import write_once  # noqa: E402  (found by the line above)
from mcore_ckpt.commands._shell import table  # noqa: E402
from tests.support.gloo_ranks import run_ranks  # noqa: E402

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


class Cost(NamedTuple):
    """What a command took: seconds, of all cores, and MB of resident memory at most."""

    seconds: float
    cpu_s: float
    mb: float


class Work(NamedTuple):
    """One thing to measure: a command, what it is held against, and what has to be gone before it starts."""

    name: str
    command: list[str]
    beside: str = ""
    removed: tuple[Path, ...] = ()
    then_sync: bool = False


def _works(source: Path, many: Path, model: Path, of_model: Path, place: Path) -> list[Work]:
    copy, target, exported = place / "copy", place / "target", place / "exported"
    partial = target.with_name("target.partial")
    files = sorted(map(str, source.glob("*.distcp")))

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
        Work("cat", ["cat", *files]),
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


def _drop_page_cache(*folders: Path) -> None:
    os.sync()
    for file in (file for folder in folders for file in folder.rglob("*") if file.is_file()):
        fd = os.open(file, os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def _write_model(folder: Path, nbytes: int) -> None:
    """A model of about so many bytes, of noise."""
    whole = {"embed_tokens": (_VOCABULARY, _HIDDEN), "norm": (_HIDDEN,)}
    layer_bytes = 2 * sum(map(math.prod, _LAYER.values()))
    layers = max(1, round((nbytes - 4 * _VOCABULARY * _HIDDEN) / layer_bytes))
    shapes = {f"model.{name}.weight": shape for name, shape in whole.items()}
    shapes |= {f"model.layers.{n}.{name}.weight": shape for n in range(layers) for name, shape in _LAYER.items()}
    shapes["lm_head.weight"] = (_VOCABULARY, _HIDDEN)
    header, at = {}, 0
    for name, shape in shapes.items():
        stop = at + 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [at, stop]}
        at = stop
    text = json.dumps(header).encode()
    folder.mkdir()
    noise = np.random.default_rng(0)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for shape in shapes.values():
            file.write(noise.bytes(2 * math.prod(shape)))
    config = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": _HIDDEN,
        "intermediate_size": _FFN, "num_attention_heads": _HEADS, "num_key_value_heads": _GROUPS, "head_dim": _HEAD,
        "vocab_size": _VOCABULARY, "num_hidden_layers": layers, "max_position_embeddings": 8192, "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))


def _same_model(one: Path, other: Path) -> bool:
    """Whether two files hold the same tensors, wherever they lie in them."""

    def places(path: Path) -> dict[str, tuple[str, list[int], int, int]]:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            fields = json.loads(file.read(length))
        fields.pop("__metadata__", None)
        return {
            name: (found["dtype"], found["shape"], 8 + length + found["data_offsets"][0], math.prod(found["shape"]) * 2)
            for name, found in fields.items()
        }

    here, there = places(one), places(other)
    if {name: place[:2] for name, place in here.items()} != {name: place[:2] for name, place in there.items()}:
        return False
    first, second = np.memmap(one, mode="r"), np.memmap(other, mode="r")
    return all(
        np.array_equal(first[at : at + nbytes], second[there[name][2] : there[name][2] + nbytes])
        for name, (_, _, at, nbytes) in here.items()
    )


def _timed(work: Work, folders: Callable[[], list[Path]], environment: dict[str, str]) -> Cost:
    for path in work.removed:
        shutil.rmtree(path, ignore_errors=True)
    _drop_page_cache(*folders())
    watch = [sys.executable, "-c", _WATCH, *work.command]
    done = subprocess.run(watch, stdout=subprocess.PIPE, text=True, env=environment, check=False)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(work.command)}: exit code {done.returncode}")
    seconds, cpu_s, mb = map(float, done.stdout.split())
    started = time.perf_counter()
    if work.then_sync:
        os.sync()
    return Cost(seconds + time.perf_counter() - started, cpu_s, mb)


def _compiled(cache: Path) -> dict[str, str]:
    """An environment in which this package is compiled already, as it is where it has been installed."""
    environment = {**os.environ, "PYTHONPYCACHEPREFIX": str(cache), "PYTHONPATH": str(ROOT)}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    subprocess.run([sys.executable, "-m", "compileall", "-q", str(ROOT / "mcore_ckpt")], env=environment, check=True)
    return environment


def main() -> int:
    """Parse arguments, measure, report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gb", type=float, default=4.0, help="size of the checkpoint, in 1e9 bytes (default: 4)")
    parser.add_argument("--rounds", type=int, default=3, help="measured rounds of each (default: 3)")
    parser.add_argument("--dir", type=Path, default=ROOT, help="where to write; the file system that is measured")
    parser.add_argument("--only", default="", help="words of the works' names, with commas between them")
    arguments = parser.parse_args()
    base = Path(tempfile.mkdtemp(prefix="mcore_ckpt_bench_", dir=arguments.dir))
    size_bytes = int(arguments.gb * 1e9)
    try:
        environment = _compiled(base / "compiled")
        model, of_model = base / "model", base / "of_model"
        works = _works(base / "dense" / "mcore_ckpt", base / "small" / "mcore_ckpt", model, of_model, base)
        chosen = [work for work in works if any(word in work.name for word in arguments.only.split(","))]
        works = [work for work in works if work in chosen or work.name in {one.beside for one in chosen}]
        needed = " ".join(word for work in works for word in work.command)
        if f"{base / 'dense'}" in needed:
            run_ranks(write_once, _RANKS, base / "dense", "dense", size_bytes, ["mcore_ckpt"], deadline_s=900)
        if f"{base / 'small'}" in needed:
            run_ranks(write_once, 1, base / "small", "small", 0, ["mcore_ckpt"], deadline_s=900)
        if str(model) in needed or str(of_model) in needed:
            _write_model(model, size_bytes)
            making = [*_COMMAND, "import", str(model), str(of_model), "--from", "hf", "--tp", str(_RANKS), "--quiet"]
            subprocess.run(making, env=environment, stdout=subprocess.DEVNULL, check=True)
        costs: dict[str, list[Cost]] = {work.name: [] for work in works}
        for _ in range(arguments.rounds):
            for work in works:
                costs[work.name].append(_timed(work, lambda: [base], environment))
        if "export to hf" in costs and not _same_model(
            model / "model.safetensors", base / "exported/model.safetensors"
        ):
            raise SystemExit("what was exported is not the model that was imported")
    finally:
        shutil.rmtree(base, ignore_errors=True)
    rows = []
    for work in works:
        seconds = [cost.seconds for cost in costs[work.name]]
        others = costs[work.beside] if work.beside else []
        ratios = [own / other.seconds for own, other in zip(seconds, others, strict=False)]
        rows.append(
            (
                work.name,
                f"{statistics.median(seconds):.2f}",
                f"{min(seconds):.2f} - {max(seconds):.2f}",
                f"{statistics.median(ratios):.2f}" if ratios else "",
                work.beside,
                f"{statistics.median(cost.cpu_s for cost in costs[work.name]):.1f}",
                f"{max(cost.mb for cost in costs[work.name]):.0f}",
            )
        )
    print(table(("work", "median s", "min - max", "ratio", "to", "CPU s", "MB"), rows, right=(1, 2, 3, 5, 6)))
    return 0


if __name__ == "__main__":
    sys.exit(main())

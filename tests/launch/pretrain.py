"""Start Megatron-LM's `pretrain_gpt.py` under `torchrun`, with stock Megatron or with `mcore_ckpt.launch`.

The script is the one of a checkout that the environment names; nothing of it is copied or changed.
`site/sitecustomize.py` beside this file stands in for the GPU and writes down what each rank did.

Environment:
    MEGATRON_LM_REPO: a checkout of Megatron-LM, 0.16 (Python 3.11) or 0.19 (Python 3.12). Its own `megatron/` is used.
    MEGATRON_LM_PATH: further folders for its dependencies, joined by colons. Optional.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

Side = Literal["stock", "ours"]
ROOT = Path(__file__).resolve().parents[2]
SITE = Path(__file__).resolve().parent / "site"
_DEADLINE_S = 300.0

# A GPT of 0.3 million parameters; what a CPU has no kernels for is switched off.
ARGUMENTS = (
    "--mock-data --tokenizer-type NullTokenizer --vocab-size 1000 --num-workers 0 "
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32 "
    "--micro-batch-size 2 --global-batch-size 8 --lr 1e-3 --lr-warmup-iters 2 --train-iters 6 "
    "--eval-iters 0 --eval-interval 1000 --log-interval 1 "
    "--transformer-impl local --distributed-backend gloo --attention-backend unfused "
    "--no-gradient-accumulation-fusion --no-masked-softmax-fusion --no-bias-gelu-fusion --no-bias-dropout-fusion "
    "--no-persist-layer-norm --no-rope-fusion --ckpt-format torch_dist"
).split()


def megatron_lm() -> Path:
    """The checkout of Megatron-LM; only where `missing_reason` is empty."""
    return Path(os.environ["MEGATRON_LM_REPO"]).resolve()


def missing_reason() -> str:
    """Why no launch can be made; empty if one can."""
    named = os.environ.get("MEGATRON_LM_REPO")
    if not named:
        return "MEGATRON_LM_REPO is not set: it has to name a checkout of Megatron-LM, which is no part of this project"
    if not (Path(named) / "pretrain_gpt.py").is_file():
        return f"MEGATRON_LM_REPO={named}: there is no pretrain_gpt.py in it"
    return ""


@dataclass(frozen=True, slots=True)
class Launched:
    log: str  # what all ranks printed
    events: list[list[dict[str, Any]]]  # what each rank recorded, by rank

    @property
    def losses(self) -> dict[int, float]:
        """Iteration -> loss, in full precision, as the ranks of the last pipeline stage agree on it."""
        found: dict[int, set[float]] = {}
        for event in self.named("loss"):
            found.setdefault(event["iteration"], set()).add(event["loss"])
        assert all(len(values) == 1 for values in found.values()), f"ranks disagree about the loss: {found}"
        return {iteration: values.pop() for iteration, values in sorted(found.items())}

    def named(self, name: str) -> list[dict[str, Any]]:
        return [event for rank in self.events for event in rank if event["event"] == name]

    def strategies(self) -> set[str]:
        """Which packages' strategies were entered, by what they did: `{"mcore_ckpt.save", "mcore_ckpt.load"}`."""
        return {
            f"{event['package']}.{event['event'].partition('.')[2]}"
            for rank in self.events
            for event in rank
            if "Strategy." in event["event"]
        }


def launch(
    side: Side,
    ranks: int,
    arguments: Sequence[str],
    folder: Path,
    environment: Mapping[str, str] | None = None,
    expected_exit: int | None = 0,
    terminated_at: int | None = None,
    tree: Path | None = None,
) -> Launched:
    """Run `torchrun ... [-m mcore_ckpt.launch] pretrain_gpt.py ...` to its end, with `arguments` beside `ARGUMENTS`;
    log and records go to `folder`, which is made. `expected_exit`: None for any but 0; `terminated_at`: iteration after
    which `torchrun` gets SIGTERM, as from a scheduler that takes the host away; `tree`: another checkout than that of
    the environment, or another script.
    """
    folder.mkdir(parents=True)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command += ["-m", "mcore_ckpt.launch"] if side == "ours" else []
    if tree is not None and tree.suffix == ".py":
        command += [str(tree), *arguments]
    else:
        command += [str((tree or megatron_lm()) / "pretrain_gpt.py"), *ARGUMENTS, *arguments]
    # Not the checkout: that is found because the script lies in it, with ours as without.
    megatron = {**os.environ, **(environment or {})}.get("MEGATRON_LM_PATH", "")
    path = [str(SITE), *megatron.split(":"), str(ROOT)]
    variables = {
        **os.environ,
        "PYTHONPATH": ":".join(part for part in path if part),
        "LAUNCH_RECORD": str(folder),
        "OMP_NUM_THREADS": "1",
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        "TORCHDYNAMO_DISABLE": "1",
        **(environment or {}),
    }
    log = folder / "log.txt"
    with log.open("w") as output:
        process = subprocess.Popen(
            command, env=variables, stdout=output, stderr=subprocess.STDOUT, cwd=folder, start_new_session=True
        )
        try:
            if terminated_at is not None:
                deadline_s = time.monotonic() + _DEADLINE_S
                while f"iteration {terminated_at:8d}/" not in log.read_text(errors="replace"):
                    assert process.poll() is None, _tail(log.read_text(errors="replace"))
                    assert time.monotonic() < deadline_s, f"no iteration {terminated_at} in {log}"
                    time.sleep(0.1)
                process.terminate()
            exit_code = process.wait(_DEADLINE_S)
        finally:
            # End whatever is left of the launch: a process group of its own.
            if process.poll() is None:
                process.terminate()  # torchrun ends its ranks
                try:
                    process.wait(20)
                except subprocess.TimeoutExpired:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
    text = log.read_text(errors="replace")
    right = exit_code != 0 if expected_exit is None else exit_code == expected_exit
    assert right, f"{side}: exit code {exit_code}, expected {expected_exit}; the end of its log:\n{_tail(text)}"
    records = [folder / f"rank{rank}.jsonl" for rank in range(ranks)]
    lines = [path.read_text().splitlines() if path.exists() else [] for path in records]
    return Launched(text, [[json.loads(line) for line in told] for told in lines])


def _tail(text: str) -> str:
    return "\n".join(text.splitlines()[-80:])


def tracked_iteration(checkpoints: Path) -> int | None:
    """The iteration that the tracker file names; None where there is no such file."""
    tracker = checkpoints / "latest_checkpointed_iteration.txt"
    return int(tracker.read_text()) if tracker.exists() else None

"""Use the installed package as README.md and docs/usage.md say, in an environment that holds nothing else.

    python installed.py torch|megatron          # in a folder with both, away from the checkout: `scripts/dist.py`

Without megatron-core: the command, plain DCP, the tools. With it: the strategies and the queue, too, on one gloo rank.
"""

from __future__ import annotations

import contextlib
import io
import re
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

# The sections of README.md and docs/usage.md that have snippets, in their order, and whether they need megatron-core.
SECTIONS = {
    "Use": True,
    "Commands": False,
    "Strategies": True,
    "Plain torch.distributed.checkpoint": False,
    "Errors": False,
}
KEY = "decoder.final_layernorm.weight"


def snippets(pages: str) -> dict[str, list[str]]:
    """The blocks of Python in each section.

    Raises:
        ValueError: a section is not one of `SECTIONS`, so that nobody knows what its snippets need.
    """
    found: dict[str, list[str]] = {}
    for section in re.split(r"^## ", pages, flags=re.MULTILINE)[1:]:
        blocks = re.findall(r"^```python\n(.*?)^```", section, flags=re.MULTILINE | re.DOTALL)
        if blocks:
            found[section.splitlines()[0]] = blocks
    if list(found) != list(SECTIONS):
        raise ValueError(f"the pages have snippets in {list(found)}, expected {list(SECTIONS)}")
    return found


def command(*words: str) -> str:
    """Run `mcore-ckpt` as the environment's own script."""
    script = Path(sysconfig.get_path("scripts")) / "mcore-ckpt"
    ended = subprocess.run([str(script), *words], capture_output=True, text=True, timeout=120, check=False)
    if ended.returncode != 0:
        raise SystemExit(f"mcore-ckpt {' '.join(words)}: exit code {ended.returncode}\n{ended.stdout}{ended.stderr}")
    return ended.stdout


def plain_dcp(work: Path, blocks: list[str]) -> None:
    """The snippet saves and loads; what was changed between the two must be back."""
    import torch

    weight = torch.arange(600, dtype=torch.bfloat16).view(20, 30)
    state: dict[str, Any] = {KEY: torch.arange(8.0), "output_layer.weight": weight, "step": 7}
    expected = {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in state.items()}
    (block,) = blocks
    saving, loading = block.split("dcp.load(")
    names: dict[str, Any] = {"state_dict": state, "path": str(work / "dcp")}
    exec(saving, names)
    for value in state.values():
        if isinstance(value, torch.Tensor):
            value.zero_()
    exec("dcp.load(" + loading, names)
    for name, value in expected.items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(state[name], value), name


def errors(work: Path, blocks: list[str]) -> None:
    """A load of what is not there is caught as the snippet says."""
    import torch
    import torch.distributed.checkpoint as dcp

    from mcore_ckpt import FileSystemReader

    state = {KEY: torch.zeros(8)}
    names = {"dcp": dcp, "FileSystemReader": FileSystemReader, "path": work / "gone", "state_dict": state}
    told = io.StringIO()
    with contextlib.redirect_stdout(told):
        for block in blocks:
            exec(block, names)
    assert told.getvalue().startswith("rank 0: "), told.getvalue()


def under_megatron(work: Path, blocks: list[str]) -> None:
    """`install()`, a save through the queue, and the registry; then a load that brings everything back."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    names: dict[str, Any] = {"directory": str(work / "megatron")}
    Path(names["directory"]).mkdir()
    exec(blocks[0], names)
    from megatron.core import dist_checkpointing

    def sharded(tensor: torch.Tensor) -> dict[str, Any]:
        shard = dist_checkpointing.ShardedTensor.from_rank_offsets("weight", tensor, replica_id=0)
        return {"weight": shard, "iteration": 7}

    saved = torch.arange(600, dtype=torch.bfloat16).view(20, 30)
    names["state_dict"] = sharded(saved.clone())
    for block in blocks[1:]:
        exec(block, names)
    assert names["strategy"].__class__.__module__.startswith("mcore_ckpt.")
    loaded = dist_checkpointing.load(sharded(torch.zeros_like(saved)), names["directory"])
    assert torch.equal(loaded["weight"], saved)
    assert loaded["iteration"] == 7
    assert names["mcore_ckpt"].verify_checkpoint(names["directory"]).whole
    names["mcore_ckpt"].uninstall()
    dist.destroy_process_group()


def tools(work: Path, blocks: list[str]) -> None:
    """The command and the functions on the checkpoint of plain DCP."""
    path, target = str(work / "dcp"), str(work / "resharded")
    assert ": valid: " in command("verify", path)
    assert KEY in command("inspect", path, "--tensors")
    import mcore_ckpt

    for block in blocks:
        exec(block, {"mcore_ckpt": mcore_ckpt, "path": path, "target": target})
    assert "identical" in command("diff", path, target)


def main() -> None:
    """All that this environment can do."""
    with_megatron = sys.argv[1] == "megatron"
    import mcore_ckpt

    assert Path(mcore_ckpt.__file__).is_relative_to(sys.prefix), f"not the installed package: {mcore_ckpt.__file__}"
    assert mcore_ckpt.__version__ in command("--version")
    command("--help")
    work = Path.cwd() / "checkpoints"
    work.mkdir()
    blocks = snippets(Path("README.md").read_text() + Path("usage.md").read_text())
    plain_dcp(work, blocks["Plain torch.distributed.checkpoint"])
    errors(work, blocks["Errors"])
    tools(work, blocks["Commands"])
    if with_megatron:
        under_megatron(work, blocks["Use"] + blocks["Strategies"])
    ran = [section for section, needs_megatron in SECTIONS.items() if with_megatron or not needs_megatron]
    print(f"  snippets ran: {', '.join(ran)}", flush=True)
    if with_megatron:
        command("inspect", str(work / "megatron"), "--html", str(work / "report.html"))
        assert "<html" in (work / "report.html").read_text()


if __name__ == "__main__":
    main()

"""An item says of itself which dtype and shape it has: nobody takes it for another one, whichever way it is read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import mcore_ckpt
from mcore_ckpt.commands.cli import main
from mcore_ckpt.core.boxes import Box
from mcore_ckpt.core.errors import CorruptCheckpointError
from mcore_ckpt.dcp.reader import FileSystemReader
from tests.load.test_reshard_property import own_item
from tests.support.stored_layouts import StoredTensor, load_box, stock_item, write_checkpoint

pytestmark = pytest.mark.timeout(60)

ROWS = {"small": 32, "large": 1024}
DISGUISES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "another dtype": lambda tensor: tensor.view(torch.int32),
    "another shape": lambda tensor: tensor.view(tensor.shape[1], tensor.shape[0]),
}


@pytest.mark.parametrize("size", ROWS)
@pytest.mark.parametrize("item_of", [own_item, stock_item])
@pytest.mark.parametrize("disguised", DISGUISES.values(), ids=DISGUISES)
def test_no_item_is_taken_for_another_one(
    disguised: Callable[[torch.Tensor], torch.Tensor],
    item_of: Callable[[torch.Tensor], bytes],
    size: str,
    tmp_path: Path,
) -> None:
    """The last of three chunks has the same bytes as the others, but says that it is something else."""
    rows = ROWS[size]
    tensor = torch.randn(rows, 512).repeat(3, 1)
    written = 0

    def item(part: torch.Tensor) -> bytes:
        nonlocal written
        written += 1
        return item_of(disguised(part) if written == 3 else part)

    boxes = [Box((rows * n, 0), (rows, 512)) for n in range(3)]
    source = tmp_path / "checkpoint"
    write_checkpoint(source, {"w": StoredTensor(tensor, boxes)}, item_of=item)
    third = boxes[2]
    reader = FileSystemReader(source)
    says = r"w at \[\d+, 0\] .*the index says .*float32 of shape"
    assert load_box(reader, "w", tensor, Box((0, 0), (2 * rows, 512))).equal(tensor[: 2 * rows])
    for box in (None, third, Box((2 * rows + 3, 5), (7, 11)), third):
        with pytest.raises(CorruptCheckpointError, match=says):
            load_box(reader, "w", tensor, box)
    with mcore_ckpt.open_checkpoint(source) as opened, pytest.raises(CorruptCheckpointError, match=says):
        opened["w"].raw((slice(2 * rows, None), slice(0, 3)))
    assert main(["reshard", "--tp", "1", "--pp", "1", str(source), str(tmp_path / "copied")]) == 2
    assert not (tmp_path / "copied").exists()


UNUSUAL: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "on the meta device": lambda tensor: tensor.to("meta"),
    "coordinates": torch.Tensor.to_sparse,
    "compressed rows": torch.Tensor.to_sparse_csr,
    "another shape": lambda _: torch.arange(9.0).reshape(3, 3).t(),
    "another dtype": lambda tensor: tensor.double().t().contiguous().t(),
}


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize("kind", UNUSUAL)
def test_a_tensor_without_the_elements_that_the_index_says_is_refused_by_whatever_reads_it(
    kind: str, tmp_path: Path
) -> None:
    tensor = torch.arange(6.0).reshape(2, 3)
    write_checkpoint(
        tmp_path,
        {"w": StoredTensor(tensor, [Box((0, 0), (2, 3))])},
        item_of=lambda part: stock_item(UNUSUAL[kind](part)),
    )
    with pytest.raises(CorruptCheckpointError, match=r"w at \[0, 0\]"):
        load_box(FileSystemReader(tmp_path), "w", tensor, None)
    with mcore_ckpt.open_checkpoint(tmp_path) as opened, pytest.raises(CorruptCheckpointError, match=r"w at \[0, 0\]"):
        opened["w"].raw((slice(0, 1), slice(0, 3)))
    assert [problem.fqn for problem in mcore_ckpt.verify_checkpoint(tmp_path).problems] == ["w"]

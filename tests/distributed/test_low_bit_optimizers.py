"""Optimizers with 8-bit and 4-bit states on shards: losses of plain PyTorch on one process, and states in other layouts."""

from typing import Any

import pytest
import torch

from headway.planning.plan import plan
from tests.distributed.low_bit import (
    MAKERS,
    SAVED_AT,
    Large,
    compute_loss,
    count_saved_bytes,
    load_state_of_one_process,
    load_state_of_other_package,
    override_embedding,
    round_with_own_seeds,
    run_and_resume,
    run_by_hand,
    run_on_one_process,
    run_prepared,
)
from tests.distributed.ranks import run_ranks

TORCHAO = [name for name in MAKERS if name.startswith("torchao")]
BITSANDBYTES = [name for name in MAKERS if name.startswith("bitsandbytes")]
CLOSE = 1e-3
"""Relative tolerance if blocks coincide. A gradient's rounding difference can change a code, which changes a value by 0.7%."""
BLOCKS_DIFFER = {"torchao AdamW4bit": 5e-2, "torchao Adam4bit": 5e-2}
"""Relative tolerances if a shard's blocks differ from those of the whole tensor, by quantization step. Others: 5e-3.

Neighboring levels of signed values differ by up to 0.23 of a block's scale in 4 bits, and by 0.014 in 8 bits.
"""


def compare(found: Any, expected: Any, has_same_blocks: bool) -> None:
    for name, each in found.items():
        expected_losses = expected[name]["losses"][-len(each["losses"]) :]
        close = CLOSE if has_same_blocks else BLOCKS_DIFFER.get(name, 5e-3)
        assert each["losses"] == pytest.approx(expected_losses, rel=close), name
        assert expected_losses[0] > 1.1 * expected_losses[-1], name


def check_layout(layout: str, num_ranks: int, names: list[str], model: str, folder: str) -> list[Any]:
    """Compare a layout with one process, and check exact resuming in it and resuming on one process. Return its results."""
    ran = run_ranks(run_and_resume, num_ranks, layout, names, model, folder, timeout=550)
    ((by_hand, elsewhere),) = run_ranks(run_on_one_process, 1, names, model, folder, timeout=550)
    for first, resumed in ran:
        compare(first, by_hand, has_same_blocks=model == "even")
        for name in names:
            assert resumed[name]["losses"] == first[name]["losses"][SAVED_AT:], name
            assert resumed[name]["sum"] == first[name]["sum"], name
    compare(elsewhere, by_hand, has_same_blocks=model == "even")
    return [first for first, _ in ran]


def test_torchao_on_two_ranks_equals_one_process_and_resumes(tmp_path):
    pytest.importorskip("torchao.optim", reason="torchao is not installed")
    names = ["AdamW", "torchao AdamW8bit", "torchao AdamW4bit", "torchao AdamWFp8"]
    for found in check_layout("fsdp", 2, names, "even", str(tmp_path)):
        num_bytes = [found[name]["bytes"] / found["AdamW"]["bytes"] for name in names]
        assert num_bytes[1] < 0.28
        assert num_bytes[2] < 0.15


PLANNED = {
    "torchao AdamW8bit": "adamw8bit", "torchao AdamW4bit": "adamw4bit", "torchao AdamWFp8": "adamwfp8",
    "bitsandbytes AdamW8bit": "adamw8bit_bnb",
}  # fmt: skip
"""Name of each optimizer in a plan."""


@pytest.mark.parametrize(("layout", "num_ranks"), [("ddp", 1), ("fsdp", 2)])
def test_a_checkpoint_is_as_large_as_planned(tmp_path, layout, num_ranks):
    """Checkpoints contain low-bit states as float32 values, which do not depend on quantization blocks."""
    pytest.importorskip("torchao.optim", reason="torchao is not installed")
    pytest.importorskip("bitsandbytes.optim", reason="bitsandbytes is not installed")
    real = run_ranks(count_saved_bytes, num_ranks, layout, list(PLANNED), str(tmp_path), timeout=250)[0]
    for name, num_bytes in real.items():
        planned = plan(Large, layout, num_ranks, step=lambda model: compute_loss(model, 0), optimizer=PLANNED[name])
        assert planned.saved.num_bytes == pytest.approx(num_bytes, rel=0.01), name
        # In memory, the state stays in few bits.
        assert planned.rank0.optimizer_state < 0.3 * 8 * planned.num_parameters / num_ranks


@pytest.mark.slow
def test_replicas_on_two_ranks_equal_one_process_and_resume(tmp_path):
    pytest.importorskip("torchao.optim", reason="torchao is not installed")
    pytest.importorskip("bitsandbytes.optim", reason="bitsandbytes is not installed")
    check_layout("ddp", 2, [*PLANNED], "odd", str(tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize("package", ["torchao", "bitsandbytes"])
def test_blocks_that_cross_shards(tmp_path, package):
    pytest.importorskip(f"{package}.optim", reason=f"{package} is not installed")
    check_layout("fsdp", 2, TORCHAO if package == "torchao" else BITSANDBYTES, "odd", str(tmp_path))


@pytest.mark.slow
def test_state_of_one_process_loads_and_state_of_another_package_is_refused(tmp_path):
    pytest.importorskip("torchao.optim", reason="torchao is not installed")
    pytest.importorskip("bitsandbytes.optim", reason="bitsandbytes is not installed")
    for by_hand, prepared in zip(*[iter(run_ranks(load_state_of_one_process, 2, "fsdp", timeout=250)[1])] * 2):
        assert prepared == pytest.approx(by_hand, rel=CLOSE)
    (error,) = run_ranks(load_state_of_other_package, 1, str(tmp_path), timeout=250)
    assert "the saved one was made by bitsandbytes" in error
    assert run_ranks(override_embedding, 2, "fsdp", timeout=250)[1] == [torch.float32, torch.uint8]


@pytest.mark.matrix
@pytest.mark.parametrize("layout", ["ddp", "fsdp"])
def test_stochastic_rounding_keeps_replicas_equal(layout):
    pytest.importorskip("torchao.optim", reason="torchao is not installed")
    one, other = run_ranks(round_with_own_seeds, 2, layout, timeout=250)
    assert len(set(one)) == 4
    assert (one == other) == (layout == "ddp")


@pytest.mark.matrix
def test_four_rank_layouts_continue_checkpoints_of_other_layouts(tmp_path):
    pytest.importorskip("torchao.optim", reason="torchao is not installed")
    pytest.importorskip("bitsandbytes.optim", reason="bitsandbytes is not installed")
    names = ["torchao AdamW8bit", "torchao AdamW4bit", "torchao AdamWFp8", "bitsandbytes AdamW8bit"]
    saved = {"fsdp": str(tmp_path / "fsdp"), "ddp": str(tmp_path / "ddp")}
    (one_process,) = run_ranks(run_prepared, 1, "ddp", names, "even", saved["ddp"], timeout=550)
    (by_hand,) = run_ranks(run_by_hand, 1, names, "even", timeout=550)
    compare(one_process, by_hand, has_same_blocks=True)
    run_ranks(run_prepared, 2, "fsdp", names, "even", saved["fsdp"], timeout=550)
    for found in run_ranks(run_prepared, 4, "fsdp", names, "even", "", saved["fsdp"], timeout=550):
        compare(found, by_hand, has_same_blocks=True)
    for found in run_ranks(run_prepared, 4, "fsdp+tp=2", names, "even", "", saved["ddp"], timeout=550):
        compare(found, by_hand, has_same_blocks=False)
    for found in run_ranks(run_prepared, 4, "hsdp=2", names, "even", "", saved["fsdp"], timeout=550):
        compare(found, by_hand, has_same_blocks=True)

"""A run saved under a pipeline goes on under other layouts, and the other way round, as if it had never been stopped."""

from pathlib import Path

import pytest

from tests.distributed.ranks import run_ranks
from tests.distributed.test_layout_checkpoints import STOP, UPDATES, train

pytest.importorskip("transformers", reason="the model is a transformers Llama, whose head is its embedding")


def save_and_load(folder, saved, loaded):
    """Saves under some layouts, then the losses from each saved state on under others."""
    for layout, is_behind in saved:
        train(layout, save=str(Path(folder, layout)), is_behind=is_behind)
    return {(source, layout): train(layout, load=str(Path(folder, source)))[0] for source, layout in loaded}


def test_pipelines_and_other_layouts_go_on_from_each_other(tmp_path):
    whole, _ = train("ddp")
    assert len(whole) == UPDATES
    assert max(whole) - min(whole) > 0.1  # it learns
    train("ddp", save=str(tmp_path / "single"))
    found = run_ranks(
        save_and_load, 2, str(tmp_path),
        (("fsdp", False), ("pp", True)),
        (("single", "pp"), ("fsdp", "pp"), ("pp", "fsdp"), ("pp", "ddp")),
        timeout=250,
    )  # fmt: skip
    found.append({("pp", "single"): train("ddp", load=str(tmp_path / "pp"))[0]})
    for curves in found:
        for (before, after), losses in curves.items():
            differences = [abs(one - other) for one, other in zip(losses, whole[STOP:], strict=True)]
            assert max(differences) < 2e-5, (before, after, losses, whole)

"""Parameter groups in every layout have the losses and learning rates of plain PyTorch, even after a resume in another layout.

Each program of `tests/distributed/parameter_groups.py` is saved after ten updates in one layout and continues in another.
"""

from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.distributed.parameter_groups import (
    PROGRAMS,
    STOP,
    Results,
    check_results,
    run_by_hand,
    run_prepared,
)
from tests.distributed.ranks import run_ranks
from tests.distributed.scenarios import capture_warnings

UNTRAINED = "no optimizer updates them"
QUICK = ("layers", "two optimizers", "helper", "unfrozen later", "frozen for a while")
REST = ("named", "decay, late", "two optimizers, late", "helper, late", "added", "finder", "finder, checkpoint")
UNFREEZING = ("unfrozen, added", "unfrozen, all in")
"""Programs that unfreeze parameters frozen in `prepare`. With DDP, this is an error."""


def run_programs(
    layouts: Sequence[str], names: Sequence[str], kind: str, folder: str
) -> dict[tuple[str, str], tuple[Results, Results]]:
    """Run each program in each layout until it is saved, and continue in the next layout of the list."""
    found = {}
    for name in names:
        first = []
        for layout in layouts:
            with capture_warnings() as warnings:
                first.append(run_prepared(PROGRAMS[name], kind, layout, f"{folder}/{name} {layout}"))
            first[-1].warnings = list(warnings)
        for number, layout in enumerate(layouts):
            target = layouts[(number + 1) % len(layouts)]
            place = f"{folder}/{name} {layout}"
            found[name, layout] = (
                first[number],
                run_prepared(PROGRAMS[name], kind, target, f"{place} again", load=place),
            )
    return found


def check_programs(
    num_ranks: int, layouts: Sequence[str], names: Sequence[str], folder: Path, kind: str = "gpt"
) -> None:
    found = run_ranks(run_programs, num_ranks, layouts, names, kind, str(folder), timeout=400)[0]
    for name in names:
        expected = run_by_hand(PROGRAMS[name], kind)
        for layout in layouts:
            first, resumed = found[name, layout]
            check_results(first, expected, 0)
            check_results(resumed, expected, STOP)
            assert any(UNTRAINED in line for line in first.warnings) == (name == "added")


def test_groups_match_plain_pytorch(tmp_path: Path) -> None:
    check_programs(2, ("ddp", "fsdp"), QUICK, tmp_path)


@pytest.mark.slow
def test_groups_on_stages_and_split_layers(tmp_path: Path) -> None:
    check_programs(2, ("pp", "tp"), QUICK, tmp_path)


@pytest.mark.matrix
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("num_ranks", "layouts", "names", "kind"),
    [
        (1, ("ddp", "fsdp"), (*QUICK, *REST, *UNFREEZING), "gpt"),
        (2, ("ddp", "fsdp"), REST, "gpt"),
        (2, ("fsdp", "tp"), (*UNFREEZING, "two optimizers", "finder"), "gpt"),
        (4, ("hsdp=2", "fsdp+tp=2"), QUICK, "gpt"),
        (2, ("ep", "fsdp"), QUICK, "moe"),
    ],
)
def test_all_programs(
    num_ranks: int, layouts: tuple[str, ...], names: tuple[str, ...], kind: str, tmp_path: Path
) -> None:
    check_programs(num_ranks, layouts, names, tmp_path, kind)


# ---------------------------------------------------------------- resuming with other groups


def change_groups(layouts: Sequence[str], changes: Sequence[tuple[str, str]], folder: str) -> list[list[Results]]:
    """Save each pair's first program in each layout, and continue with its second program in the next layout."""
    found = []
    for before, after in changes:
        for layout in layouts:
            run_prepared(PROGRAMS[before], "gpt", layout, f"{folder}/{before} to {after} {layout}")
        options = {"changed": "groups"} if "reversed" not in after else {}
        found.append(
            [
                run_prepared(
                    PROGRAMS[after],
                    "gpt",
                    layouts[(number + 1) % len(layouts)],
                    f"{folder}/again",
                    load=f"{folder}/{before} to {after} {layout}",
                    options=options,
                )
                for number, layout in enumerate(layouts)
            ]
        )
    return found


def check_changes(num_ranks: int, layouts: Sequence[str], changes: Sequence[tuple[str, str]], folder: Path) -> None:
    for (before, after), each in zip(
        changes, run_ranks(change_groups, num_ranks, layouts, changes, str(folder), timeout=400)[0]
    ):
        expected = run_by_hand(PROGRAMS[before], "gpt", changed=PROGRAMS[after])
        for found in each:
            check_results(found, expected, STOP)
            assert any("optimizer 0 (AdamW)" in line for line in found.differences)


def test_resume_with_other_groups_finds_the_states(tmp_path: Path) -> None:
    check_changes(2, ("fsdp", "ddp"), [("one group", "layers"), ("decay", "decay, reversed")], tmp_path)


@pytest.mark.matrix
@pytest.mark.parametrize(("num_ranks", "layouts"), [(2, ("pp", "tp")), (4, ("hsdp=2", "fsdp+tp=2"))])
def test_resume_with_other_groups_in_other_layouts(num_ranks: int, layouts: tuple[str, ...], tmp_path: Path) -> None:
    check_changes(num_ranks, layouts, [("decay", "named"), ("decay", "decay, reversed")], tmp_path)

"""The table: all mistakes, by the kind of thing that they are made with."""

from tests.wrong_use import loading, losses, models, one_rank, preparing, saving, the_loop

SECTIONS = [
    the_loop.section,
    losses.section,
    preparing.section,
    models.section,
    loading.section,
    one_rank.section,
    saving.section,
]
ROWS = {row.name: row for section in SECTIONS for row in section.rows}


def cells(name: str, *layouts: str) -> list[str]:
    """The row's cells in these layouts, or in all."""
    return [f"{name}-{layout}" for layout in layouts or ROWS[name].cells]


PENDING = {
    *cells("forward", "ddp"),
    *cells("submodules", "ddp"),
    *cells("optimizer_left_out_without_windows", "fsdp", "tp"),
    *cells("drawn_after", "ddp"),
    *cells("changed_on_one", "ddp"),
    *cells("data_replaced", "fsdp", "tp"),
    *cells("hook_before", "fsdp", "tp"),
    *cells("hook_after", "fsdp"),
    *cells("norm_by_hand", "fsdp", "tp"),
    *cells("load_alone", "ddp"),
    *cells("loss_backward"),
    *cells("loss_backward_without_windows"),
    *cells("not_a_number"),
    *cells("retain_graph", "ddp"),
    *cells("l1_apart", "ddp"),
}
"""Cells that are mended on another branch."""

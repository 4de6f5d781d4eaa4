"""The table: all mistakes, by the kind of thing that they are made with."""

from tests.wrong_use import losses, saving, the_loop

SECTIONS = [the_loop.section, losses.section, saving.section]
ROWS = {row.name: row for section in SECTIONS for row in section.rows}


def cells(name: str, *layouts: str) -> list[str]:
    """The row's cells in these layouts, or in all."""
    return [f"{name}-{layout}" for layout in layouts or ROWS[name].cells]


PENDING = {
    *cells("load_alone", "ddp"),
    *cells("loss_backward"),
    *cells("loss_backward_without_windows"),
    *cells("zero_grad_between"),
    *cells("model_zero_grad", "single", "ddp", "tp"),
    *cells("step_by_another_count"),
    *cells("no_step"),
    *cells("window_in_one_block"),
    *cells("loop_in_one_block"),
    *cells("divided"),
    *cells("multiplied", "ddp", "fsdp", "tp"),
    *cells("not_a_number"),
    *cells("retain_graph", "ddp"),
    *cells("l1_apart", "ddp"),
}
"""Cells that are mended on another branch."""

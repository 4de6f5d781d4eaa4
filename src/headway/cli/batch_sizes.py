"""`headway batch-sizes`: what searches for the largest batch size remember, and forgetting it."""

from pathlib import Path

import click

from headway import env
from headway.cli.options import GroupedCommand, GroupedOption
from headway.memory import remembered


@click.command(
    "batch-sizes",
    cls=GroupedCommand,
    params=[
        GroupedOption(["--file"], group="Input", type=click.Path(path_type=Path), help="Another file than the usual one."),
        GroupedOption(["--clear"], group="Output", is_flag=True, help="Remove the file, so that searches start from scratch."),
    ],
    help="Print the batch sizes that find_executable_batch_size(search='largest') remembers.",
)  # fmt: skip
def command(file: Path | None, clear: bool) -> None:
    """Print or remove the entries."""
    path = file or remembered.default_path(env.snapshot())
    if clear:
        click.echo(f"{path}: {remembered.clear(path)} batch sizes forgotten")
        return
    entries = remembered.read(path)
    click.echo(f"{path}: {len(entries) or 'no'} batch sizes")
    for entry in entries.values():
        known, seen = entry["circumstances"], entry["seen"]
        click.echo(f"  {entry['batch_size']}  {known['function']} on {known['device']}")
        for name, value in seen.items():
            click.echo(f"      {name}: {value}")

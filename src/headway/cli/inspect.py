"""`headway inspect`: what a checkpoint holds, read from its manifest; nothing in it is executed."""

from math import prod
from pathlib import Path

import click

from headway.checkpoint.format.foreign import checkpoints_in, explain
from headway.checkpoint.format.manifest import ITEM_BYTES, MANIFEST, TITLE, Manifest, read_manifest
from headway.cli.options import PLACE, GroupedCommand, option
from headway.common.text import format_bytes
from headway.common.untrusted import printable
from headway.errors import CheckpointError, ConfigError


@click.command(
    "inspect",
    cls=GroupedCommand,
    params=[
        click.Argument(["checkpoint"], type=PLACE),
        option("--tensors", None, "Output", "List every tensor with its shape and dtype."),
        option("--verify", None, "Output", "Read every byte and compare it with its hash."),
    ],
    help="Print the contents of CHECKPOINT (a folder or URL that save_state wrote), or list the checkpoints in a folder.",
)
def command(checkpoint: Path, tensors: bool, verify: bool) -> None:
    """Read the manifest and print it."""
    parent = next((each for each in (checkpoint, checkpoint / "checkpoints") if checkpoints_in(each)), None)
    if parent is not None and not (checkpoint / MANIFEST).exists():
        if verify or tensors:
            raise ConfigError(explain(checkpoint))
        for line in listing(parent):
            click.echo(printable(line))
        return
    manifest = read_manifest(checkpoint)
    if verify:
        from headway.checkpoint.loading.files import verify as read_everything

        read_everything(checkpoint, manifest)
    for line in summary(manifest):
        click.echo(printable(line))
    if tensors:
        for name, entry in manifest.tensors.items():
            click.echo(printable(f"  {name}  {entry.dtype} {list(entry.shape)}"))
        for name, target in manifest.aliases.items():
            click.echo(printable(f"  {name}  tied to {target}"))
    if verify:
        click.echo(f"verified: all {len(manifest.files)} files are as they were written, by their {TITLE}")


def listing(parent: Path) -> list[str]:
    """The checkpoints in a folder, a line each, newest first."""
    names = checkpoints_in(parent)
    lines = [f"{parent} holds {len(names)} checkpoint{'s' if len(names) > 1 else ''}, the newest first:"]
    width = max(map(len, names))
    for name in names:
        try:
            manifest = read_manifest(parent / name)
            about = manifest.about
            said = f"after {about.get('num_updates')} updates, epoch {about.get('epoch')}, {format_bytes(manifest.num_bytes())}"
            said += f", saved {about['saved_at']}" if "saved_at" in about else ""
        except CheckpointError as error:
            said = f"damaged: {error}"
        lines.append(f"  {name:{width}}  {said}")
    return [*lines, f"for one of them: headway inspect {parent / names[0]}"]


def summary(manifest: Manifest) -> list[str]:
    """The manifest in a few lines."""
    about = dict(manifest.about)
    versions = about.pop("versions", {})
    lines = [f"{name.replace('_', ' ')}: {value}" for name, value in about.items() if value is not None]
    if isinstance(versions, dict):
        lines.append("written by: " + ", ".join(f"{name} {value}" for name, value in versions.items()))
    kinds: dict[str, list[int]] = {}
    for name, entry in manifest.tensors.items():
        total = kinds.setdefault("/".join(name.split("/")[:2]), [0, 0, 0])
        count = prod(entry.shape)
        for index, amount in enumerate((1, count, count * ITEM_BYTES[entry.dtype])):
            total[index] += amount
    width = max(map(len, kinds), default=0)
    for kind, (num, values, size) in kinds.items():
        lines.append(f"{kind:{width}}  {num} tensor{'s' if num > 1 else ''}, {values:,} values, {format_bytes(size)}")
    lines.append(f"{len(manifest.files)} files, {format_bytes(manifest.num_bytes())}, each with its {TITLE}")
    return lines

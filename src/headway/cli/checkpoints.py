"""`headway inspect`: what a checkpoint holds; `headway merge`: its weights as safetensors or torch.distributed.checkpoint files.

Inspecting reads the manifest, and nothing in a checkpoint is executed. Merged weights have the bare module's names.
"""

import logging
import os
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import Any

import click

from headway.checkpoint.format.foreign import checkpoints_in, explain
from headway.checkpoint.format.manifest import ITEM_BYTES, MANIFEST, TITLE, Manifest, read_manifest
from headway.cli.options import PLACE, GroupedCommand, option, show_progress
from headway.common.object_path import ObjectPath
from headway.common.text import format_bytes
from headway.common.untrusted import printable
from headway.errors import CheckpointError, ConfigError

logger = logging.getLogger(__name__)

_WEIGHTS = (
    "*.distcp",
    "*.safetensors",
    "*.safetensors.index.json",
    "pytorch_model*.bin",
    "pytorch_model.bin.index.json",
)
"""Names of files of weights."""
_CUT = "Cut into files of at most this size."
_AS = "safetensors, or dcp (torch.distributed.checkpoint)."
_BESIDE = "Copy config.json, tokenizer files and the like from FOLDER instead of CHECKPOINT."


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
def inspect(checkpoint: Path, tensors: bool, verify: bool) -> None:
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


@click.command(
    "merge",
    cls=GroupedCommand,
    params=[
        click.Argument(["checkpoint"], type=PLACE),
        click.Argument(["output"], type=PLACE),
        option("--model", "N", "Output", "Which of several prepared models.", int, default=0, show_default=True),
        option("--max_shard_size", "SIZE", "Output", _CUT, default="10GB", show_default=True),
        option("--overwrite", None, "Output", "Replace weights that OUTPUT already holds."),
        option("--to", "FORMAT", "Output", _AS, ("safetensors", "dcp"), default="safetensors"),
        option("--config", "FOLDER", "Output", _BESIDE, click.Path(path_type=Path)),
    ],
    help="Write the weights in CHECKPOINT (or a folder written by torch.distributed.checkpoint) to the folder OUTPUT as "
    "model.safetensors, or as shards with an index.",
)
def merge(
    checkpoint: Path, output: Path, model: int, max_shard_size: str, overwrite: bool, to: str, config: Path | None
) -> None:
    """Verify the checkpoint, then write its weights, and what describes them."""
    here = None if isinstance(checkpoint, ObjectPath) else checkpoint
    is_foreign = here is not None and not os.path.exists(here / MANIFEST) and os.path.isfile(here / ".metadata")
    manifest = None if is_foreign else read_manifest(checkpoint)
    check_output(output, overwrite)
    if config is not None and not config.is_dir():
        raise ConfigError(f"--config {config} is not a folder; give the one that holds config.json")
    from headway.checkpoint import folders
    from headway.checkpoint.loading import dcp
    from headway.weights.export import copy_files, save_weights

    show_progress()
    named = dcp.read_folder(checkpoint) if manifest is None else _named(checkpoint, manifest, model)
    try:
        paths = dcp.write_folder(named, output) if to == "dcp" else save_weights(named, output, max_shard_size)
        paths += copy_files(config or folders.store_of(checkpoint).contents(), output)
    except (OSError, UnicodeError) as error:
        raise CheckpointError(f"the weights cannot be written to {output}: {error}") from error
    for path in paths:
        click.echo(path)


def _named(checkpoint: Path, manifest: Manifest, model: int) -> Iterator[tuple[str, Any]]:
    """The tensors of one model of a verified checkpoint."""
    prefix = f"model/{model}/"
    if not any(name.startswith(prefix) for name in manifest.tensors):
        numbers = {name.split("/")[1] for name in manifest.tensors if name.startswith("model/")}
        present = sorted(numbers, key=lambda number: (len(number), number))
        raise ConfigError(f"--model {model}: {checkpoint} holds the models {printable(', '.join(present)) or 'none'}")
    from headway.checkpoint import folders
    from headway.checkpoint.loading.files import open_tensors, verify

    if not folders.store_of(checkpoint).verifies_on_read:  # of which what is read is compared as it comes
        logger.info("verifying %s", checkpoint)
        verify(checkpoint, manifest)
    return ((name[len(prefix) :], tensor) for name, tensor in open_tensors(checkpoint, manifest, prefix))


def check_output(output: Path, may_overwrite: bool) -> None:
    """Refuse to write over anything unasked; other files in the folder stay as they are.

    Raises:
        ConfigError: `output` is a file, a checkpoint, or holds weights.
    """
    if isinstance(output, ObjectPath):
        raise ConfigError(f"OUTPUT {output} is a URL; give a folder for the weights")
    there = next(each for each in (output, *output.absolute().parents) if os.path.lexists(each))
    if not os.path.isdir(there):
        raise ConfigError(f"OUTPUT {there} is not a folder; give a folder for the weights, which is created if missing")
    if os.path.exists(output / MANIFEST):
        raise ConfigError(f"OUTPUT {output} is a checkpoint; give another folder for the weights")
    found = output if os.path.isdir(output) else None  # else it is made, or cannot be
    present = sorted(path.name for pattern in _WEIGHTS for path in (found.glob(pattern) if found else ()))
    if present and not may_overwrite:
        raise ConfigError(
            f"OUTPUT {output} holds weights already ({', '.join(present[:3])}); give another folder, or --overwrite to replace them"
        )

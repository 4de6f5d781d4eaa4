"""`headway inspect` prints a checkpoint's content, and `headway merge` exports its weights for other programs.

`inspect` reads only the manifest, and with `--verify` all files. Nothing in a checkpoint is executed. `merge` writes
safetensors or the format of torch.distributed.checkpoint, under the names of the model without wrappers.
"""

import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import click

from headway.cli.options import PLACE, GroupedCommand, LocalPath, make_option
from headway.cli.progress import show_progress
from headway.common.object_path import ObjectPath
from headway.common.text import format_bytes
from headway.common.untrusted import escape_text
from headway.core.checkpoint.format.foreign import explain_path, list_checkpoint_names
from headway.core.checkpoint.format.manifest import ITEM_BYTES, MANIFEST, TITLE, Manifest, read_manifest
from headway.errors import CheckpointError, ConfigError

logger = logging.getLogger(__name__)

_WEIGHT_FILE_PATTERNS = (
    "*.distcp",
    "*.safetensors",
    "*.safetensors.index.json",
    "pytorch_model*.bin",
    "pytorch_model.bin.index.json",
)
"""Glob patterns that match the names of weight files."""
_MAX_SHARD_SIZE_HELP = "Cut into files of at most this size."
_TO_HELP = "safetensors, or dcp (torch.distributed.checkpoint)."
_CONFIG_HELP = "Copy config.json, tokenizer files and the like from FOLDER instead of CHECKPOINT."


@click.command(
    "inspect",
    cls=GroupedCommand,
    params=[
        click.Argument(["checkpoint"], type=PLACE),
        make_option("--tensors", None, "Output", "List every tensor with its shape and dtype."),
        make_option("--verify", None, "Output", "Read every byte and compare it with its hash."),
    ],
    help="Print the contents of CHECKPOINT (a folder or URL that save_state wrote), or list the checkpoints in a folder.",
)
def inspect(checkpoint: Path, tensors: bool, verify: bool) -> None:
    """Print the content of a checkpoint's manifest, or list the checkpoints in a folder.

    Args:
        checkpoint: Folder or URL of a checkpoint or of a run, or a folder that contains checkpoints.
        tensors: Whether to also print the shape and dtype of each tensor.
        verify: Whether to read all files of the checkpoint and compare them with their hashes.

    Raises:
        CheckpointError: If the checkpoint is damaged or there is none.
        ConfigError: If `tensors` or `verify` is set for a folder that contains checkpoints.
    """
    parent = next((each for each in (checkpoint, checkpoint / "checkpoints") if list_checkpoint_names(each)), None)
    if parent is not None and not (checkpoint / MANIFEST).exists():
        if verify or tensors:
            raise ConfigError(explain_path(checkpoint))
        for line in format_listing(parent):
            click.echo(escape_text(line))
        return
    manifest = read_manifest(checkpoint)
    if verify:
        from headway.core.checkpoint.loading.files import verify_checkpoint

        verify_checkpoint(checkpoint, manifest)
    for line in format_summary(manifest):
        click.echo(escape_text(line))
    if tensors:
        for name, entry in manifest.tensors.items():
            click.echo(escape_text(f"  {name}  {entry.dtype} {list(entry.shape)}"))
        for name, target in manifest.aliases.items():
            click.echo(escape_text(f"  {name}  tied to {target}"))
    if verify:
        click.echo(f"verified: all {len(manifest.files)} files are as they were written, by their {TITLE}")


def format_listing(parent: Path) -> list[str]:
    """Return lines of text that list the checkpoints in a folder, newest first. For a damaged one, show the error.

    The folder must contain at least one checkpoint.
    """
    names = list_checkpoint_names(parent)
    lines = [f"{parent} holds {len(names)} checkpoint{'s' if len(names) > 1 else ''}, the newest first:"]
    width = max(map(len, names))
    for name in names:
        try:
            manifest = read_manifest(parent / name)
            run_facts = manifest.about
            size = format_bytes(manifest.num_bytes())
            description = f"after {run_facts.get('num_updates')} updates, epoch {run_facts.get('epoch')}, {size}"
            description += f", saved {run_facts['saved_at']}" if "saved_at" in run_facts else ""
        except CheckpointError as error:
            description = f"damaged: {error}"
        lines.append(f"  {name:{width}}  {description}")
    return [*lines, f"for one of them: headway inspect {parent / names[0]}"]


@dataclass
class _TensorTotals:
    """Number of tensors of one object in a checkpoint, such as a model, and their total size."""

    num_tensors: int = 0
    num_values: int = 0
    num_bytes: int = 0


def format_summary(manifest: Manifest) -> list[str]:
    """Return lines of text that summarize a checkpoint's manifest."""
    run_facts = dict(manifest.about)
    versions = run_facts.pop("versions", {})
    lines = [f"{name.replace('_', ' ')}: {value}" for name, value in run_facts.items() if value is not None]
    if isinstance(versions, dict):
        lines.append("written by: " + ", ".join(f"{name} {value}" for name, value in versions.items()))
    totals: dict[str, _TensorTotals] = {}
    for name, entry in manifest.tensors.items():
        owner = "/".join(name.split("/")[:2])  # such as "model/0" for "model/0/layer.weight"
        total = totals.setdefault(owner, _TensorTotals())
        num_values = prod(entry.shape)
        total.num_tensors += 1
        total.num_values += num_values
        total.num_bytes += num_values * ITEM_BYTES[entry.dtype]
    width = max(map(len, totals), default=0)
    for owner, total in totals.items():
        plural = "s" if total.num_tensors > 1 else ""
        sizes = f"{total.num_tensors} tensor{plural}, {total.num_values:,} values, {format_bytes(total.num_bytes)}"
        lines.append(f"{owner:{width}}  {sizes}")
    lines.append(f"{len(manifest.files)} files, {format_bytes(manifest.num_bytes())}, each with its {TITLE}")
    return lines


@click.command(
    "merge",
    cls=GroupedCommand,
    params=[
        click.Argument(["checkpoint"], type=PLACE),
        click.Argument(["output"], type=PLACE),
        make_option("--model", "N", "Output", "Which of several prepared models.", int, default=0, show_default=True),
        make_option("--max_shard_size", "SIZE", "Output", _MAX_SHARD_SIZE_HELP, default="10GB", show_default=True),
        make_option("--overwrite", None, "Output", "Replace weights that OUTPUT already contains."),
        make_option("--to", "FORMAT", "Output", _TO_HELP, ("safetensors", "dcp"), default="safetensors"),
        make_option("--config", "FOLDER", "Output", _CONFIG_HELP, LocalPath(path_type=Path)),
    ],
    help="Write the weights in CHECKPOINT (or a folder written by torch.distributed.checkpoint) to the folder OUTPUT as "
    "model.safetensors, or as shards with an index.",
)
def merge(
    checkpoint: Path, output: Path, model: int, max_shard_size: str, overwrite: bool, to: str, config: Path | None
) -> None:
    """Write a checkpoint's weights to a folder, with the files that describe the model, such as its config.

    The weights are compared with their hashes. A folder that torch.distributed.checkpoint wrote has no hashes.

    Args:
        checkpoint: Folder or URL of the checkpoint, or a folder that torch.distributed.checkpoint wrote.
        output: Folder for the weights.
        model: Index of the model in a checkpoint with several models.
        max_shard_size: Maximum size of a safetensors file, such as "10GB".
        overwrite: Whether weights in `output` may be replaced.
        to: "safetensors" or "dcp".
        config: Folder whose config and tokenizer files are copied. None: those in the checkpoint.

    Raises:
        CheckpointError: If the checkpoint is missing or damaged, or the weights cannot be written.
        ConfigError: If `output` cannot be used, `config` is not a folder, or there is no such model.
    """
    local_folder = None if isinstance(checkpoint, ObjectPath) else checkpoint
    is_dcp = (
        local_folder is not None
        and not os.path.exists(local_folder / MANIFEST)
        and os.path.isfile(local_folder / ".metadata")
    )
    manifest = None if is_dcp else read_manifest(checkpoint)
    check_output(output, overwrite)
    if config is not None and not config.is_dir():
        raise ConfigError(f"--config {config} is not a folder; give the one that contains config.json")
    from headway.core.checkpoint import folders
    from headway.core.checkpoint.loading import dcp
    from headway.core.weights.compiled import remove_compiled_levels
    from headway.core.weights.export import copy_files, save_weights

    show_progress()
    named_tensors = (
        dcp.read_folder(checkpoint) if manifest is None else _open_model_tensors(checkpoint, manifest, model)
    )
    renamed_tensors = ((remove_compiled_levels(name), tensor) for name, tensor in named_tensors)
    try:
        paths = (
            dcp.write_folder(renamed_tensors, output)
            if to == "dcp"
            else save_weights(renamed_tensors, output, max_shard_size)
        )
        paths += copy_files(config or folders.find_store(checkpoint).get_content_folder(), output)
    except (OSError, UnicodeError) as error:
        raise CheckpointError(f"the weights cannot be written to {output}: {error}") from error
    for path in paths:
        click.echo(path)


def _open_model_tensors(checkpoint: Path, manifest: Manifest, model: int) -> Iterator[tuple[str, Any]]:
    """Return an iterator over pairs of (name, tensor) for one model of a checkpoint.

    If the checkpoint's store does not verify data while reading it, the entire checkpoint is verified first.

    Args:
        checkpoint: Folder of the checkpoint.
        manifest: Manifest of the checkpoint.
        model: Index of the model.

    Raises:
        CheckpointError: If the verification fails.
        ConfigError: If the checkpoint contains no weights of a model with this index.
    """
    prefix = f"model/{model}/"
    if not any(name.startswith(prefix) for name in manifest.tensors):
        names = {name.split("/")[1] for name in manifest.tensors if name.startswith("model/")}
        indices = sorted(names, key=lambda number: (len(number), number))
        raise ConfigError(
            f"--model {model}: {checkpoint} contains the models {escape_text(', '.join(indices)) or 'none'}"
        )
    from headway.core.checkpoint import folders
    from headway.core.checkpoint.loading.files import open_tensors, verify_checkpoint

    if not folders.find_store(checkpoint).verifies_on_read:  # other stores verify pieces as they are read
        logger.info("verifying %s", checkpoint)
        verify_checkpoint(checkpoint, manifest)
    return ((name[len(prefix) :], tensor) for name, tensor in open_tensors(checkpoint, manifest, prefix))


def check_output(output: Path, may_overwrite: bool) -> None:
    """Raise an error if weights cannot be written to a folder without replacing others.

    The folder may be missing, and may contain other files.

    Args:
        output: Folder for the weights.
        may_overwrite: Whether existing weights may be replaced.

    Raises:
        ConfigError: If `output` is a URL, a file, a path below a file, or a checkpoint. Also if it contains weights and
            `may_overwrite` is False.
    """
    if isinstance(output, ObjectPath):
        raise ConfigError(f"OUTPUT {output} is a URL; give a folder for the weights")
    closest_path = next(each for each in (output, *output.absolute().parents) if os.path.lexists(each))
    if not os.path.isdir(closest_path):
        raise ConfigError(
            f"OUTPUT {closest_path} is not a folder; give a folder for the weights, which is created if missing"
        )
    if os.path.exists(output / MANIFEST):
        raise ConfigError(f"OUTPUT {output} is a checkpoint; give another folder for the weights")
    weight_files: list[str] = []
    if os.path.isdir(output):
        weight_files = sorted(path.name for pattern in _WEIGHT_FILE_PATTERNS for path in output.glob(pattern))
    if weight_files and not may_overwrite:
        raise ConfigError(
            f"OUTPUT {output} already contains weights ({', '.join(weight_files[:3])}); give another folder, or "
            "--overwrite to replace them"
        )

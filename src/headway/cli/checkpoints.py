"""`headway inspect` prints a checkpoint's content, and `headway merge` exports its weights for other programs.

`inspect` reads only the manifest, and with `--verify` all files. Nothing in a checkpoint is executed. `merge` writes
safetensors or the format of torch.distributed.checkpoint, under the names of the model without wrappers.
"""

import logging
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from headway.cli.options import PLACE, GroupedCommand, LocalPath, make_option
from headway.cli.progress import show_progress
from headway.common.object_path import ObjectPath
from headway.common.text import format_bytes
from headway.common.untrusted import escape_text
from headway.core.checkpoint.format.entries import HASH_NAME, ITEM_BYTES
from headway.core.checkpoint.format.foreign import explain_path, list_checkpoint_names
from headway.core.checkpoint.format.manifest import MANIFEST, Manifest, read_manifest
from headway.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    from headway.extras.weight_averaging import SavedModel

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
        click.echo(f"verified: all {len(manifest.files)} files are as they were written, by their {HASH_NAME}")


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
    lines.append(f"{len(manifest.files)} files, {format_bytes(manifest.num_bytes())}, each with its {HASH_NAME}")
    return lines


@click.command(
    "merge",
    cls=GroupedCommand,
    params=[
        click.Argument(["checkpoints"], type=PLACE, nargs=-1, required=True, metavar="CHECKPOINT..."),
        click.Argument(["output"], type=PLACE),
        make_option(
            "--average",
            None,
            "Average",
            "Average the weights of all CHECKPOINTs, which can also be folders with safetensors.",
        ),
        make_option(
            "--coefficients",
            "N,N,...",
            "Average",
            "Weight of each CHECKPOINT in the average.  [default: equal weights]",
        ),
        make_option("--model", "N", "Output", "Which of several prepared models.", int, default=0, show_default=True),
        make_option("--max_shard_size", "SIZE", "Output", _MAX_SHARD_SIZE_HELP, default="10GB", show_default=True),
        make_option("--overwrite", None, "Output", "Replace weights that OUTPUT already contains."),
        make_option("--to", "FORMAT", "Output", _TO_HELP, ("safetensors", "dcp"), default="safetensors"),
        make_option("--config", "FOLDER", "Output", _CONFIG_HELP, LocalPath(path_type=Path)),
    ],
    help="Write the weights in CHECKPOINT (or a folder written by torch.distributed.checkpoint) to the folder OUTPUT as "
    "model.safetensors, or as shards with an index. With --average, write the average of several checkpoints.",
)
def merge(
    checkpoints: tuple[Path, ...],
    output: Path,
    average: bool,
    coefficients: str | None,
    model: int,
    max_shard_size: str,
    overwrite: bool,
    to: str,
    config: Path | None,
) -> None:
    """Write a checkpoint's weights, or the average of several, to a folder, with the files that describe the model.

    The weights are compared with their hashes. Only checkpoints of `save_state` have hashes.

    Args:
        checkpoints: Folders or URLs of checkpoints, or folders that torch.distributed.checkpoint wrote. Without `average`,
            one. With `average`, they can also be folders, files and indexes of safetensors.
        output: Folder for the weights.
        average: Whether to write the average of the checkpoints.
        coefficients: Weights of the checkpoints in the average, separated by commas. None: equal weights.
        model: Index of the model in a checkpoint with several models.
        max_shard_size: Maximum size of a safetensors file, such as "10GB".
        overwrite: Whether weights in `output` may be replaced.
        to: "safetensors" or "dcp".
        config: Folder whose config and tokenizer files are copied. None: those in the last checkpoint.

    Raises:
        CheckpointError: If a checkpoint is missing or damaged, if checkpoints cannot be averaged, or if the weights
            cannot be written.
        ConfigError: If `output` cannot be used, `config` is not a folder, or there is no such model. Also if the number of
            checkpoints or the coefficients are not allowed.
    """
    factors = _check_average(checkpoints, average, coefficients)
    check_output(output, overwrite)
    if config is not None and not config.is_dir():
        raise ConfigError(f"--config {config} is not a folder; give the one that contains config.json")
    from headway.core.checkpoint import folders
    from headway.core.checkpoint.loading import dcp
    from headway.core.weights.export import save_weights
    from headway.core.weights.pretrained_files import copy_files
    from headway.extras.weight_averaging import WeightAverage

    with show_progress():
        models = [_open_model(checkpoint, model, is_average=average) for checkpoint in checkpoints]
        weight_average = WeightAverage(models, factors) if average else None
        named_tensors = weight_average.iterate_tensors() if weight_average is not None else models[0].tensors.items()
        last = checkpoints[-1]
        try:
            paths = (
                dcp.write_folder(named_tensors, output)
                if to == "dcp"
                else save_weights(named_tensors, output, max_shard_size)
            )
            paths += copy_files(config or folders.find_store(last).get_content_folder(), output)
        except (OSError, UnicodeError) as error:
            raise CheckpointError(f"the weights cannot be written to {output}: {error}") from error
    for path in paths:
        click.echo(path)
    if weight_average is not None:
        for line in weight_average.describe_exceptions():
            click.echo(escape_text(line), err=True)


def _check_average(checkpoints: tuple[Path, ...], is_average: bool, coefficients: str | None) -> list[float] | None:
    """Return the numbers in `coefficients`, or None if there are none.

    Args:
        checkpoints: Checkpoints of the command.
        is_average: Whether `--average` was passed.
        coefficients: Numbers, separated by commas, or None.

    Raises:
        ConfigError: If there are several checkpoints or coefficients without `--average`, if a checkpoint is given twice, or
            if a coefficient is not a number.
    """
    if not is_average:
        if len(checkpoints) > 1:
            raise ConfigError(
                f"merge got {len(checkpoints)} checkpoints and OUTPUT {checkpoints[-1]}; give one checkpoint, or --average to write "
                "the average of several"
            )
        if coefficients is not None:
            raise ConfigError("--coefficients needs --average")
    places = [each if isinstance(each, ObjectPath) else each.resolve() for each in checkpoints]
    repeated = [each for index, each in enumerate(checkpoints) if places[index] in places[:index]]
    if repeated:
        raise ConfigError(
            f"{repeated[0]} is given twice; give each checkpoint once, and its weight with --coefficients"
        )
    if coefficients is None:
        return None
    try:
        return [float(text) for text in coefficients.split(",")]
    except ValueError as error:
        raise ConfigError(f"--coefficients {coefficients}; give one number per checkpoint, as in 2,1,1") from error


def _open_model(checkpoint: Path, model: int, is_average: bool) -> "SavedModel":
    """Open the weights of one model in a checkpoint. Their values are read on request.

    Args:
        checkpoint: Folder or URL of a checkpoint, or a folder that torch.distributed.checkpoint wrote.
        model: Index of the model.
        is_average: Whether `checkpoint` can also be a folder, a file or an index of safetensors.

    Raises:
        CheckpointError: If the checkpoint is missing or damaged.
        ConfigError: If the checkpoint contains no weights of a model with this index.
    """
    from headway.core.checkpoint.loading import dcp
    from headway.core.weights.compiled import remove_compiled_levels
    from headway.core.weights.files import open_checkpoint
    from headway.extras.weight_averaging import SavedModel

    place = str(checkpoint)
    ties: dict[str, str] = {}
    tensors: Mapping[str, Any]
    is_local = not isinstance(checkpoint, ObjectPath)
    if is_local and not os.path.exists(checkpoint / MANIFEST) and os.path.isfile(checkpoint / ".metadata"):
        tensors = dcp.open_folder(checkpoint)
    elif is_average and is_local and _contains_weight_files(checkpoint):
        files = open_checkpoint(checkpoint)
        tensors, ties = files.tensors, files.ties
    else:
        manifest = read_manifest(checkpoint)
        prefix = f"model/{model}/"
        tensors = dict(_open_model_tensors(checkpoint, manifest, model))
        ties = {
            name.removeprefix(prefix): target.removeprefix(prefix)
            for name, target in manifest.aliases.items()
            if name.startswith(prefix)
        }
    renamed = {remove_compiled_levels(name): tensor for name, tensor in tensors.items()}
    renamed_ties = {remove_compiled_levels(name): remove_compiled_levels(target) for name, target in ties.items()}
    return SavedModel(place, renamed, renamed_ties)


def _contains_weight_files(place: Path) -> bool:
    """Whether a path is a file, or a folder that contains weight files and no manifest of a Headway checkpoint."""
    if place.is_dir():
        has_files = any(any(place.glob(pattern)) for pattern in _WEIGHT_FILE_PATTERNS)
        return has_files and not os.path.exists(place / MANIFEST)
    return place.is_file()


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

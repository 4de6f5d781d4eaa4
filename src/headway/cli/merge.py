"""`headway merge`: a checkpoint's weights as safetensors or torch.distributed.checkpoint files, under the bare module's names."""

import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from headway.checkpoint.format.manifest import MANIFEST, Manifest, read_manifest
from headway.cli.options import PLACE, GroupedCommand, option
from headway.cli.progress import show_progress
from headway.common.object_path import ObjectPath
from headway.common.untrusted import printable
from headway.errors import CheckpointError, ConfigError

logger = logging.getLogger(__name__)

_FORMATS = ("safetensors", "dcp")
_PATH = click.Path(path_type=Path)


@click.command(
    "merge",
    cls=GroupedCommand,
    params=[
        click.Argument(["checkpoint"], type=PLACE),
        click.Argument(["output"], type=PLACE),
        option("--model", "N", "Output", "Which of several prepared models.", int, default=0, show_default=True),
        option(
            "--max_shard_size",
            "SIZE",
            "Output",
            "Cut into files of at most this size.",
            default="10GB",
            show_default=True,
        ),
        option("--overwrite", None, "Output", "Replace weights that OUTPUT already holds."),
        option(
            "--to",
            "FORMAT",
            "Output",
            "safetensors, or dcp (torch.distributed.checkpoint).",
            _FORMATS,
            default="safetensors",
        ),
        option(
            "--config",
            "FOLDER",
            "Output",
            "Copy config.json, tokenizer files and the like from FOLDER instead of CHECKPOINT.",
            _PATH,
        ),
    ],
    help="Write the weights in CHECKPOINT (or a folder written by torch.distributed.checkpoint) to the folder OUTPUT as "
    "model.safetensors, or as shards with an index.",
)
def command(
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
    patterns = (
        "*.distcp",
        "*.safetensors",
        "*.safetensors.index.json",
        "pytorch_model*.bin",
        "pytorch_model.bin.index.json",
    )
    found = output if os.path.isdir(output) else None  # else it is made, or cannot be
    present = sorted(path.name for pattern in patterns for path in (found.glob(pattern) if found else ()))
    if present and not may_overwrite:
        raise ConfigError(
            f"OUTPUT {output} holds weights already ({', '.join(present[:3])}); give another folder, or --overwrite to replace them"
        )

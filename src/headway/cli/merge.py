"""`headway merge`: a checkpoint's weights as plain safetensors files under the bare module's names."""

from pathlib import Path

import click

from headway.checkpoint.manifest import read_manifest
from headway.cli.options import GroupedCommand, GroupedOption
from headway.errors import ConfigError


@click.command(
    "merge",
    cls=GroupedCommand,
    params=[
        click.Argument(["checkpoint"], type=click.Path(path_type=Path)),
        click.Argument(["output"], type=click.Path(path_type=Path)),
        GroupedOption(["--model"], group="Output", type=int, default=0, show_default=True,
                      help="Which of several prepared models."),
        GroupedOption(["--max_shard_size"], group="Output", default="10GB", show_default=True,
                      help="Cut into files of at most this size."),
    ],
    help="Write the weights in CHECKPOINT to the folder OUTPUT as model.safetensors, or as shards with an index.",
)  # fmt: skip
def command(checkpoint: Path, output: Path, model: int, max_shard_size: str) -> None:
    """Verify the checkpoint, then write its weights."""
    manifest = read_manifest(checkpoint)
    prefix = f"model/{model}/"
    if not any(name.startswith(prefix) for name in manifest.tensors):
        present = sorted({int(name.split("/")[1]) for name in manifest.tensors if name.startswith("model/")})
        raise ConfigError(f"--model {model}: {checkpoint} holds the models {', '.join(map(str, present)) or 'none'}")
    from headway.checkpoint.layout import read_tensors, verify
    from headway.checkpoint.weights import save_weights

    verify(checkpoint, manifest)
    named = ((name[len(prefix) :], tensor) for name, tensor in read_tensors(checkpoint, manifest, prefix))
    for path in save_weights(named, output, max_shard_size):
        click.echo(path)

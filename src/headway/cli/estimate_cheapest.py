"""`headway estimate --global_batch_size`: the ways to train with a global batch that fit, the cheapest first."""

import json
from typing import Any

import click

from headway.cli.options import GroupedOption
from headway.errors import ConfigError

_NOT_FOR_THIS = {
    "batch_size": "the micro-batch is searched for",
    "accumulation": "it follows from the micro-batch",
    "longest": "it is a search at one batch size",
    "page": "its charts are of one configuration",
    "strategy": "it ranks ways to train on one GPU, and `headway plan` ranks layouts",
    "ranks": "it ranks ways to train on one GPU, and `headway plan` ranks layouts",
    "machine_ranks": "it ranks ways to train on one GPU, and `headway plan` ranks layouts",
}


def ranked(
    model: str,
    global_batch_size: int,
    device: str,
    sequence: int | None = None,
    precision: str | None = None,
    optimizer: str | None = None,
    recompute: bool = False,
    attention: str | None = None,
    budget: str | None = None,
    as_json: bool = False,
    **others: Any,
) -> tuple[str, bool]:
    """The rows as text or as JSON, and whether one of them fits.

    Args:
        precision, recompute, attention: tried alone; None or False: all that there is to choose.
        optimizer: names, separated by commas.
        others: options that are not for this.

    Raises:
        ConfigError: an option that is not for this.
    """
    for name, value in others.items():
        if value not in (None, False):
            raise ConfigError(f"--{name} and --global_batch_size: {_NOT_FOR_THIS[name]}; give one of them")
    # Imported here so that the help does not wait for torch.
    from headway.planning.cheapest import cheapest, table
    from headway.planning.sources import find, trainable

    source = find(model, 1, sequence)
    make, batch, loss = trainable(source)
    rows = cheapest(
        make,
        batch,
        global_batch_size=global_batch_size,
        device=device,
        budget=budget,
        optimizers=tuple((optimizer or "adamw").split(",")),
        precisions=(precision,) if precision else ("no", "bf16"),
        recompute=(True,) if recompute else (False, True),
        attention=(attention,),
        loss=loss,
    )
    has_room = any(row.fits for row in rows)
    if as_json:
        return json.dumps([row.as_dict() for row in rows], indent=1), has_room
    lines = [f"{source.title}, {global_batch_size} x {source.batch}, {device}", table(rows)]
    lines += [f"not traced: {row.optimizer}, {row.precision}: {row.problem}" for row in rows if row.problem]
    lines.append("cost: of one update beside the first row's, from counted operations; not a forecast of time")
    if not has_room:
        lines.append(
            "nothing is sure to fit; give a larger --budget, another --device or --optimizer, or a shorter --sequence"
        )
    return "\n".join(lines), has_room


OPTION = GroupedOption(
    ["--global_batch_size"],
    metavar="N",
    group="Training",
    type=click.IntRange(min=1),
    help="Rank micro-batch, accumulation, precision and recomputation for this many samples per update; --optimizer may then be "
    "several, separated by commas. Exit code 1 if nothing is sure to fit.",
)

"""`headway estimate --device`: what training a transformers model takes on a card, and the largest batch."""

import json
from typing import Any

import click

from headway.cli.options import GroupedOption


def trained(
    model: str,
    batch_size: int,
    device: str,
    sequence: int | None = None,
    precision: str = "no",
    optimizer: str = "adamw",
    recompute: bool = False,
    accumulation: int = 1,
    attention: str | None = None,
    budget: str | None = None,
    as_json: bool = False,
) -> str:
    """The forecast as text, or as JSON."""
    # Imported here so that the help does not wait for torch.
    from headway.planning.forecast import forecast
    from headway.planning.sources import find, trainable

    source = find(model, batch_size, sequence)
    make, batch, loss = trainable(source, attention)
    found = forecast(
        make,
        batch,
        batch_size=batch_size,
        optimizer=optimizer,
        loss=loss,
        device=device,
        budget=budget,
        precision=precision,
        recompute=recompute,
        accumulation=accumulation,
    )
    if as_json:
        return json.dumps(found.as_dict(), indent=1)
    return f"{source.title}, {source.batch}\n{found.describe()}"


def _option(name: str, metavar: str | None, text: str, **more: Any) -> GroupedOption:
    return GroupedOption([name], metavar=metavar, group="Training", help=text, **more)


OPTIONS = [
    _option("--device", "NAME", "What training takes on this card, such as rtx-3090 or a100-80gb."),
    _option(
        "--sequence",
        "N",
        "Tokens per sample.  [default: what the model allows, up to 4096]",
        type=click.IntRange(min=1),
    ),
    _option(
        "--precision",
        "no|bf16|fp16",
        "Mixed precision, by autocast.  [default: no]",
        type=click.Choice(["no", "bf16", "fp16"]),
    ),
    _option("--optimizer", "NAME", "adamw, adam, sgd, momentum, adagrad, rmsprop or none.  [default: adamw]"),
    _option("--recompute", None, "Recompute activations in backward.", is_flag=True),
    _option("--accumulation", "N", "Micro-batches of one update.  [default: 1]", type=click.IntRange(min=1)),
    _option(
        "--attention",
        "eager|sdpa",
        "The model's attention.  [default: the model's]",
        type=click.Choice(["eager", "sdpa"]),
    ),
    _option("--budget", "SIZE", "Memory that the process may take, such as 20GiB.  [default: all of the card]"),
    GroupedOption(["--json", "as_json"], group="Training", is_flag=True, help="Print the forecast as JSON."),
]

"""`headway plan`: what each rank of a run would hold and send, for any layout and number of ranks, computed on this machine alone."""

import json
from typing import Any

import click

from headway.cli.options import GroupedCommand, GroupedOption, examples
from headway.config.mesh import parse
from headway.config.pipeline import SCHEDULES, PipelineOptions
from headway.config.strategies import ActivationCheckpointing
from headway.errors import ConfigError
from headway.units import format_bytes, format_number, parse_bytes

_ABOUT = """Show what training MODEL takes on N ranks, for each layout, starting with the cheapest that fits.

MODEL is a folder with a transformers `config.json`, the path of such a file, a transformers model type ("llama"), or
`module:function`: a function that returns a model, or a model and a step (model -> loss). The model is prepared as in a run, but
without allocating its tensors and without other processes.
"""

_EPILOG = examples(
    [
        "headway plan llama/ --ranks 64                                    common layouts",
        "headway plan llama/ --ranks 16384 --strategy fsdp --strategy hsdp=8 --memory 80GB",
        "headway plan models:build --ranks 256 --strategy fsdp             one layout in full",
    ]
)


def _plan(model: str, ranks: int, strategy: tuple[str, ...], json_: bool, **given: Any) -> None:
    for text in strategy:
        parse(text)  # a word that is no layout at all is wrong use; one that does not divide the ranks is a row
    memory = parse_bytes(given["memory"]) if given["memory"] is not None else None
    # Imported here so that the help does not wait for torch.
    from headway.planning.compare import candidates, compare
    from headway.planning.costs import Cluster
    from headway.planning.report import as_dict
    from headway.planning.sources import find
    from headway.planning.table import describe, tabulate

    source = find(model, given["batch"], given["sequence"])
    cluster = Cluster(given["machine_ranks"], given["intra"] * 1e9, given["inter"] * 1e9, given["flops"] * 1e12, memory)
    found = compare(
        source.make,
        strategy or candidates(ranks, cluster.machine_ranks, source.has_plan),
        ranks,
        cluster,
        step=source.step,
        optimizer=given["optimizer"],
        precision=given["precision"],
        tokens=source.tokens,
        kwargs_handlers=[
            PipelineOptions(given["schedule"], given["microbatches"]),
            *([ActivationCheckpointing()] if given["checkpoint_activations"] else []),
        ],
    )
    if len(strategy) == 1 and found.rows[0].plan is None:
        raise ConfigError(found.rows[0].reason)
    if json_:
        click.echo(json.dumps(as_dict(found), indent=1))
        return
    lines = [
        f"{source.title}; {source.batch} per data shard; {given['optimizer']}; precision {given['precision']}",
        f"{ranks:,} ranks, {cluster.machine_ranks} per machine, {_rates(cluster)}",
        "",
    ]
    if len(found.rows) == 1 and (row := found.rows[0]).plan is not None:
        lines += describe(row.plan, row.cost) + ([f"does not fit: {row.reason}"] if row.reason else [])
    else:
        lines += tabulate(found)
    for line in lines:
        click.echo(line)


def _rates(cluster: Any) -> str:
    memory = "" if cluster.memory is None else f"; {format_bytes(cluster.memory)} of memory per rank"
    return (
        f"{format_number(cluster.intra / 1e9)} GB/s per rank within and {format_number(cluster.inter / 1e9)} GB/s between machines, "
        f"{format_number(cluster.flops / 1e12)} TFLOP/s{memory}"
    )


def _number(name: str, metavar: str, default: Any, text: str, kind: Any) -> GroupedOption:
    shown = "" if default is None else f"  [default: {default:g}]"
    return GroupedOption([name], metavar=metavar, group="Cluster", type=kind, default=default, help=text + shown)


_ABOVE_0 = click.FloatRange(min=0, min_open=True)

command = GroupedCommand(
    "plan",
    callback=_plan,
    params=[
        click.Argument(["model"], metavar="MODEL"),
        GroupedOption(
            ["--ranks"],
            metavar="N",
            group="Run",
            type=click.IntRange(min=1),
            required=True,
            help="Number of processes in the run.",
        ),
        GroupedOption(
            ["--strategy"],
            metavar="LAYOUT",
            group="Run",
            multiple=True,
            help="fsdp, hsdp=8, fsdp+tp=8 ...; several may be given.  [default: common layouts]",
        ),
        GroupedOption(
            ["--batch"],
            metavar="N",
            group="Run",
            type=click.IntRange(min=1),
            default=1,
            help="Micro-batch size of each data shard.  [default: 1]",
        ),
        GroupedOption(
            ["--sequence"],
            metavar="N",
            group="Run",
            type=click.IntRange(min=1),
            help="Tokens per sample.  [default: what the model allows, up to 4096]",
        ),
        GroupedOption(
            ["--optimizer"],
            metavar="NAME",
            group="Run",
            default="adamw",
            help="adamw, adam, sgd, momentum, adagrad, rmsprop or none.  [default: adamw]",
        ),
        GroupedOption(
            ["--precision"],
            group="Run",
            type=click.Choice(("no", "bf16", "fp16")),
            metavar="no|bf16|fp16",
            default="bf16",
            help="Same as mixed_precision of a run.  [default: bf16]",
        ),
        GroupedOption(
            ["--checkpoint_activations"],
            group="Run",
            is_flag=True,
            help="Keep only the inputs of blocks for backward, and recompute the rest.",
        ),
        GroupedOption(
            ["--schedule"],
            group="Run",
            type=click.Choice(SCHEDULES),
            metavar="|".join(SCHEDULES),
            default="gpipe",
            help="Order of micro-batches in layouts with pp.  [default: gpipe]",
        ),
        GroupedOption(
            ["--microbatches"],
            metavar="N",
            group="Run",
            type=click.IntRange(min=1),
            help="Parts of a batch in layouts with pp.  [default: 2 per stage, at most one per sample]",
        ),
        _number("--machine_ranks", "N", 8, "Ranks on one machine.", click.IntRange(min=1)),
        _number("--intra", "GB/S", 300.0, "Bandwidth of a rank within its machine.", _ABOVE_0),
        _number("--inter", "GB/S", 40.0, "Bandwidth of a rank to other machines.", _ABOVE_0),
        _number("--flops", "TFLOPS", 400.0, "TFLOP/s that a rank achieves in practice, not the peak.", _ABOVE_0),
        _number("--memory", "SIZE", None, "Memory of a device, such as 80GB; layouts that need more do not fit.", str),
        GroupedOption(
            ["--json", "json_"], group="Output", is_flag=True, help="Print JSON, with all numbers in bytes or seconds."
        ),
    ],
    help=_ABOUT,
    epilog=_EPILOG,
)

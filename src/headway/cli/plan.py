"""`headway plan`: compute the memory and traffic of each rank for any layout and number of ranks, without GPUs."""

import json
from functools import partial
from typing import Any

import click

from headway.cli.model_options import EARLIER_NAMES, POSITIVE, make_model_option
from headway.cli.options import JSON, GroupedCommand, GroupedOption, format_examples, make_option
from headway.cli.progress import show_progress
from headway.common.text import format_bytes, format_number, parse_bytes
from headway.core.config.activation_checkpointing import ActivationCheckpointing
from headway.core.config.mesh import parse_layout
from headway.core.config.parallelism import SCHEDULES, PipelineOptions
from headway.errors import ConfigError
from headway.planning.model_types import check_model_name

_ABOUT_PLAN = """Show the memory, communication and time that training MODEL needs on N ranks in each layout.

The fastest layout that fits comes first. MODEL is a folder with a transformers `config.json`, the path of such a file, a
transformers model type ("llama"), or `module:function`: a function that returns a model, or a model and a step (model -> loss). The
model is prepared as in a run, but without allocating its tensors and without other processes.
"""

_EPILOG_PLAN = format_examples(
    "headway plan llama/ --ranks 64                                    common layouts",
    "headway plan llama/ --ranks 16384 --strategy fsdp --strategy hsdp=8 --budget 80GB",
    "headway plan models:build --ranks 256 --strategy fsdp             one layout in full",
)


def _run_plan(model: str, ranks: int, strategy: tuple[str, ...], as_json: bool, **options: Any) -> None:
    """Print a table of layouts, or one layout in full if `strategy` names only one.

    Args:
        model: Folder, model type, or "module:function", as described in the command's help.
        ranks: Number of ranks.
        strategy: Layouts to compare, such as "fsdp+tp=2". Empty: common layouts.
        as_json: Whether to print JSON.
        **options: Values of the other flags, by the name of the flag without dashes. Rates are in GB/s and TFLOP/s.

    Raises:
        ConfigError: If an option is invalid, or if the only layout cannot be planned.
    """
    for text in strategy:
        parse_layout(text)  # raises an error if invalid; a layout that does not fit the ranks becomes a table row
    check_model_name(model)
    memory = parse_bytes(options["budget"]) if options["budget"] is not None else None
    # Imported here so that `--help` does not wait for the import of torch.
    from headway.planning.cluster import ClusterRates
    from headway.planning.compare import compare_layouts, comparison_as_dict, list_candidates
    from headway.planning.optimizers import resolve_optimizer
    from headway.planning.plan import plan
    from headway.planning.sources import find_source

    source = find_source(model, options["batch_size"], options["sequence"])
    cluster = ClusterRates(
        options["machine_ranks"], options["intra"] * 1e9, options["inter"] * 1e9, options["flops"] * 1e12, memory
    )
    # Raise an error for an unknown optimizer. Otherwise each row of the table would report it.
    resolve_optimizer(options["optimizer"])
    handlers: list[Any] = [PipelineOptions(options["schedule"], options["microbatches"])]
    if options["activation_checkpointing"]:
        handlers.append(ActivationCheckpointing())
    plan_layout = partial(
        plan,
        source.make,
        num_ranks=ranks,
        step=source.step,
        optimizer=options["optimizer"],
        precision=options["mixed_precision"],
        tokens=source.tokens,
        kwargs_handlers=handlers,
        machine_ranks=cluster.machine_ranks,
    )
    layouts = strategy or list_candidates(ranks, cluster.machine_ranks, source.has_tp_plan)
    with show_progress():
        comparison = compare_layouts(plan_layout, layouts, cluster)
    if len(strategy) == 1 and comparison.rows and comparison.rows[0].plan is None:
        raise ConfigError(comparison.rows[0].reason)
    if as_json:
        click.echo(json.dumps(comparison_as_dict(comparison), indent=1))
        return
    click.echo(
        f"{source.title}; {source.batch} per data shard; {options['optimizer']}; mixed precision {options['mixed_precision']}"
    )
    click.echo(f"{ranks:,} ranks, {cluster.machine_ranks} per machine, {_describe_cluster(cluster)}")
    click.echo()
    for line in _format_result(comparison):
        click.echo(line)


def _format_result(comparison: Any) -> list[str]:
    """Return the lines of a table of layouts, or the full description of the plan if there is only one layout."""
    from headway.planning.compare import format_comparison
    from headway.planning.outcome import describe_plan

    if len(comparison.rows) != 1 or comparison.rows[0].plan is None:
        return list(format_comparison(comparison))
    row = comparison.rows[0]
    lines = list(describe_plan(row.plan, row.cost))
    if row.reason:
        lines.append(f"does not fit: {row.reason}")
    return lines


def _describe_cluster(cluster: Any) -> str:
    """Return the bandwidths, the computing speed and the memory limit of each rank (`ClusterRates`) as text."""
    memory = "" if cluster.memory is None else f"; {format_bytes(cluster.memory)} of memory per rank"
    return (
        f"{format_number(cluster.intra / 1e9)} GB/s per rank within and {format_number(cluster.inter / 1e9)} GB/s between machines, "
        f"{format_number(cluster.flops / 1e12)} TFLOP/s{memory}"
    )


_SCHEDULE = "Order of micro-batches in layouts with pp.  [default: gpipe]"

_MICROBATCHES = "Parts of a batch in layouts with pp.  [default: 2 per stage, at most one per sample]"


def _make_rate_option(name: str, metavar: str, default: float, text: str) -> GroupedOption:
    """Return the option for a rate of the cluster, which must be above 0.

    Args:
        name: Flag, such as "--intra".
        metavar: Unit, shown in place of the value.
        default: Value if the flag is not given.
        text: Help of the flag, without the default.
    """
    above_0 = click.FloatRange(min=0, min_open=True)
    return make_option(name, metavar, "Cluster", f"{text}  [default: {default:g}]", above_0, default=default)


plan = GroupedCommand(
    "plan",
    callback=_run_plan,
    aliases=EARLIER_NAMES,
    params=[
        click.Argument(["model"], metavar="MODEL"),
        make_model_option("ranks", "Run", required=True),
        make_model_option("strategy", "Run", "; several may be given.  [default: common layouts]", multiple=True),
        make_model_option("batch_size", "Run", default=1),
        make_model_option("sequence", "Run", "]"),
        make_model_option("optimizer", "Run", default="adamw"),
        make_model_option("mixed_precision", "Run", default="no"),
        make_model_option("activation_checkpointing", "Run"),
        make_option("--schedule", "|".join(SCHEDULES), "Run", _SCHEDULE, SCHEDULES, default="gpipe"),
        make_option("--microbatches", "N", "Run", _MICROBATCHES, POSITIVE),
        make_model_option("machine_ranks", "Cluster", default=8),
        _make_rate_option("--intra", "GB/S", 300.0, "Bandwidth of a rank within its machine."),
        _make_rate_option("--inter", "GB/S", 40.0, "Bandwidth of a rank to other machines."),
        _make_rate_option("--flops", "TFLOPS", 400.0, "TFLOP/s that a rank achieves in practice, not the peak."),
        make_model_option("budget", "Cluster", " Layouts that need more do not fit."),
        JSON,
    ],
    help=_ABOUT_PLAN,
    epilog=_EPILOG_PLAN,
)

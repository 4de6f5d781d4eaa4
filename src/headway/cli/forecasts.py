"""`headway estimate` and `headway plan`: what running or training a model would take, before a byte of its weights is read.

`estimate`: what running it takes here; with --device, what training a model or a script takes on a card, the largest batch, the
cheapest way. `plan`: what each rank would hold and send, for any layout and number of ranks, computed on this machine alone.
"""

import json
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import click

from headway.cli.options import JSON, GroupedCommand, GroupedOption, examples, option, show_progress
from headway.common.text import format_bytes, format_number, parse_bytes
from headway.config.engines import ActivationCheckpointing
from headway.config.mesh import parse
from headway.config.parallelism import SCHEDULES, PipelineOptions
from headway.errors import ConfigError
from headway.planning import TASKS

POSITIVE = click.IntRange(min=1)
_OPTIMIZERS = "adamw, adam, sgd, momentum, adagrad, rmsprop, adafactor, adamw8bit, muon or none.  [default: adamw]"
_OF_MODELS = {
    "batch_size": ("N", "Samples of a micro-batch, on each data shard.  [default: 1]", POSITIVE),
    "sequence": ("N", "Tokens per sample.  [default: what the model allows, up to 4096", POSITIVE),
    "optimizer": ("NAME", _OPTIMIZERS, str),
    "mixed_precision": ("no|bf16|fp16", "Precision of the forward pass.  [default: no]", ("no", "bf16", "fp16")),
    "activation_checkpointing": (None, "Keep only the inputs of blocks; recompute the rest in backward.", None),
    "ranks": ("N", "Processes of the run.", POSITIVE),
    "strategy": ("LAYOUT", "ddp, fsdp, hsdp=8, tp, fsdp+tp=2 ...", str),
    "machine_ranks": ("N", "Ranks on one machine.  [default: 8]", POSITIVE),
    "budget": ("SIZE", "Memory that each process may take, such as 20GiB.", str),
}
EARLIER_NAMES = {
    "accumulation": "gradient_accumulation_steps",
    "precision": "mixed_precision",
    "batch": "batch_size",
    "checkpoint_activations": "activation_checkpointing",
    "memory": "budget",
    "num_tokens": "sequence",
    "recompute": "activation_checkpointing",
}
"""Earlier names of options of `estimate` and `plan`, accepted until the next release."""


def model_option(name: str, group: str, more: str = "", **settings: Any) -> GroupedOption:
    """An option that the commands about a model share: the same name, and the same text before `more`."""
    metavar, text, kind = _OF_MODELS[name]
    return option(f"--{name}", metavar, group, text + more, kind, **settings)


_ABOUT = """Estimate the memory that the model in FOLDER needs, what fits on this machine, and the highest speed.

FOLDER holds a transformers `config.json`; weights are not needed. The rate is a ceiling: bandwidth, measured here in about two
seconds, over the bytes that each token has to read.

With --device: the memory of training on that GPU, even if this machine has none, and the largest batch; FOLDER may then also be
a config file or a transformers model type. With --script, too: what your own script takes, run up to its second update on
tensors without values.
"""

_EPILOG = examples(
    "headway estimate llama/                        the sizes, the placement, the ceiling",
    "headway estimate llama/ --dtype int4           placed as int4",
    "headway estimate bert --device rtx-3090        training on a GPU: memory, and the largest batch",
    "headway estimate llama --device h100 --mixed_precision bf16 --strategy fsdp --ranks 8",
    "headway estimate llama --device l4 --dtype int4 --lora r=16   QLoRA",
    "headway estimate bert --device t4 --global_batch_size 256   the cheapest configuration that fits",
    "headway estimate --script train.py --device rtx-3090 -- --lr 3e-4",
)

_OF_SCRIPTS = ("device", "budget", "page", "as_json")
"""Options that a script does not decide itself."""

_OF_RUNNING = ("dtype", "batch_size", "sequence")
LOOPS = ("plain", "zero_grad_before_backward", "loss_function")
_ONE_GPU = "it ranks ways to train on one GPU, and `headway plan` ranks layouts"
NOT_FOR_RANKING = {
    "batch_size": "the micro-batch is searched for",
    "gradient_accumulation_steps": "it follows from the micro-batch",
    "longest": "it is a search at one batch size",
    "lora": "it ranks ways to train the whole model",
    "page": "its charts are of one configuration",
    **dict.fromkeys(("strategy", "ranks", "machine_ranks"), _ONE_GPU),
}
"""Options of a forecast that do not go with --global_batch_size, and why."""
_DTYPES = ("float32", "bfloat16", "float16", "int8", "int4")


def _estimate(folder: Path | None, arguments: tuple[str, ...], script: bool, calibrate: bool, **options: Any) -> None:
    given = {name: value for name, value in options.items() if value not in (None, False) and name != "inference"}
    if calibrate:
        if folder is not None or given:
            raise ConfigError("--calibrate measures this machine's GPU, and goes alone; remove all other arguments")
        click.echo(calibration_text())
        return
    if folder is None:
        raise ConfigError("FOLDER is missing: a folder with a config.json, or with --device a transformers model type")
    if given.get("device", "this").lower() != "this":
        from headway.forecasting.device import devices

        devices.find(given["device"])  # a name that is none is told before torch is loaded
    # Now: a user's folder, where files may be called as Python's modules, comes first while a script runs, and after it.
    import headway.tracking.report.forecast_page  # noqa: F401

    show_progress()
    if script:
        _check_script(given)
        click.echo(script_text(folder, arguments, **given))
        return
    if arguments:
        raise ConfigError(f"{' '.join(arguments)}: only a script takes arguments; add --script, or remove them")
    if "device" in given:
        _echo_forecast(str(folder), given)
        return
    for name in given:
        if name not in _OF_RUNNING:
            raise ConfigError(f"--{name} is for training; add --device, such as --device a100-40gb")
    if "batch_size" in given and "sequence" not in given:
        raise ConfigError(f"--batch_size {given['batch_size']} needs --sequence, the tokens of each sample")
    # Imported here so that the help does not wait for torch.
    from headway.planning.inference import tabulate

    click.echo("\n".join(tabulate(folder, given.get("dtype"), given.get("batch_size", 1), given.get("sequence"))))


def _echo_forecast(model: str, given: dict[str, Any]) -> None:
    dtype = given.get("dtype", "")
    if dtype.startswith("int") and (dtype, "lora" in given) != ("int4", True):
        raise ConfigError(
            f"--dtype {dtype} is for running a model; training takes float32, bfloat16 or float16, or int4 with --lora (QLoRA)"
        )
    if "global_batch_size" not in given:
        click.echo(forecast_text(model, **given))
        return
    found, has_room = ranking_text(model, **given)
    click.echo(found)
    if not has_room:
        raise SystemExit(1)


def _check_script(given: dict[str, Any]) -> None:
    if "device" not in given:
        raise ConfigError("--script needs --device, such as --device a100-40gb")
    for name in given:
        if name not in _OF_SCRIPTS:
            raise ConfigError(f"--{name} is decided by the script; with --script, pass it to the script instead")


def forecast_text(
    model: str, page: Path | None = None, as_json: bool = False, longest: bool = False, **given: Any
) -> str:
    """The forecast for a transformers model as text, or as JSON.

    Args:
        model: a folder, a config file or a model type.
        page: file for an HTML page; None: no page.
        longest: search for the longest sequence, too.
        given: the other options.

    Raises:
        ConfigError: an option that cannot be.
    """
    if ("strategy" in given) != ("ranks" in given):
        raise ConfigError("--strategy and --ranks go together, as in --strategy fsdp --ranks 8; give both, or none")
    # Imported here so that the help does not wait for torch.
    from headway.planning.forecast import forecast
    from headway.planning.sources import find, lengths, lora_rank, trainable

    source = find(model, given.setdefault("batch_size", 1), given.pop("sequence", None), given.pop("task", None))
    rank = lora_rank(given.pop("lora")) if "lora" in given else None
    make, batch, loss = trainable(source, given.pop("attention", None), given.pop("dtype", None), rank)
    given["accumulation"] = given.pop("gradient_accumulation_steps", 1)
    given["recompute"] = given.pop("activation_checkpointing", False)
    given["precision"] = given.pop("mixed_precision", "no")
    found = forecast(make, batch, loss=loss, longest=lengths(source) if longest else None, **given)
    if found.peak_line.startswith(sys.argv[0]):  # the command itself, not a line of the user's
        found = replace(found, peak_line="")
    return _format_forecast(found, source.title, f"{source.title}, {source.batch}", page, as_json)


def script_text(
    script: Path, arguments: tuple[str, ...], page: Path | None = None, as_json: bool = False, **given: Any
) -> str:
    """The forecast of a user's own script as text, or as JSON; `given`: device and budget."""
    from headway.planning.forecast import forecast_script

    return _format_forecast(forecast_script(script, arguments, **given), script.name, str(script), page, as_json)


def _format_forecast(found: Any, title: str, heading: str, page: Path | None, as_json: bool) -> str:
    if page is not None:
        from headway.tracking.report.forecast_page import forecast_page

        try:
            page.write_text(forecast_page(title, found.as_dict()), encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"cannot write {page} ({error.strerror}); name another file with --page") from error
    return json.dumps(found.as_dict(), indent=1) if as_json else f"{heading}\n{found.describe()}"


def ranking_text(model: str, as_json: bool = False, **given: Any) -> tuple[str, bool]:
    """The ways to train with a global batch as text or as JSON, the cheapest first, and whether one of them fits.

    Args:
        model: a folder, a config file or a model type.
        as_json: print JSON.
        given: global_batch_size, device, budget; mixed_precision, activation_checkpointing and attention are tried alone where
            they are given; optimizer: names, separated by commas.

    Raises:
        ConfigError: an option that is not for this.
    """
    for name in NOT_FOR_RANKING.keys() & given.keys():
        raise ConfigError(f"--{name} and --global_batch_size: {NOT_FOR_RANKING[name]}; give one of them")
    # Imported here so that the help does not wait for torch.
    from headway.planning.cheapest import cheapest, table
    from headway.planning.sources import find, trainable

    source = find(model, 1, given.get("sequence"), given.get("task"))
    make, batch, loss = trainable(source, dtype=given.get("dtype"))
    rows = cheapest(
        make,
        batch,
        global_batch_size=given["global_batch_size"],
        device=given["device"],
        budget=given.get("budget"),
        optimizers=tuple(given.get("optimizer", "adamw").split(",")),
        precisions=(given["mixed_precision"],) if "mixed_precision" in given else ("no", "bf16"),
        recompute=(True,) if "activation_checkpointing" in given else (False, True),
        attention=(given.get("attention"),),
        loss=loss,
        loop=given.get("loop", "plain"),
    )
    has_room = any(row.fits for row in rows)
    if as_json:
        return json.dumps([row.as_dict() for row in rows], indent=1), has_room
    lines = [f"{source.title}, {given['global_batch_size']} x {source.batch}, {given['device']}", table(rows)]
    lines += [f"not traced: {row.optimizer}, {row.precision}: {row.problem}" for row in rows if row.problem]
    lines.append("cost: of one update beside the first row's, from counted operations; not a forecast of time")
    if not has_room:
        lines.append(
            "nothing is sure to fit; give a larger --budget, another --device or --optimizer, or a shorter --sequence"
        )
    return "\n".join(lines), has_room


def calibration_text() -> str:
    """Measure this machine's card, keep what was found, and say it.

    Raises:
        DeviceUnavailable: there is no CUDA device.
        ConfigError: the record cannot be kept.
    """
    from headway.common import env
    from headway.forecasting.device import calibration, devices

    name, path = devices.named(), calibration.file(env.snapshot())
    record = calibration.measure()
    calibration.write(path, name, record)
    return (
        f"{record.product}: {format_bytes(record.overhead)} besides tensors, {format_bytes(record.kept)} of libraries' workspaces\n"
        f"stored as {name} in {path}; --device {name} or --device this uses it"
    )


_SEARCHED = (
    "Rank the ways to run this many samples per update; --optimizer may then be several, separated by commas. Exit code 1 if "
    "nothing is sure to fit."
)
_MEASURED = "Measure what a process takes on this machine's GPU besides tensors, and store it for later forecasts."
_DRAWN = "Also write an HTML page of a forecast: memory over the step and against the batch size."
_HERE = (
    "Forecast training on this GPU: h100, rtx-4090 ...; this: the machine's own; a product's name, as nvidia-smi prints it; or "
    "48GiB: some GPU with that memory."
)
_ATTENTION = "The model's attention.  [default: the model's]"
_TASK = f"The model's head: {', '.join(TASKS)}.  [default: the config's]"
_LORA = "Train PEFT's LoRA of this rank; the model itself is frozen."
_LOOP = f"What holds memory between the calls: {', '.join(LOOPS)}.  [default: plain]"
_RUN = "FOLDER is your training script, which is given ARGS."
_PLACED = (
    "Place the model in this dtype, or train its weights in it; int4 with --lora is QLoRA.  "
    "[default: what the config says]"
)

estimate = GroupedCommand(
    "estimate",
    callback=_estimate,
    aliases=EARLIER_NAMES,
    params=[
        click.Argument(["folder"], metavar="FOLDER", required=False, type=click.Path(path_type=Path)),
        click.Argument(["arguments"], metavar="[-- ARGS]...", nargs=-1),
        model_option("batch_size", "Workload"),
        model_option("sequence", "Workload", "; without --device, no tokens are counted]"),
        option("--dtype", "|".join(_DTYPES), "Running", _PLACED, _DTYPES),
        option("--inference", None, "Running", "The default: running the model.", hidden=True),
        option("--device", "NAME", "Training", _HERE),
        option("--script", None, "Training", _RUN),
        model_option("optimizer", "Training"),
        model_option("mixed_precision", "Training"),
        model_option("activation_checkpointing", "Training"),
        option("--gradient_accumulation_steps", "N", "Training", "Micro-batches per update.  [default: 1]", POSITIVE),
        option("--attention", "eager|sdpa", "Training", _ATTENTION, ("eager", "sdpa"), is_rare=True),
        option("--task", "NAME", "Training", _TASK, tuple(TASKS), is_rare=True),
        option("--lora", "r=N", "Training", _LORA, is_rare=True),
        option("--loop", "NAME", "Training", _LOOP, LOOPS, is_rare=True),
        model_option("ranks", "Training", " Goes with --strategy."),
        model_option("strategy", "Training", " over --ranks; the answer is for rank 0."),
        model_option("machine_ranks", "Training", is_rare=True),
        model_option("budget", "Training", "  [default: all of the GPU's]"),
        option("--longest", None, "Training", "Also search for the longest sequence at this batch size.", is_rare=True),
        option("--global_batch_size", "N", "Training", _SEARCHED, POSITIVE),
        option("--calibrate", None, "Training", _MEASURED, is_rare=True),
        option("--page", "FILE", "Output", _DRAWN, click.Path(path_type=Path, dir_okay=False), is_rare=True),
        JSON,
    ],
    help=_ABOUT,
    epilog=_EPILOG,
)


_ABOUT_PLAN = """Show what training MODEL takes on N ranks, for each layout, starting with the cheapest that fits.

MODEL is a folder with a transformers `config.json`, the path of such a file, a transformers model type ("llama"), or
`module:function`: a function that returns a model, or a model and a step (model -> loss). The model is prepared as in a run, but
without allocating its tensors and without other processes.
"""

_EPILOG_PLAN = examples(
    "headway plan llama/ --ranks 64                                    common layouts",
    "headway plan llama/ --ranks 16384 --strategy fsdp --strategy hsdp=8 --budget 80GB",
    "headway plan models:build --ranks 256 --strategy fsdp             one layout in full",
)


def _plan(model: str, ranks: int, strategy: tuple[str, ...], as_json: bool, **given: Any) -> None:
    for text in strategy:
        parse(text)  # a word that is no layout at all is wrong use; one that does not divide the ranks is a row
    memory = parse_bytes(given["budget"]) if given["budget"] is not None else None
    # Imported here so that the help does not wait for torch.
    from headway.planning.compare import as_dict, candidates, compare, plan, tabulate
    from headway.planning.costs import ClusterRates
    from headway.planning.optimizers import maker
    from headway.planning.outcome import describe
    from headway.planning.sources import find

    source = find(model, given["batch_size"], given["sequence"])
    cluster = ClusterRates(
        given["machine_ranks"], given["intra"] * 1e9, given["inter"] * 1e9, given["flops"] * 1e12, memory
    )
    show_progress()
    maker(given["optimizer"])  # what is wrong for every layout is an error, no row
    planned = partial(
        plan,
        source.make,
        num_ranks=ranks,
        step=source.step,
        optimizer=given["optimizer"],
        precision=given["mixed_precision"],
        tokens=source.tokens,
        kwargs_handlers=[
            PipelineOptions(given["schedule"], given["microbatches"]),
            *([ActivationCheckpointing()] if given["activation_checkpointing"] else []),
        ],
        machine_ranks=cluster.machine_ranks,
    )
    found = compare(planned, strategy or candidates(ranks, cluster.machine_ranks, source.has_plan), cluster)
    if len(strategy) == 1 and found.rows[0].plan is None:
        raise ConfigError(found.rows[0].reason)
    if as_json:
        click.echo(json.dumps(as_dict(found), indent=1))
        return
    lines = [
        f"{source.title}; {source.batch} per data shard; {given['optimizer']}; mixed precision {given['mixed_precision']}",
        f"{ranks:,} ranks, {cluster.machine_ranks} per machine, {_describe_cluster(cluster)}",
        "",
    ]
    if len(found.rows) == 1 and (row := found.rows[0]).plan is not None:
        lines += describe(row.plan, row.cost) + ([f"does not fit: {row.reason}"] if row.reason else [])
    else:
        lines += tabulate(found)
    for line in lines:
        click.echo(line)


def _describe_cluster(cluster: Any) -> str:
    memory = "" if cluster.memory is None else f"; {format_bytes(cluster.memory)} of memory per rank"
    return (
        f"{format_number(cluster.intra / 1e9)} GB/s per rank within and {format_number(cluster.inter / 1e9)} GB/s between machines, "
        f"{format_number(cluster.flops / 1e12)} TFLOP/s{memory}"
    )


_SCHEDULE = "Order of micro-batches in layouts with pp.  [default: gpipe]"
_MICROBATCHES = "Parts of a batch in layouts with pp.  [default: 2 per stage, at most one per sample]"


def _make_rate_option(name: str, metavar: str, default: float, text: str) -> GroupedOption:
    above_0 = click.FloatRange(min=0, min_open=True)
    return option(name, metavar, "Cluster", f"{text}  [default: {default:g}]", above_0, default=default)


plan = GroupedCommand(
    "plan",
    callback=_plan,
    aliases=EARLIER_NAMES,
    params=[
        click.Argument(["model"], metavar="MODEL"),
        model_option("ranks", "Run", required=True),
        model_option("strategy", "Run", "; several may be given.  [default: common layouts]", multiple=True),
        model_option("batch_size", "Run", default=1),
        model_option("sequence", "Run", "]"),
        model_option("optimizer", "Run", default="adamw"),
        model_option("mixed_precision", "Run", default="no"),
        model_option("activation_checkpointing", "Run"),
        option("--schedule", "|".join(SCHEDULES), "Run", _SCHEDULE, SCHEDULES, default="gpipe"),
        option("--microbatches", "N", "Run", _MICROBATCHES, POSITIVE),
        model_option("machine_ranks", "Cluster", default=8),
        _make_rate_option("--intra", "GB/S", 300.0, "Bandwidth of a rank within its machine."),
        _make_rate_option("--inter", "GB/S", 40.0, "Bandwidth of a rank to other machines."),
        _make_rate_option("--flops", "TFLOPS", 400.0, "TFLOP/s that a rank achieves in practice, not the peak."),
        model_option("budget", "Cluster", " Layouts that need more do not fit."),
        JSON,
    ],
    help=_ABOUT_PLAN,
    epilog=_EPILOG_PLAN,
)

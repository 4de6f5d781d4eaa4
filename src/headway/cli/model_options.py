"""Command-line options that `headway estimate` and `headway plan` share."""

from typing import Any

import click

from headway.cli.options import GroupedOption, make_option
from headway.core.config.other_library_names import explain_precision

POSITIVE = click.IntRange(min=1)

_OPTIMIZERS = (
    "adamw, adam, sgd, momentum, adagrad, rmsprop, adafactor, adamw8bit, adamw4bit, muon or none.  [default: adamw]"
)

_PRECISIONS = ("no", "bf16", "fp16")


class PrecisionChoice(click.Choice):  # type: ignore[type-arg]
    """click type for a precision. Its error message suggests a replacement for names that other libraries use."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Check and return the precision that the user typed.

        Raises:
            click.BadParameter: If it is not an allowed value. The message lists these.
        """
        if str(value).lower() not in _PRECISIONS and (hint := explain_precision(value, _PRECISIONS)):
            self.fail(f"{value!r} is not one of {', '.join(_PRECISIONS)}{hint}", param, ctx)
        return str(super().convert(value, param, ctx))


# The help text of "sequence" has no closing bracket, because each command appends its own end of the default.
_MODEL_OPTIONS = {
    "batch_size": ("N", "Samples per micro-batch on each data shard.  [default: 1]", POSITIVE),
    "sequence": ("N", "Tokens per sample.  [default: the model's maximum, up to 4096", POSITIVE),
    "optimizer": ("NAME", _OPTIMIZERS, str),
    "mixed_precision": ("no|bf16|fp16", "Precision of the forward pass.  [default: no]", PrecisionChoice(_PRECISIONS)),
    "activation_checkpointing": (None, "Keep only the inputs of blocks; recompute the rest in backward.", None),
    "ranks": ("N", "Number of processes.", POSITIVE),
    "strategy": ("LAYOUT", "ddp, fsdp, hsdp=8, tp, fsdp+tp=2 ...", str),
    "machine_ranks": ("N", "Number of ranks per machine.  [default: 8]", POSITIVE),
    "budget": ("SIZE", "Memory limit of each process, such as 20GiB.", str),
}
"""Tuples of (metavar, help text, click type), by option name. The metavar None makes the option a switch."""

EARLIER_NAMES = {
    "accumulation": "gradient_accumulation_steps",
    "precision": "mixed_precision",
    "batch": "batch_size",
    "checkpoint_activations": "activation_checkpointing",
    "memory": "budget",
    "num_tokens": "sequence",
    "recompute": "activation_checkpointing",
}
"""Current option names by their earlier names, which `estimate` and `plan` accept until the next release."""


def make_model_option(name: str, group: str, suffix: str = "", **settings: Any) -> GroupedOption:
    """Create one of the command-line options that commands about models share.

    Args:
        name: Name of the option without dashes, such as "batch_size".
        group: Heading on the help page under which the option is listed.
        suffix: Text that is appended to the option's help text. Default: "".
        settings: Other arguments of click.Option.
    """
    metavar, text, value_type = _MODEL_OPTIONS[name]
    return make_option(f"--{name}", metavar, group, text + suffix, value_type, **settings)

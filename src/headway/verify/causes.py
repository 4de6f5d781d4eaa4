"""Texts for each kind of `Blame`: the cause in one line, a change to the script that helps, and a docs page."""

from dataclasses import dataclass
from typing import Literal, NamedTuple

from headway.verify.blame import Blame


@dataclass(frozen=True)
class Cause:
    """Cause of a difference between two runs, as `headway verify` prints it.

    Attributes:
        reason: Cause in one line.
        advice: Change to the script that is likely to help.
        page: Page of the documentation, such as "data.md".
    """

    reason: str
    advice: str
    page: str


_WEIGHTING_ADVICE = (
    "divide the sum of the losses by this number, added over all ranks and micro-batches of the update "
    "(accelerator.gather(count).sum()), and multiply it by accelerator.num_processes and gradient_accumulation_steps"
)
"""Advice for a loss that is divided by a number other than the number of rows, such as a number of tokens.

It is for scripts that use Accelerate's API, whose `backward` takes no `weight`.
"""


class _PartTexts(NamedTuple):
    """Texts about a call that makes a loss depend on how the batch is divided into parts.

    The parts are the rows of the ranks, or the pieces (micro-batches) of a batch that is run again.

    Attributes:
        reason: Cause in one line, as a template for `str.format` with the names that `explain_parts` passes.
        advice: Change to the script that is likely to help.
        page: Page of the documentation, such as "data.md".
        accelerate_advice: Advice for scripts that use Accelerate's API. "": that of `advice`.
        piece_advice: Advice for pieces. "": that of `advice`.
        piece_page: Page for pieces. "": that of `page`.
    """

    reason: str
    advice: str
    page: str
    accelerate_advice: str = ""
    piece_advice: str = ""
    piece_page: str = ""


_PART_TEXTS = {
    "sum": _PartTexts(
        "the loss is a sum over rows: {call}",
        advice="let the loss be a mean, or pass reduction='sum' and weight= to accelerator.backward",
        accelerate_advice="let the loss be a mean over rows",
        page="accumulation.md",
    ),
    "tokens": _PartTexts(
        "the loss is a mean over the counted tokens of one {unit}'s rows, not over all tokens: {call}",
        advice="pass the number of counted tokens: accelerator.backward(loss, weight=count)",
        accelerate_advice=_WEIGHTING_ADVICE,
        page="accumulation.md",
    ),
    "classes": _PartTexts(
        "the loss is a weighted mean, divided by the class weights of one {unit}'s rows: {call} with weight=",
        advice="pass the sum of these weights: accelerator.backward(loss, weight=class_weights[labels].sum())",
        accelerate_advice=_WEIGHTING_ADVICE,
        page="accumulation.md",
    ),
    "count": _PartTexts(
        "the loss is divided by a number of one {unit}'s rows, which is not the number of rows: {call}",
        advice="pass this number to backward: accelerator.backward(loss, weight=count)",
        accelerate_advice=_WEIGHTING_ADVICE,
        page="accumulation.md",
    ),
    "number": _PartTexts(
        "a number{name} in {call}{values}",
        advice="let it be equal on all ranks, and do not scale the loss by the number of processes: accelerator.backward averages",
        page="accumulation.md",
        piece_advice="a value that the loop keeps must not change when a batch is replayed in micro-batches: keep it in a buffer, or "
        "update it after the step",
        piece_page="microbatching.md",
    ),
    "norm": _PartTexts(
        "BatchNorm{name} normalizes over the rows of one {unit} only{at}",
        advice="use GroupNorm, or on GPUs convert the model before prepare(): "
        "torch.nn.SyncBatchNorm.convert_sync_batchnorm(model), which has no CPU kernel",
        page="troubleshooting.md",
    ),
    "draw": _PartTexts(
        "{call} draws other random numbers on each {unit}, from a generator with another seed or state",
        advice="seed the generator with the same number on all ranks, and draw for the rows of the batch",
        page="verify.md#a-run-repeats-itself",
    ),
    "tensor": _PartTexts(
        "a tensor{name} used{at} differs between the {unit}s, and is neither in the batch nor in a prepared model",
        advice="create it from a seed that does not depend on the rank, or prepare the model that it belongs to",
        page="several_models.md",
        piece_advice="the loss function must not change state: change it after the step",
        piece_page="microbatching.md",
    ),
    "buffer": _PartTexts(
        "the buffer{name} used{at} differs between the {unit}s",
        advice="compute it from the rows of all ranks: accelerator.reduce(value, 'mean')",
        page="several_models.md",
    ),
    "mixes": _PartTexts(
        "{call} combines each row with the other rows of its {unit}, such as negatives of a contrastive loss",
        advice="gather the rows of all ranks, and compare each rank's own rows with them",
        page="evaluation.md",
        piece_page="microbatching.md",
    ),
    "selects": _PartTexts(
        "{call} selects among the rows of one {unit}",
        advice="select among the rows of all ranks: accelerator.gather(values)",
        page="evaluation.md",
    ),
    "statistic": _PartTexts(
        "{call} computes a statistic over the rows of one {unit}, and the loss depends on it",
        advice="compute it over the rows of all ranks: accelerator.reduce(value, 'mean') or accelerator.gather(values)",
        page="evaluation.md",
        piece_page="microbatching.md",
    ),
    "path": _PartTexts(
        "the script takes another path at {line} ({function}())",
        advice="let every rank make the same calls: remove conditions on the rank or the number of processes from the loss",
        page="several_models.md",
        piece_advice="the loss function must not change state or advance an iterator, because a batch may be replayed",
        piece_page="microbatching.md",
    ),
}
"""Texts for each kind of `Blame` that `blame_parts` returns."""


def explain_parts(blame: Blame, unit: Literal["rank", "piece"], *, is_accelerate: bool = False) -> Cause:
    """Return the cause of a difference between a whole batch in one process and the parts into which it was divided.

    Args:
        blame: First call that differs.
        unit: Unit into which the batch was divided: "rank" or "piece" (micro-batch).
        is_accelerate: Whether the script uses Accelerate's API, so that the advice must use it, too. Default: False.
    """
    texts = _PART_TEXTS[blame.kind]
    at = f" at {blame.line}" if blame.line else ""
    reason = texts.reason.format(
        line=blame.line,
        at=at,
        function=blame.call,
        call=f"{blame.call}(){at}",
        name=f" ({blame.name})" if blame.name else "",
        values=f" is {blame.values[0]} for the full batch and {blame.values[1]} for a {unit}" if blame.values else "",
        unit=unit,
    )
    advice, page = texts.advice, texts.page
    if is_accelerate and texts.accelerate_advice:
        advice = texts.accelerate_advice
    if unit == "piece":
        advice, page = texts.piece_advice or advice, texts.piece_page or page
    return Cause(reason, advice, page)


def explain_repeat(blame: Blame) -> str:
    """Return one line of text about the first difference between two runs that should be equal."""
    at = f" at {blame.line}" if blame.line else ""
    name = f" {blame.name}" if blame.name else ""
    values = f" is {blame.values[1]} instead of {blame.values[0]}" if blame.values else " differs"
    if blame.kind == "number":
        return f"the number{name} in {blame.call}(){at}{values}"
    shape = f": its shape{values}" if blame.values else ""
    if blame.kind in ("tensor", "model_tensor"):
        return f"the tensor{name} used{at} differs{shape}"
    if blame.kind == "draw":
        return f"{blame.call}(){at} draws other random numbers"
    if blame.kind == "path":
        return f"the two runs take different paths{at} ({blame.call}())"
    return f"{blame.call}(){at} gives another result{shape}"

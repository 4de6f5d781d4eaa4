"""Texts for each kind of `Blame`: the cause in one line, a change to the script that helps, and a docs page."""

from dataclasses import dataclass

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


def explain_parts(blame: Blame, unit: str, *, is_accelerate: bool = False) -> Cause:
    """Return the cause of a difference between a whole batch in one process and the parts into which it was divided.

    Args:
        blame: First call that differs.
        unit: Unit into which the batch was divided: "rank" or "piece" (micro-batch).
        is_accelerate: Whether the script uses Accelerate's API, so that the advice must use it, too. Default: False.
    """
    at = f" at {blame.line}" if blame.line else ""
    call = f"{blame.call}(){at}"
    name = f" ({blame.name})" if blame.name else ""
    values = f" is {blame.values[0]} for the whole batch and {blame.values[1]} for a {unit}" if blame.values else ""
    causes = {
        "sum": Cause(
            f"the loss is a sum over rows: {call}",
            "let the loss be a mean over rows"
            if is_accelerate
            else "let the loss be a mean, or pass reduction='sum' and weight= to accelerator.backward",
            "accumulation.md",
        ),
        "tokens": Cause(
            f"the loss is a mean over the counted tokens of one {unit}'s rows, not over all tokens: {call}",
            _WEIGHTING_ADVICE
            if is_accelerate
            else "pass the number of counted tokens: accelerator.backward(loss, weight=count)",
            "accumulation.md",
        ),
        "classes": Cause(
            f"the loss is a weighted mean, divided by the class weights of one {unit}'s rows: {call} with weight=",
            _WEIGHTING_ADVICE
            if is_accelerate
            else "pass the sum of these weights: accelerator.backward(loss, weight=class_weights[labels].sum())",
            "accumulation.md",
        ),
        "count": Cause(
            f"the loss is divided by a number of one {unit}'s rows, which is not the number of rows: {call}",
            _WEIGHTING_ADVICE
            if is_accelerate
            else "pass this number to backward: accelerator.backward(loss, weight=count)",
            "accumulation.md",
        ),
        "number": Cause(
            f"a number{name} in {call}{values}",
            "let it be equal on all ranks, and do not scale the loss by the number of processes: accelerator.backward averages"
            if unit == "rank"
            else "a value that the loop keeps must not change when a batch is run again in pieces: keep it in a buffer, or "
            "update it after the step",
            "accumulation.md" if unit == "rank" else "microbatching.md",
        ),
        "norm": Cause(
            f"BatchNorm{name} normalizes over the rows of one {unit} only{at}",
            "use GroupNorm, or on GPUs convert the model before prepare(): "
            "torch.nn.SyncBatchNorm.convert_sync_batchnorm(model), which has no CPU kernel",
            "troubleshooting.md",
        ),
        "draw": Cause(
            f"{call} draws other random numbers on each {unit}, from a generator with another seed or state",
            "seed the generator with the same number on all ranks, and draw for the rows of the batch",
            "verify.md#a-run-repeats-itself",
        ),
        "tensor": Cause(
            f"a tensor{name} used{at} differs between the {unit}s, and is neither in the batch nor in a prepared model",
            "create it from a seed that does not depend on the rank, or prepare the model that it belongs to"
            if unit == "rank"
            else "the loss function must not change state: change it after the step",
            "several_models.md" if unit == "rank" else "microbatching.md",
        ),
        "buffer": Cause(
            f"the buffer{name} used{at} differs between the {unit}s",
            "compute it from the rows of all ranks: accelerator.reduce(value, 'mean')",
            "several_models.md",
        ),
        "mixes": Cause(
            f"{call} combines each row with the other rows of its {unit}, such as negatives of a contrastive loss",
            "gather the rows of all ranks, and compare each rank's own rows with them",
            "evaluation.md" if unit == "rank" else "microbatching.md",
        ),
        "selects": Cause(
            f"{call} selects among the rows of one {unit}",
            "select among the rows of all ranks: accelerator.gather(values)",
            "evaluation.md",
        ),
        "statistic": Cause(
            f"{call} computes a statistic over the rows of one {unit}, and the loss depends on it",
            "compute it over the rows of all ranks: accelerator.reduce(value, 'mean') or accelerator.gather(values)",
            "evaluation.md" if unit == "rank" else "microbatching.md",
        ),
        "path": Cause(
            f"the script takes another path at {blame.line} ({blame.call}())",
            "let every rank make the same calls: remove conditions on the rank or the number of processes from the loss"
            if unit == "rank"
            else "the loss function must not change state or advance an iterator, because a batch may be run again",
            "several_models.md" if unit == "rank" else "microbatching.md",
        ),
    }
    return causes[blame.kind]


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

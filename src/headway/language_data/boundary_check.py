"""Check that a model separates the documents of packed sequences, by trying it on a few tokens.

Neither a model's class nor its signature shows whether it respects document boundaries. State-space models accept
`position_ids` among their keyword arguments and ignore them. transformers' models ignore boundaries if the batch has an
`attention_mask`, if they use a cache, or with flash attention on several rows. Hybrid models ignore them in some of
their layers. So the model itself is called on packed documents of four tokens, with the collator of the run. Its
outputs for one document are then compared:

1. The outputs must not change if the document before this one is replaced. Most models give bitwise equal outputs. In
   some, such as mixtures of experts, the rows of a batch affect each other's rounding. A control batch, in which the
   other rows are different, shows whether this is the case.
2. The outputs must equal those for the document alone. This shows whether positions start again at each document.

If rounding can differ, differences are tolerated up to a fraction of a reference change. The reference is the change in
the document's outputs when its own first token is replaced. A leak between documents takes the same path through the
model. So it causes a change of about the same size, even if the model's outputs are small.
"""

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule

from headway.core.training.evaluation_mode import use_evaluation_mode
from headway.errors import PrepareError
from headway.language_data.packing import IGNORE_INDEX, LABELS, POSITIONS, TOKENS
from headway.log import get_logger

log = get_logger(__name__)

Collate = Callable[[list[dict[str, Any]]], Mapping[str, Any]]
_LENGTH = 4
"""Number of tokens in each document of the probe."""
_SHARE, _SHARE_IN_HALF = 1e-3, 0.05
"""Tolerances in float32 and in half precision, as fractions of a reference change in a document's outputs.

The reference is the change that occurs when the document's first token is replaced.
"""
_ROUNDING, _ROUNDING_IN_HALF = 1e-5, 1e-2
"""Tolerances in float32 and in half precision, as fractions of the largest output.

They apply if the outputs for a token hardly depend on other tokens.
"""
_REMEDIES = (
    "In training each document would see parts of others. Train it without packing; or pass a PackingCollator(attention=...) whose "
    "form of the boundaries the model reads: 'position_ids' without an attention_mask and with use_cache=False, 'mask' or 'varlen'. "
    "PackingCollator(check_model=False) skips this check"
)


def check_document_boundaries(model: torch.nn.Module, collate: Collate, *, is_half: bool | None = None) -> None:
    """Raise an error if a model lets the documents of a packed sequence influence each other.

    The model is called a few times on documents of four tokens, in evaluation mode and without gradients. Afterwards
    the training mode of each module is restored. In a run with several ranks, every rank must call this function with
    the prepared model. If the outputs do not depend on earlier tokens at all, only a warning is logged.

    Args:
        model: Model, prepared or not, that is called as `model(**batch)`.
        collate: Function that makes batches of packed sequences, such as a `PackingCollator`.
        is_half: Whether the model computes in half precision. None: derived from the dtypes of its parameters.

    Raises:
        PrepareError: If documents influence each other, or positions do not start again at each document. Also if the
            model does not accept the entries of the batch, or returns neither logits nor a loss.
    """
    probe = _BoundaryProbe(model, collate)
    with use_evaluation_mode(model), torch.no_grad():
        outputs = probe.measure()
    half = _is_half(model) if is_half is None else is_half
    verdict = judge_boundaries(outputs, is_half=half)
    if verdict == "leak":
        raise PrepareError(
            f"{_name_class(model)} ignores the boundaries of packed documents: its outputs for a document change with the "
            f"document before it. {_REMEDIES}"
        )
    if verdict == "positions":
        raise PrepareError(
            f"{_name_class(model)} computes other outputs for a packed document than for the document alone: its positions do not "
            f"start again at each document, or it does not read the batch's mask as meant. {_REMEDIES}"
        )
    if verdict == "unknown":
        log.warning(
            "packing: %s's outputs do not depend on earlier tokens yet, so it is unknown whether it separates packed documents; "
            "call check_document_boundaries(model, collator) again when it has been trained for some updates",
            _name_class(model),
        )


def check_prepared_models(models: Iterable[torch.nn.Module], collate: Collate, is_half: bool | None) -> None:
    """Raise an error if a prepared model ignores the document boundaries of packed sequences.

    It is used if a loader has a `PackingCollator`. Every rank must call it. transformers' models ignore document
    boundaries while they keep a cache of keys and values. So `use_cache` in their config is set to False, as the
    Trainer does. Models whose forward does not accept `input_ids` by name are not checked.

    Args:
        models: Prepared models.
        collate: Collator of the loader.
        is_half: Whether the models compute in half precision. None: derived from the dtypes of their parameters.

    Raises:
        PrepareError: If `check_document_boundaries` rejects a model, for example because it lets packed documents
            influence each other.
    """
    for model in models:
        if TOKENS not in inspect.signature(model.forward).parameters:
            log.info(
                "packing: %s.forward has no input_ids, so it is unknown whether it separates packed documents; call "
                "check_document_boundaries(model, collate) with a function that makes its batches",
                _name_class(model),
            )
            continue
        config = getattr(model, "config", None)
        if getattr(config, "use_cache", False) is True:
            log.info("packing: use_cache=False is set in the config of %s", _name_class(model))
            config.use_cache = False  # type: ignore[union-attr]
        check_document_boundaries(model, collate, is_half=is_half)


@dataclass(frozen=True)
class ProbeOutputs:
    """Outputs of a model for one document in different contexts, which `judge_boundaries` compares.

    Outputs are logits of shape [tokens, vocabulary], or a loss of shape [1] if the model returns no logits. In all
    contexts but `alone`, the document is the second one of a packed sequence.

    Attributes:
        packed: Outputs to which the others are compared.
        after_another: Outputs if the first document of the sequence is a different one.
        other_start: Outputs if the first token of the second document is a different one.
        control: Outputs for the sequence of `packed`, in a batch whose other rows are different. They show whether
            other rows affect the rounding. None: unknown.
        alone: Outputs for a sequence of only this document. None if the model returns no logits, or cannot be called
            with `input_ids` alone.
    """

    packed: torch.Tensor
    after_another: torch.Tensor
    other_start: torch.Tensor
    control: torch.Tensor | None
    alone: torch.Tensor | None


def judge_boundaries(outputs: ProbeOutputs, is_half: bool) -> str:
    """Decide whether a model respects document boundaries.

    Args:
        outputs: Outputs of the model for one document.
        is_half: Whether the outputs were computed in half precision.

    Returns:
        "leak" if the preceding document changes the outputs. "positions" if the outputs differ from those for the
            document alone. "unknown" if the document's first token does not affect the outputs for its later tokens. ""
            if the boundaries are respected.
    """
    packed = outputs.packed
    # The first token's own output changes with the token itself, and does not show an effect on later tokens.
    later = slice(1 if len(packed) > 1 else 0, None)
    effect = _measure_difference(packed[later], outputs.other_start[later])
    rounding = float(packed.abs().max()) * (_ROUNDING_IN_HALF if is_half else _ROUNDING)
    limit = max(effect * (_SHARE_IN_HALF if is_half else _SHARE), rounding)
    is_exact = outputs.control is not None and torch.equal(packed, outputs.control)
    if _measure_difference(packed, outputs.after_another) > (0 if is_exact else limit):
        return "leak"
    if outputs.alone is not None and _measure_difference(packed, outputs.alone) > limit:
        return "positions"
    return "" if effect > 0 else "unknown"


def _measure_difference(first: torch.Tensor, second: torch.Tensor) -> float:
    found = float((first - second).abs().max())
    return found if found == found else float("inf")  # NaN must not pass as a small difference


class _BoundaryProbe:
    """Probe that calls a model on packed documents of a few tokens, to find out whether it separates them.

    Args:
        model: Model to call, in evaluation mode.
        collate: Function that makes batches of packed sequences.
    """

    def __init__(self, model: torch.nn.Module, collate: Collate) -> None:
        self._model = model
        self._collate = collate
        tokens = _choose_tokens(model)
        self._before = [tokens[number % len(tokens)] for number in range(_LENGTH)]
        self._other_before = [tokens[(number + 1) % len(tokens)] for number in range(_LENGTH)]
        self._document = [tokens[-1 - number % len(tokens)] for number in range(_LENGTH)]
        self._other_document = [tokens[-2 % len(tokens)], *self._document[1:]]

    def measure(self) -> ProbeOutputs:
        """Call the model on the probe sequences, and return the outputs for the second document of each sequence."""
        sequences = [
            _make_sequence(self._before, self._document),
            _make_sequence(self._other_before, self._document),
            _make_sequence(self._before, self._other_document),
        ]
        logits = find_logits(self._call_model(self._make_batch(sequences)), 2 * _LENGTH * len(sequences))
        if logits is None:
            losses = [self._find_loss(sequence, sequences[1]) for sequence in sequences]
            in_other_batch = self._find_loss(sequences[0], sequences[2])
            return ProbeOutputs(losses[0], losses[1], losses[2], in_other_batch, alone=None)
        packed, after_another, other_start = self._split_logits(logits)
        others = [_make_sequence(self._document, self._other_before), _make_sequence(self._other_before, self._before)]
        logits = find_logits(self._call_model(self._make_batch([sequences[0], *others])), 2 * _LENGTH * len(sequences))
        control = None if logits is None else self._split_logits(logits)[0]
        return ProbeOutputs(packed, after_another, other_start, control, self._call_alone())

    def _split_logits(self, logits: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Split logits by probe sequence, and return those of the second document in each sequence."""
        return logits.reshape(-1, 2 * _LENGTH, logits.shape[-1])[:, _LENGTH:].unbind()

    def _call_alone(self) -> torch.Tensor | None:
        alone = {TOKENS: torch.tensor([self._document], device=self._device)}
        if not _accepts_batch(self._model, alone):
            return None
        logits = find_logits(self._call_model(alone), _LENGTH)
        return None if logits is None else logits.reshape(_LENGTH, -1)

    def _find_loss(self, sequence: dict[str, Any], beside: dict[str, Any]) -> torch.Tensor:
        """Return the model's loss over the second document of a sequence, for models that return no logits.

        Args:
            sequence: Packed sequence whose second document has labels.
            beside: Packed sequence for the second row of the batch. All of its labels are replaced by -100.

        Raises:
            PrepareError: If the model returns no loss either, or does not accept the entries of the batch.
        """
        unlabeled = {**beside, LABELS: torch.full_like(beside[LABELS], IGNORE_INDEX)}
        outputs = self._call_model(self._make_batch([sequence, unlabeled], has_labels=True))
        for value in _list_values(outputs):
            if isinstance(value, torch.Tensor) and value.numel() == 1 and value.is_floating_point():
                return value.detach().float().cpu().reshape(1)
        raise PrepareError(
            f"{_name_class(self._model)} returned neither logits of shape (rows, tokens, ...) nor a loss, so it is unknown "
            "whether it separates packed documents; let its forward return one of them, or train it without packing"
        )

    @property
    def _device(self) -> torch.device:
        # In a pipeline, the parameters of other stages are on the meta device.
        devices = (parameter.device for parameter in self._model.parameters())
        return next((device for device in devices if device.type != "meta"), torch.device("cpu"))

    def _make_batch(self, sequences: list[dict[str, Any]], has_labels: bool = False) -> dict[str, Any]:
        """Return the collated sequences on the model's device, with labels only if they are needed.

        Labels are included if `has_labels` is True, or if the model cannot be called without them.

        Raises:
            PrepareError: If the model does not accept the entries of the batch.
        """
        batch = dict(self._collate(sequences))
        bare = {name: value for name, value in batch.items() if name != LABELS}
        chosen = bare if not has_labels and _accepts_batch(self._model, bare) else batch
        if not _accepts_batch(self._model, chosen):
            signature = inspect.signature(self._model.forward)
            raise PrepareError(
                f"{_name_class(self._model)}.forward{signature} cannot be called with {', '.join(chosen)}, so it cannot know where "
                f"packed documents begin. {_REMEDIES}"
            )
        return {
            name: value.to(self._device) if isinstance(value, torch.Tensor) else value for name, value in chosen.items()
        }

    def _call_model(self, batch: Mapping[str, Any]) -> Any:
        return self._model(**batch)


def _make_sequence(first: list[int], second: list[int]) -> dict[str, Any]:
    """Return a packed sequence of two documents, with labels in the second one only."""
    return {
        TOKENS: torch.tensor(first + second),
        LABELS: torch.tensor([IGNORE_INDEX] * (len(first) + 1) + second[1:]),
        POSITIONS: torch.tensor([*range(len(first)), *range(len(second))]),
    }


def find_logits(outputs: Any, num_tokens: int) -> torch.Tensor | None:
    """Return the logits of a model in float32 on the CPU, or None if it returns none.

    They are the first floating-point output that has one vector per token.

    Args:
        outputs: Outputs of a model.
        num_tokens: Number of tokens in the batch.
    """
    value: Any
    for value in _list_values(outputs):
        is_vectors = isinstance(value, torch.Tensor) and value.is_floating_point() and value.dim() > 2
        if is_vectors and value.shape[0] * value.shape[1] == num_tokens:
            logits: torch.Tensor = value.detach().float().cpu()
            return logits
    return None


def _list_values(outputs: Any) -> tuple[Any, ...]:
    """Return the outputs of a model as a tuple.

    For a mapping, its `logits` come first. An output that is not a mapping, tuple or list becomes the only item, or its
    attribute `logits` does if it exists.
    """
    if isinstance(outputs, Mapping):
        return (outputs.get("logits"), *outputs.values())
    return tuple(outputs) if isinstance(outputs, tuple | list) else (getattr(outputs, "logits", outputs),)


def _name_class(model: torch.nn.Module) -> str:
    """Return the name of the model's class, or of its original class if `fully_shard` replaced it by a subclass."""
    kinds = type(model).__mro__
    return kinds[kinds.index(FSDPModule) + 1 if FSDPModule in kinds else 0].__name__


def _accepts_batch(model: torch.nn.Module, batch: Mapping[str, Any]) -> bool:
    """Whether the model's forward can be called with the entries of a batch as keyword arguments."""
    parameters = inspect.signature(model.forward).parameters
    named = {name for name, each in parameters.items() if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)}
    takes_any = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
    is_complete = all(name in batch or parameters[name].default is not inspect.Parameter.empty for name in named)
    return is_complete and (takes_any or batch.keys() <= named)


def _choose_tokens(model: torch.nn.Module) -> list[int]:
    """Return up to twelve different token IDs that have no special meaning for the model.

    If fewer than four of the first 64 IDs qualify, the first IDs of the vocabulary are returned instead.
    """
    config = getattr(model, "config", None)
    tables = [module.num_embeddings for module in model.modules() if isinstance(module, torch.nn.Embedding)]
    num_tokens = getattr(config, "vocab_size", None) or max(tables, default=2)
    special = {getattr(config, name, None) for name in ("pad_token_id", "bos_token_id", "eos_token_id", "unk_token_id")}
    plain = [token for token in range(min(num_tokens, 64)) if token not in special and token > 3]
    return plain[:12] if len(plain) >= _LENGTH else list(range(min(num_tokens, 12)))


def _is_half(model: torch.nn.Module) -> bool:
    return any(parameter.dtype in (torch.float16, torch.bfloat16) for parameter in model.parameters())

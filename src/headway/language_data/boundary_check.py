"""Check that a model separates the documents of packed sequences, by trying it on a few tokens.

Neither a model's class nor its signature shows whether it respects document boundaries. State-space models accept
`position_ids` among their keyword arguments and ignore them. transformers' models ignore boundaries if the batch has an
`attention_mask`, if they use a cache, or with flash attention on several rows. Hybrid models ignore them in some of
their layers. So the model itself is called on packed documents of four tokens, with the collator of the run. Its
outputs for one document are then compared:

1. The outputs must not change if the document before this one is replaced. Most models give bitwise equal outputs. In
   some, such as mixtures of experts, the rows of a batch affect each other's rounding. A control batch, in which the
   other rows are different, shows whether this is the case.
2. The outputs must equal those for the document alone. This shows whether positions restart at each document.

If rounding can differ, differences are tolerated up to a fraction of a reference change. The reference is the change in
the document's outputs when its own first token is replaced. A leak between documents takes the same path through the
model. So it causes a change of about the same size, even if the model's outputs are small.
"""

import inspect
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch

from headway.core.strategies.blocks import get_class_name
from headway.core.training.evaluation_mode import use_evaluation_mode
from headway.core.training.prepared.packed_documents import is_flattening
from headway.errors import PrepareError
from headway.language_data.packing import IGNORE_INDEX, LABELS, POSITIONS, TOKENS
from headway.log import get_logger

log = get_logger(__name__)

Collate = Callable[[list[dict[str, Any]]], Mapping[str, Any]]
"""Collate function: makes a batch from a list of packed sequences."""
_LENGTH = 4
"""Number of tokens in each document of the probe."""
_EFFECT_TOLERANCE, _EFFECT_TOLERANCE_IN_HALF = 1e-3, 0.05
"""Tolerances in float32 and in half precision, as fractions of a reference change in a document's outputs.

The reference is the change that occurs when the document's first token is replaced.
"""
_ROUNDING_TOLERANCE, _ROUNDING_TOLERANCE_IN_HALF = 1e-5, 1e-2
"""Tolerances in float32 and in half precision, as fractions of the largest output.

They apply if the outputs for a token hardly depend on other tokens.
"""
_REMEDIES = (
    "In training each document would see parts of others. Train it without packing; or pass a PackingCollator(attention=...) whose "
    "form of the boundaries the model reads: 'position_ids' without an attention_mask and with use_cache=False, 'mask' or 'varlen'. "
    "PackingCollator(check_model=False), or collator.check_model = False with another collator, skips this check"
)


def check_document_boundaries(model: torch.nn.Module, collate: Collate, *, is_half: bool | None = None) -> None:
    """Raise an error if a model lets the documents of a packed sequence influence each other.

    The model is called a few times on documents of four tokens, in evaluation mode and without gradients. Afterwards
    the training mode of each module is restored. In a run with several ranks, every rank must call this function with
    the prepared model. If the outputs do not depend on earlier tokens at all, only a warning is logged. `prepare` runs
    this check for a loader with a `PackingCollator`, so call it only for other collate functions.

    Args:
        model: Model, prepared or not, that is called as `model(**batch)`.
        collate: Function that makes batches of packed sequences, such as a `PackingCollator`.
        is_half: Whether the model computes in half precision, so that larger rounding differences are accepted. None
            (the default): derived from the dtypes of its parameters.

    Raises:
        PrepareError: If documents influence each other, or positions do not restart at each document. Also if the
            model does not accept the entries of the batch, or returns neither logits nor a loss.
    """
    probe = _BoundaryProbe(model, collate)
    with use_evaluation_mode(model), torch.no_grad():
        outputs = probe.measure()
    half = _is_half(model) if is_half is None else is_half
    verdict = judge_boundaries(outputs, is_half=half)
    if verdict is BoundaryVerdict.LEAK:
        raise PrepareError(
            f"{get_class_name(model)} ignores the boundaries of packed documents: its outputs for a document change with the "
            f"document before it. {_REMEDIES}"
        )
    if verdict is BoundaryVerdict.WRONG_POSITIONS:
        raise PrepareError(
            f"{get_class_name(model)} computes other outputs for a packed document than for the document alone: its positions do not "
            f"restart at each document, or it does not read the batch's mask as meant. {_REMEDIES}"
        )
    if verdict is BoundaryVerdict.UNKNOWN:
        log.warning(
            "packing: %s's outputs do not depend on earlier tokens yet, so it is unknown whether it separates packed documents; "
            "call check_document_boundaries(model, collator) again when it has been trained for some updates",
            get_class_name(model),
        )


def check_prepared_models(
    models: Iterable[torch.nn.Module], collate: Collate, is_half: bool | None, is_error: bool = True
) -> None:
    """Raise an error if a prepared model ignores the document boundaries of packed sequences.

    It is used if a loader has a `PackingCollator` or transformers' `DataCollatorWithFlattening`. Every rank must call
    it. transformers' models ignore document boundaries while they keep a cache of keys and values. So `use_cache` in
    their config is set to False, as the Trainer does. Models whose forward does not accept `input_ids` by name are not
    checked.

    Args:
        models: Prepared models.
        collate: Collator of the loader.
        is_half: Whether the models compute in half precision. None: derived from the dtypes of their parameters.
        is_error: Whether a model that ignores boundaries is an error. False: only one warning is logged, and
            `use_cache` is left unchanged. Default: True.

    Raises:
        PrepareError: If `check_document_boundaries` rejects a model, for example because it lets packed documents
            influence each other.
    """
    collate_sequences = _collate_with_flattening(collate) if is_flattening(collate) else collate
    for model in models:
        if TOKENS not in inspect.signature(model.forward).parameters:
            log.info(
                "packing: %s.forward has no input_ids, so it is unknown whether it separates packed documents; call "
                "check_document_boundaries(model, collate) with a function that makes its batches",
                get_class_name(model),
            )
            continue
        config = getattr(model, "config", None)
        if is_error and getattr(config, "use_cache", False) is True:
            log.info("packing: use_cache=False is set in the config of %s", get_class_name(model))
            config.use_cache = False  # type: ignore[union-attr]
        try:
            check_document_boundaries(model, collate_sequences, is_half=is_half)
        except PrepareError as error:
            if is_error:
                raise
            log.warning_once("%s", error)


def _collate_with_flattening(collate: Collate) -> Collate:
    """Return a function that makes a batch from packed sequences with transformers' `DataCollatorWithFlattening`.

    That collator expects one document per item, and concatenates all of them into one row.

    Args:
        collate: Collator of transformers.
    """

    def collate_sequences(sequences: list[dict[str, Any]]) -> Mapping[str, Any]:
        documents = []
        for sequence in sequences:
            starts = (sequence[POSITIONS] == 0).nonzero().flatten().tolist()
            for start, stop in zip(starts, [*starts[1:], len(sequence[POSITIONS])]):
                documents.append({name: sequence[name][start:stop].tolist() for name in (TOKENS, LABELS)})
        return collate(documents)

    return collate_sequences


class BoundaryVerdict(Enum):
    """Result of the check whether a model separates the documents of packed sequences.

    Attributes:
        SEPARATE: The document's outputs depend neither on the preceding document nor on the packing.
        LEAK: The preceding document changes the outputs.
        WRONG_POSITIONS: The outputs differ from those for the document alone.
        UNKNOWN: The document's first token does not affect the outputs for its later tokens, so a leak would not show.
    """

    SEPARATE = "separate"
    LEAK = "leak"
    WRONG_POSITIONS = "wrong positions"
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class ProbeOutputs:
    """Outputs of a model for one document in different contexts, which `judge_boundaries` compares.

    Outputs are logits of shape [tokens, vocabulary], or a loss of shape [1] if the model returns no logits. In all
    contexts but `alone`, the document is the second one of a packed sequence.

    Attributes:
        reference: Outputs to which the others are compared.
        other_predecessor: Outputs if the first document of the sequence is a different one.
        other_first_token: Outputs if the first token of the second document is a different one.
        other_batch: Outputs for the sequence of `reference`, in a batch whose other rows are different. They show
            whether other rows affect the rounding. None: unknown.
        unpacked: Outputs for a sequence of only this document. None if the model returns no logits, or cannot be called
            with `input_ids` alone.
    """

    reference: torch.Tensor
    other_predecessor: torch.Tensor
    other_first_token: torch.Tensor
    other_batch: torch.Tensor | None
    unpacked: torch.Tensor | None


def judge_boundaries(outputs: ProbeOutputs, is_half: bool) -> BoundaryVerdict:
    """Decide from a model's outputs whether it respects document boundaries.

    Args:
        outputs: Outputs of the model for one document in different contexts.
        is_half: Whether the outputs were computed in half precision.
    """
    reference = outputs.reference
    effect_tolerance = _EFFECT_TOLERANCE_IN_HALF if is_half else _EFFECT_TOLERANCE
    rounding_tolerance = _ROUNDING_TOLERANCE_IN_HALF if is_half else _ROUNDING_TOLERANCE
    # The first token's own output changes with the token itself, and does not show an effect on later tokens.
    later_tokens = slice(1 if len(reference) > 1 else 0, None)
    effect = _measure_difference(reference[later_tokens], outputs.other_first_token[later_tokens])
    limit = max(effect * effect_tolerance, float(reference.abs().max()) * rounding_tolerance)
    has_exact_rounding = outputs.other_batch is not None and torch.equal(reference, outputs.other_batch)
    if _measure_difference(reference, outputs.other_predecessor) > (0 if has_exact_rounding else limit):
        return BoundaryVerdict.LEAK
    if outputs.unpacked is not None and _measure_difference(reference, outputs.unpacked) > limit:
        return BoundaryVerdict.WRONG_POSITIONS
    return BoundaryVerdict.SEPARATE if effect > 0 else BoundaryVerdict.UNKNOWN


def _measure_difference(one: torch.Tensor, other: torch.Tensor) -> float:
    """Return the largest absolute difference of two tensors; infinity if it is NaN, which must not pass as small."""
    difference = float((one - other).abs().max())
    return float("inf") if math.isnan(difference) else difference


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
        self._predecessor = [tokens[index % len(tokens)] for index in range(_LENGTH)]
        self._other_predecessor = [tokens[(index + 1) % len(tokens)] for index in range(_LENGTH)]
        self._document = [tokens[-1 - index % len(tokens)] for index in range(_LENGTH)]
        self._other_document = [tokens[-2 % len(tokens)], *self._document[1:]]  # only the first token differs

    def measure(self) -> ProbeOutputs:
        """Call the model on the probe sequences, and return the outputs for the second document of each sequence."""
        sequences = [
            _make_sequence(self._predecessor, self._document),
            _make_sequence(self._other_predecessor, self._document),
            _make_sequence(self._predecessor, self._other_document),
        ]
        num_tokens = 2 * _LENGTH * len(sequences)
        logits = find_logits(self._call_model(self._make_batch(sequences)), num_tokens)
        if logits is None:
            return self._measure_losses(sequences)
        reference, other_predecessor, other_first_token = self._split_logits(logits)
        other_batch = [
            sequences[0],
            _make_sequence(self._document, self._other_predecessor),
            _make_sequence(self._other_predecessor, self._predecessor),
        ]
        logits = find_logits(self._call_model(self._make_batch(other_batch)), num_tokens)
        return ProbeOutputs(
            reference=reference,
            other_predecessor=other_predecessor,
            other_first_token=other_first_token,
            other_batch=None if logits is None else self._split_logits(logits)[0],
            unpacked=self._call_unpacked(),
        )

    def _measure_losses(self, sequences: list[dict[str, Any]]) -> ProbeOutputs:
        """Return the model's losses over the second document of each sequence, for models that return no logits.

        Args:
            sequences: Sequence of the reference, with another predecessor, and with another first token.
        """
        reference, other_predecessor, other_first_token = (
            self._compute_loss(sequence, sequences[1]) for sequence in sequences
        )
        other_batch = self._compute_loss(sequences[0], sequences[2])
        return ProbeOutputs(reference, other_predecessor, other_first_token, other_batch, unpacked=None)

    def _split_logits(self, logits: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Split logits by probe sequence, and return those of the second document in each sequence."""
        return logits.reshape(-1, 2 * _LENGTH, logits.shape[-1])[:, _LENGTH:].unbind()

    def _call_unpacked(self) -> torch.Tensor | None:
        """Return the logits for the document without packing; None if the model cannot be called in this way."""
        batch = {TOKENS: torch.tensor([self._document], device=self._device)}
        if not _accepts_batch(self._model, batch):
            return None
        logits = find_logits(self._call_model(batch), _LENGTH)
        return None if logits is None else logits.reshape(_LENGTH, -1)

    def _compute_loss(self, sequence: dict[str, Any], other_row: dict[str, Any]) -> torch.Tensor:
        """Return the model's loss over the second document of a sequence, for models that return no logits.

        Args:
            sequence: Packed sequence whose second document has labels.
            other_row: Packed sequence for the second row of the batch. All of its labels are replaced by -100.

        Raises:
            PrepareError: If the model returns no loss either, or does not accept the entries of the batch.
        """
        unlabeled = {**other_row, LABELS: torch.full_like(other_row[LABELS], IGNORE_INDEX)}
        outputs = self._call_model(self._make_batch([sequence, unlabeled], has_labels=True))
        for value in _list_values(outputs):
            if isinstance(value, torch.Tensor) and value.numel() == 1 and value.is_floating_point():
                return value.detach().float().cpu().reshape(1)
        raise PrepareError(
            f"{get_class_name(self._model)} returned neither logits of shape (rows, tokens, ...) nor a loss, so it is unknown "
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
        without_labels = {name: value for name, value in batch.items() if name != LABELS}
        if not has_labels and _accepts_batch(self._model, without_labels):
            batch = without_labels
        elif not _accepts_batch(self._model, batch):
            signature = inspect.signature(self._model.forward)
            raise PrepareError(
                f"{get_class_name(self._model)}.forward{signature} cannot be called with {', '.join(batch)}, so it cannot know where "
                f"packed documents begin. {_REMEDIES}"
            )
        return {
            name: value.to(self._device) if isinstance(value, torch.Tensor) else value for name, value in batch.items()
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
        holds_vectors = isinstance(value, torch.Tensor) and value.is_floating_point() and value.dim() > 2
        if holds_vectors and value.shape[0] * value.shape[1] == num_tokens:
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


def _accepts_batch(model: torch.nn.Module, batch: Mapping[str, Any]) -> bool:
    """Whether the model's forward can be called with the entries of a batch as keyword arguments."""
    parameters = inspect.signature(model.forward).parameters
    named = {name for name, each in parameters.items() if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)}
    has_var_keyword = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
    is_complete = all(name in batch or parameters[name].default is not inspect.Parameter.empty for name in named)
    return is_complete and (has_var_keyword or batch.keys() <= named)


def _choose_tokens(model: torch.nn.Module) -> list[int]:
    """Return up to twelve different token IDs that have no special meaning for the model.

    If fewer than four of the first 64 IDs qualify, the first IDs of the vocabulary are returned instead.
    """
    config = getattr(model, "config", None)
    table_sizes = [module.num_embeddings for module in model.modules() if isinstance(module, torch.nn.Embedding)]
    vocab_size = getattr(config, "vocab_size", None) or max(table_sizes, default=2)
    special = {getattr(config, name, None) for name in ("pad_token_id", "bos_token_id", "eos_token_id", "unk_token_id")}
    # Tokenizers often use the first IDs as special ones, even if the config does not list them.
    ordinary = [token for token in range(min(vocab_size, 64)) if token not in special and token > 3]
    return ordinary[:12] if len(ordinary) >= _LENGTH else list(range(min(vocab_size, 12)))


def _is_half(model: torch.nn.Module) -> bool:
    return any(parameter.dtype in (torch.float16, torch.bfloat16) for parameter in model.parameters())

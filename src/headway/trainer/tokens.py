"""Count of the tokens in a Trainer's training batches, for `state.num_input_tokens_seen`, rates and logs."""

from collections.abc import Mapping
from typing import Any

import torch

from headway.accelerator import Accelerator
from headway.log import get_logger
from headway.trainer.callbacks import TrainerState
from headway.trainer.data import Batch

log = get_logger(__name__)


class TokenCounter:
    """Counter of the tokens in a Trainer's training batches.

    Each rank counts the tokens of its own batches in the Accelerator's throughput meter. They are added up over the
    ranks when totals are read, so no batch needs a collective.

    Args:
        accelerator: Accelerator of the training run.
        mode: `include_num_input_tokens_seen`: "all", "non_padding" or "no". With "no", `input_ids` are counted for
            rates and logs, but not in the Trainer's state.
        model: The user's model, which can name its main input as `main_input_name`.
        processing_class: Tokenizer or similar object, whose `pad_token_id` is padding if a batch has no
            `attention_mask`. None: no such object.
    """

    def __init__(self, accelerator: Accelerator, mode: str, model: torch.nn.Module, processing_class: Any) -> None:
        self._meter = accelerator.throughput
        self._mode = mode
        self._input_name = "input_ids" if mode == "no" else str(getattr(model, "main_input_name", "input_ids"))
        self._pad_token_id: int | None = getattr(processing_class, "pad_token_id", None)
        self._num_in_state = 0  # number of the meter's tokens that `state.num_input_tokens_seen` contains

    @property
    def has_state(self) -> bool:
        """Whether `state.num_input_tokens_seen` is counted."""
        return self._mode != "no"

    def start_run(self) -> None:
        """Start to count for the state, which continues its own count after a resume. Every rank must call it."""
        if self.has_state:
            self._num_in_state = self._meter.seen().get("tokens_seen", 0)

    def count_batch(self, batch: Batch, num_rows: int | None, num_valid: int | None) -> None:
        """Count the tokens of a training batch. Rows that only complete the batch do not count.

        Args:
            batch: Batch on the device.
            num_rows: Number of rows in the batch, or None if unknown.
            num_valid: Number of rows that are samples, which come first, or None if unknown.
        """
        inputs = batch.get(self._input_name) if isinstance(batch, Mapping) else None
        if not isinstance(inputs, torch.Tensor):
            if self.has_state:
                log.warning_once(
                    "include_num_input_tokens_seen=%r counts nothing: a training batch has no tensor %r. Let the model's attribute "
                    "main_input_name name the input whose tokens count",
                    self._mode,
                    self._input_name,
                )
            return
        mask = self._find_mask(batch, inputs) if self._mode == "non_padding" else None
        if num_valid is not None and num_rows == len(inputs) and num_valid < num_rows:
            inputs = inputs[:num_valid]
            mask = None if mask is None else mask[:num_valid]
        if mask is None:
            self._meter.add(tokens=inputs.numel())
            return
        tokens = mask.sum()
        self._meter.add(tokens=tokens, padding=inputs.numel() - tokens if mask.shape == inputs.shape else 0)

    def _find_mask(self, batch: Any, inputs: torch.Tensor) -> torch.Tensor | None:
        """Return a mask that is nonzero for the tokens to count, or None if padding cannot be identified.

        The mask is the batch's `attention_mask`, or is derived from the padding token. If there is neither, it returns
        None and warns once.
        """
        mask = batch.get("attention_mask")
        if isinstance(mask, torch.Tensor):
            return mask
        if self._pad_token_id is not None:
            return inputs != self._pad_token_id
        log.warning_once(
            "include_num_input_tokens_seen='non_padding' counts all tokens, because a training batch has no attention_mask and the "
            "processing_class has no pad_token_id"
        )
        return None

    def read_totals(self, state: TrainerState) -> dict[str, int]:
        """Update the state, and return the totals of samples and tokens by name. Every rank must call it."""
        totals = self._meter.seen()
        if self.has_state:
            num_tokens = totals.get("tokens_seen", 0)
            state.num_input_tokens_seen += num_tokens - self._num_in_state
            self._num_in_state = num_tokens
        return {name: value for name, value in totals.items() if name != "num_updates"}

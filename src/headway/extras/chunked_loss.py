"""Chunked loss of causal language models: the output layer and cross entropy are computed in chunks to save memory.

The logits of a batch never exist all at once.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from headway.core.strategies.blocks import get_class_name, get_unsharded_class, replace_class
from headway.core.weights.pieces import is_dtensor
from headway.errors import PrepareError, UnsupportedError
from headway.log import get_logger

log = get_logger(__name__)

_CHUNK_TOKENS = 512
"""Number of tokens per chunk.

For narrow models, torch's default is only a few tokens, which is an order of magnitude slower.
"""
_UNUSED_WARNING = (
    "chunk_loss has no effect: %s was called in training without labels=, or with return_dict=False, so it computed all logits. "
    "Pass labels= to the model and use outputs.loss, or leave chunk_loss out"
)


class ChunkedHead(nn.Linear):
    """Output layer of a language model that can leave its matrix product to the loss function.

    `chunk_loss` gives this class to the model's own output layer. A new module would not work if the model is sharded,
    because `fully_shard` keeps references to the original modules.

    Attributes:
        options: Options of `torch.nn.functional.linear_cross_entropy`.
        original_loss: Loss function of the model, for calls in which the logits are computed.
        is_deferred: Whether forward without labels returns the hidden states instead of the logits.
        hidden: Result of a deferred forward until its loss is computed, else None.
        hooks: Handles of the model's hooks, which set `is_deferred`.
    """

    options: Any
    original_loss: Callable[..., torch.Tensor]
    is_deferred: bool
    hidden: torch.Tensor | None
    hooks: tuple[RemovableHandle, ...]

    def forward(
        self, hidden: torch.Tensor, labels: torch.Tensor | None = None, ignore_index: int = -100
    ) -> torch.Tensor:
        """Return the loss, the hidden states or the logits.

        With labels, return the sum of the tokens' losses in float32, computed in chunks. Without labels, return the
        hidden states if `is_deferred`, else the logits.

        Args:
            hidden: Hidden states of shape (..., in_features).
            labels: Label of each hidden state, already shifted, of shape (...). None: no loss is computed.
            ignore_index: Label of the tokens that do not count. Default: -100.

        Raises:
            UnsupportedError: If `labels` are passed and the weight is sharded (tensor parallelism).
        """
        if labels is None:
            self.hidden = hidden if self.is_deferred else None
            return hidden if self.is_deferred else super().forward(hidden)
        if is_dtensor(self.weight):
            raise UnsupportedError(
                "chunk_loss needs the head's full weight on each rank; leave chunk_loss out under tp"
            )
        # autocast does not know linear_cross_entropy, so its inputs are cast here.
        has_autocast = torch.is_autocast_enabled(hidden.device.type)
        dtype = torch.get_autocast_dtype(hidden.device.type) if has_autocast else hidden.dtype
        weight, bias = self.weight.to(dtype), None if self.bias is None else self.bias.to(dtype)
        # torch returns a sum in the inputs' dtype, which has three digits in half precision.
        losses = nn.functional.linear_cross_entropy(
            hidden.to(dtype).flatten(0, -2), weight, labels.flatten(),
            linear_bias=bias, reduction="none", ignore_index=ignore_index, options=self.options,
        )  # fmt: skip
        return losses.sum(dtype=torch.float32)

    def loss(
        self,
        logits: torch.Tensor,
        labels: torch.Tensor,
        vocab_size: int,
        num_items_in_batch: torch.Tensor | int | None = None,
        ignore_index: int = -100,
        shift_labels: torch.Tensor | None = None,
        **loss_kwargs: Any,
    ) -> torch.Tensor:
        """Return the loss of a batch. This replaces the loss function of a transformers causal language model.

        If `forward` has returned hidden states, the loss is computed from them in chunks. If it has returned logits,
        the model's original loss function is called.

        Args:
            logits: Output of `forward`, unchanged.
            labels: Labels of the tokens, not shifted. Used if `shift_labels` is None.
            vocab_size: Number of classes. Only the original loss function uses it.
            num_items_in_batch: Number by which the sum of the losses is divided. None: the number of labels that are
                not `ignore_index`.
            ignore_index: Label of the tokens that do not count. Default: -100.
            shift_labels: Labels that are already shifted. None: `labels` are shifted by one token.
            loss_kwargs: Additional arguments of the original loss function.

        Raises:
            UnsupportedError: If the model has changed the output of `forward` before it computes the loss, or the
                weight is sharded (tensor parallelism).
        """
        if self.hidden is None:
            return self.original_loss(
                logits, labels, vocab_size, num_items_in_batch, ignore_index, shift_labels, **loss_kwargs
            )
        if logits is not self.hidden:
            raise UnsupportedError(
                "this model changes its logits after the head (a soft cap, a scale, another dtype, tp), which a loss in chunks "
                "would miss; leave chunk_loss out"
            )
        self.hidden = None
        if shift_labels is None:
            shift_labels = nn.functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
        shift_labels = shift_labels.to(logits.device)
        total: torch.Tensor = self(logits, shift_labels, ignore_index)
        if num_items_in_batch is None:
            return total / (shift_labels != ignore_index).sum()
        return total / torch.as_tensor(num_items_in_batch, device=total.device)


def chunk_loss(model: nn.Module, options: Any = None) -> nn.Module:
    """Make a transformers causal language model compute its loss in chunks, to save memory.

    The logits of a batch never exist all at once. When the model trains on `labels`, `outputs.loss` is unchanged up to
    rounding, and `outputs.logits` is None. Evaluation, generation and calls without labels are unchanged. The first call
    in training without labels causes a warning. The output layer's product is recomputed in backward. Call this
    function before `prepare`, and in `model_fn` for a forecast.

    The loss is computed by torch's `linear_cross_entropy`. The model is changed in place, on this process only, so call
    the function on every rank.

    Args:
        model: transformers model that takes `labels` and uses the loss of causal language models.
        options: A `torch.nn.LinearCrossEntropyOptions` with the chunk size and the policy for summing gradients. None
            (the default): chunks of 512 tokens, gradients summed in float32.

    Returns:
        The object that was passed as `model`, with unchanged parameter names and ties.

    Raises:
        PrepareError: If the model is not a transformers causal language model with the standard loss.
        UnsupportedError: If torch is older than 2.13.

    Example::

        model = chunk_loss(AutoModelForCausalLM.from_pretrained("gpt2"))
        optimizer = torch.optim.AdamW(model.parameters())
        model, optimizer = accelerator.prepare(model, optimizer)
        loss = model(input_ids=tokens, labels=tokens).loss
    """
    if not hasattr(nn.functional, "linear_cross_entropy"):
        raise UnsupportedError(f"chunk_loss needs torch 2.13 or newer; this is torch {torch.__version__}")
    head = _get_head(model)
    original_loss: Any = model.loss_function if head is not None else None
    if get_unsharded_class(type(head)) is not nn.Linear or getattr(original_loss, "__name__", "") != "ForCausalLMLoss":
        raise PrepareError(
            f"chunk_loss got {get_class_name(model)}; give a transformers causal language model with a linear head and its own loss, "
            "before prepare()"
        )
    if options is None:
        options = nn.LinearCrossEntropyOptions(
            batch_chunk_size=_CHUNK_TOKENS, chunking_method=None, acc_policy="accurate"
        )
    replace_class(head, ChunkedHead)
    head.options, head.original_loss, head.is_deferred, head.hidden = options, original_loss, False, None
    model.loss_function = head.loss

    def begin_forward(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        computes_loss = kwargs.get("labels") is not None and kwargs.get("return_dict") is not False
        is_trained = module.training and torch.is_grad_enabled()
        head.is_deferred = computes_loss and is_trained
        if is_trained and not computes_loss:
            log.warning_once(_UNUSED_WARNING, get_class_name(module))

    def end_forward(module: nn.Module, args: Any, outputs: Any) -> None:
        if head.is_deferred and outputs is not None:
            outputs["logits"] = None
        head.is_deferred = False

    head.hooks = (
        model.register_forward_pre_hook(begin_forward, with_kwargs=True),
        model.register_forward_hook(end_forward, always_call=True),
    )
    return model


def is_loss_chunked(model: nn.Module) -> bool:
    """Whether `chunk_loss` has changed the model."""
    return isinstance(_get_head(model), ChunkedHead)


def restore_loss(model: nn.Module) -> None:
    """Undo `chunk_loss`. The model keeps its modules and parameters.

    It must not currently be prepared by an Accelerator, but it may be sharded.

    Do nothing if `chunk_loss` has not changed the model.
    """
    head = _get_head(model)
    if not isinstance(head, ChunkedHead):
        return
    for hook in head.hooks:
        hook.remove()
    model.loss_function = head.original_loss  # type: ignore[assignment]
    for name in ("options", "original_loss", "is_deferred", "hidden", "hooks"):
        delattr(head, name)
    replace_class(head, nn.Linear)


def _get_head(model: nn.Module) -> Any:
    """Return the output layer of a transformers model, or None if it has none."""
    return model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None  # type: ignore[operator]

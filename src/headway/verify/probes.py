"""`LeakProbe`: changes parts of one batch, and checks that unrelated outputs of the model do not change.

Outputs of a row must not depend on other rows. Outputs of a document must not depend on other documents in a packed
row, and outputs of real tokens must not depend on padding. Outputs of a language model must not depend on later tokens.
The model is called in evaluation mode, without gradients.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode

from headway.core.training.evaluation_mode import use_evaluation_mode
from headway.verify.calls import get_function_name
from headway.verify.fingerprints import walk_tensors
from headway.verify.probe_tensors import are_labels, change_values, find_labels, is_mask, is_positions, replace_tensor
from headway.verify.record_types import LeakEntry
from headway.verify.script_frames import find_line

_MOST_CALLS = 2000
"""Largest number of torch calls that are searched for the origin of a leak."""
_TOLERANCE = 1e-3
"""Largest difference between outputs that count as equal, relative to the largest absolute output."""


class CrossEntropies(NamedTuple):
    """Cross entropies of a causal model's logits for its first batch, by which its first loss is tested.

    Attributes:
        with_same_tokens: Cross entropy of each position with the token of the same position, which the model has seen.
        with_next_tokens: Cross entropy of each position with the next token, as in training.
    """

    with_same_tokens: float
    with_next_tokens: float

    def judge_loss(self, loss: float) -> LeakEntry:
        """Return whether the first loss of the script is the cross entropy with tokens that the model has seen."""
        same, following = self
        is_leak = abs(loss - same) < 1e-4 * abs(same) < 0.1 * abs(same - following)
        description = "the loss compares the output of each position with the token of the same position, which the model has seen"
        return {"kind": "copy", "is_leak": is_leak, "description": description if is_leak else "", "call": ""}


class LeakProbe:
    """Test of one model for leaks: outputs that depend on parts of a batch on which they must not depend.

    Such parts are other rows, other documents in a packed row, padding, and later tokens.

    Args:
        model: Model that the script calls.
        args: Positional arguments of the script's call.
        kwargs: Keyword arguments of the script's call.
        batch: Batch from the loader, which can contain labels that the model does not get; None if there is no loader.

    Attributes:
        entries: Results, one for each kind of leak that could be tested.
        changed_buffers: Names of the persistent floating-point buffers whose values change when the model is called in
            evaluation mode. Buffers of torch's own modules are left out.
    """

    def __init__(self, model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], batch: Any) -> None:
        self._model = model
        self._args = args
        self._kwargs = kwargs
        # Path and value of each tensor in the batch.
        self._batch = [(path, leaf) for path, leaf in walk_tensors(batch) if isinstance(leaf, torch.Tensor)]
        # Outputs for the unchanged inputs.
        self._outputs: list[torch.Tensor] = []
        self._tokens: torch.Tensor | None = None
        self._labels: torch.Tensor | None = None
        self.entries: list[LeakEntry] = []
        self.changed_buffers: list[str] = []

    def test_model(self) -> None:
        """Test the model for each kind of leak that is possible with its inputs, and fill the attributes.

        `entries` stays empty if two calls with equal inputs return different outputs.
        """
        inputs = [leaf for _, leaf in walk_tensors([self._args, self._kwargs]) if isinstance(leaf, torch.Tensor)]
        num_rows = inputs[0].shape[0] if inputs and inputs[0].ndim else 0
        with _preserve_model(self._model):
            buffers = {name: each.detach().clone() for name, each in self._model.named_buffers()}
            self._outputs = self._call_model(self._args, self._kwargs)
            self.changed_buffers = self._list_changed_buffers(buffers)
            if num_rows < 1:
                return
            repeated = self._call_model(self._args, self._kwargs)
            if not all(torch.equal(one, other) for one, other in zip(self._outputs, repeated, strict=True)):
                return  # outputs are random, so a change proves nothing
            if num_rows > 1:
                self._probe_rows(inputs, num_rows)
            tokens = self._tokens = self._find_tokens(inputs)
            if tokens is not None:
                self._labels = find_labels(inputs, tokens)
                self._probe_documents(tokens, inputs)
                self._probe_padding(tokens)
                self._probe_future(tokens)

    def _list_changed_buffers(self, buffers: dict[str, torch.Tensor]) -> list[str]:
        """Return the names of the persistent floating-point buffers that differ from earlier values.

        Args:
            buffers: Earlier values of all buffers, by name.
        """
        persistent = set(self._model.state_dict())  # buffers that are not in the state dict are caches
        names = []
        for name, after in self._model.named_buffers():
            before = buffers.get(name)
            if before is None or name not in persistent or self._belongs_to_torch(name):
                continue
            if before.is_floating_point() and before.shape == after.shape and not torch.equal(before, after):
                names.append(name)
        return names

    def _belongs_to_torch(self, name: str) -> bool:
        """Whether a buffer belongs to one of torch's modules, some of which change buffers in evaluation mode."""
        owner = self._model.get_submodule(name.rpartition(".")[0])
        return type(owner).__module__.startswith("torch.")

    def _call_model(self, args: Any, kwargs: Any, *, has_scalars: bool = False) -> list[torch.Tensor]:
        """Call the model, and return its floating-point outputs. Scalars are left out by default.

        Args:
            args: Positional arguments of the model.
            kwargs: Keyword arguments of the model.
            has_scalars: Whether to return scalars, too. Default: False.
        """
        result = self._model(*args, **kwargs)
        if hasattr(result, "to_tuple"):
            result = result.to_tuple()
        return [
            leaf.detach().float()
            for _, leaf in walk_tensors(result)
            if isinstance(leaf, torch.Tensor) and (leaf.ndim or has_scalars) and leaf.is_floating_point()
        ]

    def _call_with_replacement(self, old: torch.Tensor, new: torch.Tensor) -> list[torch.Tensor]:
        """Call the model with one input replaced, and return its floating-point outputs without scalars.

        Args:
            old: Input to replace.
            new: Tensor that replaces it.
        """
        return self._call_model(replace_tensor(self._args, old, new), replace_tensor(self._kwargs, old, new))

    # ---------------------------------------------------------------- kinds of leaks

    def _probe_rows(self, inputs: list[torch.Tensor], num_rows: int) -> None:
        """Change row 0 of all inputs except masks and labels, and check that outputs of other rows do not change.

        Nothing is recorded if no output changes.

        Args:
            inputs: Input tensors of the model.
            num_rows: Number of rows of the batch.
        """
        args, kwargs = self._change_first_row(inputs, num_rows)
        outputs = []
        for before, after in zip(self._outputs, self._call_model(args, kwargs), strict=False):
            has_rows = before.shape == after.shape and before.shape[0] == num_rows
            # Outputs of shape (rows, rows, ...) compare rows with each other on purpose.
            compares_rows = before.ndim > 1 and before.shape[1] == num_rows
            if has_rows and not compares_rows:
                outputs.append((before, after))
        if all(torch.equal(before, after) for before, after in outputs):
            return
        leaking_rows = [
            row for before, after in outputs for row in range(1, num_rows) if _are_different(before[row], after[row])
        ]
        if not leaking_rows:
            self._add_entry("rows", False, "changing row 0 changes the output of row 0", "")
            return

        def is_leaking(before: torch.Tensor, after: torch.Tensor) -> bool:
            return before.shape[0] == num_rows and not torch.equal(before[1:], after[1:])

        call = self._locate_leak(args, kwargs, is_leaking)
        self._add_entry("rows", True, f"changing row 0 changes the output of row {leaking_rows[0]}", call)

    def _change_first_row(self, inputs: list[torch.Tensor], num_rows: int) -> tuple[Any, Any]:
        """Return the arguments of the model with other values in row 0 of all inputs except masks and labels.

        Args:
            inputs: Input tensors of the model.
            num_rows: Number of rows of the batch.

        Returns:
            Tuple of (positional arguments, keyword arguments).
        """
        args, kwargs = self._args, self._kwargs
        labels = {id(leaf) for path, leaf in walk_tensors(self._kwargs) if "label" in path or "target" in path}
        for tensor in inputs:
            has_rows = tensor.ndim > 0 and tensor.shape[0] == num_rows
            if has_rows and not is_mask(tensor) and id(tensor) not in labels:
                changed_tensor = change_values(tensor, (0,))
                args = replace_tensor(args, tensor, changed_tensor)
                kwargs = replace_tensor(kwargs, tensor, changed_tensor)
        return args, kwargs

    def _probe_future(self, tokens: torch.Tensor) -> None:
        """Change the last quarter of the tokens, and check that outputs at earlier positions do not change.

        If the model returns no outputs by position, check that the loss of earlier positions does not change. Nothing
        is checked if the model is not trained to predict the next token.
        """
        if not self._predicts_next_token(tokens):
            return
        length = tokens.shape[1]
        start = max(1, 3 * length // 4)
        changed_index = (slice(None), slice(start, None))
        changed_tokens = change_values(tokens, changed_index)
        change = f"changing tokens from position {start} on changes"
        pair = self._find_sequence_output(self._call_with_replacement(tokens, changed_tokens), length)
        if pair is not None:
            before, after = pair
            positions = [i for i in range(start) if _are_different(before[:, i], after[:, i])]
            is_leak, description = (
                bool(positions),
                f"{change} the output of position {positions[0] if positions else 0}",
            )
        else:
            is_unchanged_label = torch.zeros_like(tokens, dtype=torch.bool)
            is_unchanged_label[:, :start] = True
            loss_changes = self._does_loss_change(tokens, changed_index, is_unchanged_label)
            if loss_changes is None:
                return
            is_leak, description = loss_changes, f"{change} the loss of earlier positions"
        call = self._locate_position(tokens, changed_tokens, 0, start) if is_leak else ""
        self._add_entry("future", is_leak, description, call)

    def _probe_documents(self, tokens: torch.Tensor, inputs: list[torch.Tensor]) -> None:
        """Change the first document of a packed row, and check that outputs of the row's next documents do not change.

        If the model returns no outputs by position, check that the loss of the next documents does not change. Nothing
        is checked if there is no tensor of positions that shows where documents start.
        """
        candidates = [*inputs, *(leaf for _, leaf in self._batch)]
        positions = next((each for each in candidates if is_positions(each, tokens)), None)
        if positions is None:
            return
        document_starts = (positions[0] == 0).nonzero().flatten().tolist()
        if len(document_starts) < 2:
            return
        second = document_starts[1]
        changed_index = (0, slice(0, second))
        changed_tokens = change_values(tokens, changed_index)
        pair = self._find_sequence_output(self._call_with_replacement(tokens, changed_tokens), tokens.shape[1])
        if pair is not None:
            before, after = pair
            is_leak = _are_different(before[0, second:], after[0, second:])
            description = f"changing the first document of a row changes the output of the next, at position {second}"
        else:
            is_unchanged_label = torch.zeros_like(tokens, dtype=torch.bool)
            # The label of the second document's first token belongs to the last position of the first document.
            is_unchanged_label[0, second + 1 :] = True
            loss_changes = self._does_loss_change(tokens, changed_index, is_unchanged_label)
            if loss_changes is None:
                return
            is_leak = loss_changes
            description = (
                f"changing the first document of a row changes the loss of the next ones, from position {second} on"
            )
        call = self._locate_position(tokens, changed_tokens, second, None) if is_leak else ""
        self._add_entry("documents", is_leak, description, call)

    def _does_loss_change(self, tokens: torch.Tensor, index: tuple[Any, ...], is_compared: torch.Tensor) -> bool | None:
        """Return whether a change of tokens changes the loss at other positions.

        Return None if the model returns no loss, or if no label can be compared.

        Args:
            tokens: Input tokens of the model.
            index: Index of the tokens to change.
            is_compared: Mask of the labels whose loss is compared. The other labels are set to -100, which the loss
                ignores.
        """
        labels = self._labels
        if labels is None or not bool((labels[is_compared] >= 0).any()):
            return None
        masked_labels = torch.where(is_compared, labels, -100)
        args = replace_tensor(self._args, labels, masked_labels)
        kwargs = replace_tensor(self._kwargs, labels, masked_labels)
        before = self._call_model(args, kwargs, has_scalars=True)
        changed_tokens = change_values(tokens, index)
        args = replace_tensor(args, tokens, changed_tokens)
        kwargs = replace_tensor(kwargs, tokens, changed_tokens)
        after = self._call_model(args, kwargs, has_scalars=True)
        losses = [(one, other) for one, other in zip(before, after, strict=False) if not one.ndim]
        return _are_different(*losses[0]) if losses else None

    def _probe_padding(self, tokens: torch.Tensor) -> None:
        """Change tokens outside of the attention mask, and check that outputs of real tokens do not change.

        Nothing is checked if the batch has no mask that leaves out tokens.
        """
        masks = [
            leaf for path, leaf in self._batch
            if leaf.shape == tokens.shape and is_mask(leaf) and "mask" in path.lower() and not bool(leaf.bool().all())
        ]  # fmt: skip
        if not masks:
            return
        mask = masks[0].bool()
        changed_tokens = torch.where(mask, tokens, change_values(tokens, (slice(None),)))
        outputs = self._call_with_replacement(tokens, changed_tokens)
        for before, after in zip(self._outputs, outputs, strict=False):
            if before.shape != after.shape or before.shape[0] != tokens.shape[0]:
                continue
            if before.ndim > 2 and before.shape[1] == tokens.shape[1]:
                is_leak = _are_different(before[mask], after[mask])
            else:
                is_leak = _are_different(before, after)
            self._add_entry("padding", is_leak, "changing padding changes the output of real tokens")
            return

    def compute_cross_entropies(self) -> CrossEntropies | None:
        """Return two cross entropies of the model's logits: with the input tokens as labels, and with the next tokens.

        Call it after `test_model`, which tests whether the model is causal. Return None unless the model was found to
        be causal and returns logits over the vocabulary.
        """
        tokens = self._tokens
        is_causal = any(each["kind"] == "future" and not each["is_leak"] for each in self.entries)
        if tokens is None or not is_causal:
            return None
        with _preserve_model(self._model):
            outputs = self._call_model(self._args, self._kwargs)
        for output in outputs:
            if output.ndim == 3 and output.shape[:2] == tokens.shape and output.shape[2] > int(tokens.max()):
                cross_entropy = torch.nn.functional.cross_entropy
                same = cross_entropy(output.flatten(0, 1), tokens.flatten().long())
                following = cross_entropy(output[:, :-1].flatten(0, 1), tokens[:, 1:].flatten().long())
                return CrossEntropies(float(same), float(following))
        return None

    # ---------------------------------------------------------------- tokens

    def _find_tokens(self, inputs: list[torch.Tensor]) -> torch.Tensor | None:
        """Return the first input that looks like token IDs, or None if there is none.

        Token IDs are 2-D integers with at least 4 columns that are neither a mask nor positions. Narrower inputs are more
        likely class labels or pairs of indices.
        """
        for each in inputs:
            if each.ndim != 2 or each.is_floating_point() or each.shape[1] < 4 or is_mask(each):
                continue
            if not is_positions(each, each):  # with itself, because no token IDs are known yet
                return each
        return None

    def _predicts_next_token(self, tokens: torch.Tensor) -> bool:
        """Whether the model is trained to predict the next token.

        This is inferred from the labels in the batch and from the class names of the model's modules. The labels can be
        the next tokens, or, for models that shift their labels, the tokens themselves.
        """
        for _, leaf in self._batch:
            if leaf.ndim == 2 and not leaf.is_floating_point() and not is_mask(leaf) and are_labels(leaf, tokens):
                return True
        names = " ".join(type(each).__name__ for each in self._model.modules())
        return "CausalLM" in names or "LMHeadModel" in names

    def _find_sequence_output(
        self, changed_outputs: list[torch.Tensor], length: int
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return the first output of shape (rows, length, features), as a pair of its original and changed values.

        Return None if there is no such output.

        Args:
            changed_outputs: Outputs of the model for changed inputs.
            length: Number of tokens per row.
        """
        for before, after in zip(self._outputs, changed_outputs, strict=False):
            if before.shape == after.shape and before.ndim == 3 and before.shape[1] == length:
                return before, after
        return None

    def _add_entry(self, kind: str, is_leak: bool, description: str, call: str = "") -> None:
        """Add the result of a test. The description is used only if there is a leak. See `LeakEntry`."""
        description = (f"{description}: {call}" if call else description) if is_leak else ""
        self.entries.append({"kind": kind, "is_leak": is_leak, "description": description, "call": call})

    # ---------------------------------------------------------------- torch calls that leak

    def _locate_position(self, tokens: torch.Tensor, changed: torch.Tensor, start: int, end: int | None) -> str:
        """Return the first torch call whose result changes at positions that must not change, or "" if there is none.

        Args:
            tokens: Input tokens of the model.
            changed: Tokens that replace the input tokens.
            start: First position that must not change.
            end: Position after the last one that must not change. None for the end: only row 0 is then compared.
        """
        num_rows, length = tokens.shape

        rows = slice(0, 1) if end is None else slice(None)

        def select_unchanged(result: torch.Tensor) -> torch.Tensor | None:
            """Return the part of a call's result that must not change, or None if it has no dimension of positions."""
            if result.ndim == 4 and result.shape[0] == num_rows and result.shape[2] == length:
                result = result.transpose(
                    1, 2
                )  # (rows, heads, positions, features) -> (rows, positions, heads, features)
            if result.ndim < 3 or result.shape[:2] != (num_rows, length):
                return None
            if result.shape[-1] == length:  # attention scores before the mask: columns of changed positions may change
                return result[rows, start:end, ..., start:end]
            return result[rows, start:end]

        def does_leak(before: torch.Tensor, after: torch.Tensor) -> bool:
            unchanged_before, unchanged_after = select_unchanged(before), select_unchanged(after)
            if unchanged_before is None or unchanged_after is None:
                return False
            return _are_different(unchanged_before, unchanged_after)

        args, kwargs = replace_tensor(self._args, tokens, changed), replace_tensor(self._kwargs, tokens, changed)
        return self._locate_leak(args, kwargs, does_leak)

    def _locate_leak(self, args: Any, kwargs: Any, does_leak: Callable[[torch.Tensor, torch.Tensor], bool]) -> str:
        """Return the first torch call in which a changed input changes results that must not depend on it.

        The call is returned as text, such as "softmax() at train.py:12"; "" if it is unknown.

        Args:
            args: Changed positional arguments of the model.
            kwargs: Changed keyword arguments of the model.
            does_leak: Function that takes a torch call's results for the original and the changed inputs, and returns
                whether they differ where they must be equal.
        """
        calls, changed_calls = self._record_calls(self._args, self._kwargs), self._record_calls(args, kwargs)
        for call, changed_call in zip(calls, changed_calls, strict=False):
            before, after = call.result, changed_call.result
            if before.shape == after.shape and before.ndim and does_leak(before.float(), after.float()):
                return f"{call.function}() at {call.line}" if call.line else ""
        return ""

    def _record_calls(self, args: Any, kwargs: Any) -> "list[_RecordedCall]":
        """Call the model with these arguments, and return the torch calls that have a floating-point result."""
        recorder = _CallRecorder()
        with recorder:
            self._model(*args, **kwargs)
        return recorder.calls


class _RecordedCall(NamedTuple):
    """Torch call with a floating-point result.

    Attributes:
        function: Name of the function.
        line: Line of the script that makes the call; "" if it is unknown.
        result: Result, or its first item if it is a tuple.
    """

    function: str
    line: str
    result: torch.Tensor


class _CallRecorder(TorchFunctionMode):
    """Torch function mode that records the first floating-point result of each call.

    Attributes:
        calls: Recorded calls in order, at most `_MOST_CALLS`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[_RecordedCall] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call the function and record its result."""
        result = func(*args, **(kwargs or {}))
        first = result[0] if isinstance(result, tuple) and result else result
        if isinstance(first, torch.Tensor) and first.is_floating_point() and len(self.calls) < _MOST_CALLS:
            self.calls.append(_RecordedCall(get_function_name(func), find_line(), first.detach()))
        return result


@contextmanager
def _preserve_model(model: torch.nn.Module) -> Iterator[None]:
    """Return a context in which the model is in evaluation mode, without gradients.

    When the context ends, buffers, the training modes of modules and the CPU random number generator are restored.
    """
    buffers = [(each, each.detach().clone()) for each in model.buffers()]
    state = torch.get_rng_state()
    try:
        with use_evaluation_mode(model), torch.no_grad():
            yield
    finally:
        with torch.no_grad():
            for buffer, value in buffers:
                buffer.copy_(value)
        torch.set_rng_state(state)


def _are_different(before: torch.Tensor, after: torch.Tensor) -> bool:
    """Whether two tensors differ by more than rounding. Tensors without elements do not differ."""
    if not before.numel():
        return False
    size = before.abs().max()
    return bool((before - after).abs().max() > _TOLERANCE * size + 1e-6)

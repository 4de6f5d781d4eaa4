"""`LeakProbe`: changes parts of one batch, and checks that unrelated outputs of the model do not change.

Outputs of a row must not depend on other rows. Outputs of a document must not depend on other documents in a packed
row, and outputs of real tokens must not depend on padding. Outputs of a language model must not depend on later tokens.
The model is called in evaluation mode, without gradients.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from headway.core.training.evaluation_mode import use_evaluation_mode
from headway.verify.calls import find_line, get_function_name
from headway.verify.fingerprints import walk_tensors

_MOST_CALLS = 2000
"""Largest number of torch calls that are searched for the origin of a leak."""
_LOOSE = 1e-3
"""Largest difference between outputs that count as equal, relative to the largest absolute output."""


class LeakProbe:
    """Test of one model for leaks: outputs that depend on parts of a batch on which they must not depend.

    Such parts are other rows, other documents in a packed row, padding, and later tokens.

    Args:
        model: Model that the script calls.
        args: Positional arguments of the script's call.
        kwargs: Keyword arguments of the script's call.
        batch: Batch from the loader, which can contain labels that the model does not get; None if there is no loader.

    Attributes:
        findings: One dict for each kind of leak that could be tested: "kind", "leaks" (whether the model leaks),
            "where" (description of the leak, with the first torch call that leaks; "" if there is no leak), and "call"
            (this torch call; "" if it is unknown).
        changing: Names of the persistent floating-point buffers whose values change when the model is called in
            evaluation mode. Buffers of torch's own modules are left out.
    """

    def __init__(self, model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], batch: Any) -> None:
        self._model = model
        self._args = args
        self._kwargs = kwargs
        self._batch = [leaf for _, leaf in walk_tensors(batch) if isinstance(leaf, torch.Tensor)]
        self._named = [(path, leaf) for path, leaf in walk_tensors(batch) if isinstance(leaf, torch.Tensor)]
        self.findings: list[dict[str, Any]] = []
        self.changing: list[str] = []
        self._tokens: torch.Tensor | None = None
        self._labels: torch.Tensor | None = None

    def run(self) -> None:
        """Test the model for each kind of leak that is possible with its inputs, and fill `findings` and `changing`.

        `findings` stays empty if two calls with equal inputs return different outputs.
        """
        inputs = [leaf for _, leaf in walk_tensors([self._args, self._kwargs]) if isinstance(leaf, torch.Tensor)]
        with _preserve_model(self._model):
            kept = set(self._model.state_dict())  # buffers that are not in the state dict are caches
            before = {name: each.detach().clone() for name, each in self._model.named_buffers() if name in kept}
            self._base = self._call_model(self._args, self._kwargs)
            after = dict(self._model.named_buffers())
            self.changing = [
                name
                for name, value in before.items()
                if value.is_floating_point()
                and not self._is_own_of_torch(name)
                and name in after
                and value.shape == after[name].shape
                and not torch.equal(value, after[name])
            ]
            rows = inputs[0].shape[0] if inputs and inputs[0].ndim else 0
            if rows < 1:
                return
            if not all(
                torch.equal(a, b) for a, b in zip(self._base, self._call_model(self._args, self._kwargs), strict=True)
            ):
                return  # outputs are random, so a change proves nothing
            if rows > 1:
                self._probe_rows(inputs, rows)
            tokens = self._tokens = self._find_tokens(inputs)
            self._labels = None if tokens is None else _find_labels(inputs, tokens)
            if tokens is not None:
                self._probe_documents(tokens, inputs)
                self._probe_padding(tokens)
                self._probe_future(tokens)

    def _is_own_of_torch(self, name: str) -> bool:
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

    def _call_with(self, old: torch.Tensor, new: torch.Tensor) -> list[torch.Tensor]:
        """Call the model with one input replaced, and return its floating-point outputs without scalars.

        Args:
            old: Input to replace.
            new: Tensor that replaces it.
        """
        return self._call_model(_exchange_tensor(self._args, old, new), _exchange_tensor(self._kwargs, old, new))

    # ---------------------------------------------------------------- kinds of leaks

    def _probe_rows(self, inputs: list[torch.Tensor], rows: int) -> None:
        """Change row 0 of all inputs except masks and labels, and check that outputs of other rows do not change.

        Args:
            inputs: Input tensors of the model.
            rows: Number of rows of the batch.
        """
        args, kwargs = self._args, self._kwargs
        labels = [id(leaf) for path, leaf in walk_tensors(self._kwargs) if "label" in path or "target" in path]
        for each in inputs:
            if each.ndim and each.shape[0] == rows and not _is_mask(each) and id(each) not in labels:
                args, kwargs = (_exchange_tensor(tree, each, _change_at(each, (0,))) for tree in (args, kwargs))
        outputs = [
            (before, after)
            for before, after in zip(self._base, self._call_model(args, kwargs), strict=False)
            if before.shape == after.shape
            and before.shape[0] == rows
            and not (before.ndim > 1 and before.shape[1] == rows)
        ]
        if not outputs or all(torch.equal(before, after) for before, after in outputs):
            return
        leaked = next(
            (row for before, after in outputs for row in range(1, rows) if _are_different(before[row], after[row])),
            None,
        )
        place = ""
        if leaked is not None:
            place = self._locate_leak(
                args, kwargs, lambda one, other: one.shape[0] == rows and not torch.equal(one[1:], other[1:])
            )
        self._add_finding("rows", leaked is not None, f"changing row 0 changes the output of row {leaked}", place)

    def _probe_future(self, tokens: torch.Tensor) -> None:
        """Change the last quarter of the tokens, and check that outputs at earlier positions do not change.

        Nothing is checked if the model is not trained to predict the next token.
        """
        if not self._predicts_next(tokens):
            return
        length = tokens.shape[1]
        place = max(1, 3 * length // 4)
        changed_tokens = _change_at(tokens, (slice(None), slice(place, None)))
        changed = self._call_with(tokens, changed_tokens)
        for before, after in self._list_sequences(changed, length):
            seen = [at for at in range(place) if _are_different(before[:, at], after[:, at])]
            where = f"changing tokens from position {place} on changes the output of position {seen[0] if seen else 0}"
            self._add_finding(
                "future", bool(seen), where, self._locate_position(tokens, changed_tokens, seen, 0, place)
            )
            return
        kept = torch.zeros_like(tokens, dtype=torch.bool)
        kept[:, :place] = True
        leaks = self._does_loss_change(tokens, (slice(None), slice(place, None)), kept)
        if leaks is not None:
            where = f"changing tokens from position {place} on changes the loss of earlier positions"
            self._add_finding("future", leaks, where, self._locate_position(tokens, changed_tokens, leaks, 0, place))

    def _probe_documents(self, tokens: torch.Tensor, inputs: list[torch.Tensor]) -> None:
        """Change the first document of a packed row, and check that outputs of the row's next documents do not change.

        Nothing is checked if there is no tensor of positions that shows where documents start.
        """
        positions = next((each for each in (*inputs, *self._batch) if _is_positions(each, tokens)), None)
        if positions is None:
            return
        starts = (positions[0] == 0).nonzero().flatten().tolist()
        if len(starts) < 2:
            return
        second = starts[1]
        changed_tokens = _change_at(tokens, (0, slice(0, second)))
        changed = self._call_with(tokens, changed_tokens)
        for before, after in self._list_sequences(changed, tokens.shape[1]):
            leaks = _are_different(before[0, second:], after[0, second:])
            where = f"changing the first document of a row changes the output of the next, at position {second}"
            self._add_finding(
                "documents", leaks, where, self._locate_position(tokens, changed_tokens, leaks, second, None)
            )
            return
        kept = torch.zeros_like(tokens, dtype=torch.bool)
        kept[0, second + 1 :] = True
        changes = self._does_loss_change(tokens, (0, slice(0, second)), kept)
        if changes is not None:
            where = f"changing the first document of a row changes the loss of the next ones, from position {second} on"
            self._add_finding(
                "documents", changes, where, self._locate_position(tokens, changed_tokens, changes, second, None)
            )

    def _does_loss_change(self, tokens: torch.Tensor, place: tuple[Any, ...], kept: torch.Tensor) -> bool | None:
        """Return whether a change of tokens changes the loss at other positions.

        Return None if the model returns no loss, or if no label can be compared.

        Args:
            tokens: Input tokens of the model.
            place: Index of the tokens to change.
            kept: Mask of the labels whose loss is compared. The other labels are set to -100.
        """
        labels = self._labels
        if labels is None or not bool((labels[kept] >= 0).any()):
            return None
        masked = torch.where(kept, labels, -100)
        args, kwargs = (_exchange_tensor(tree, labels, masked) for tree in (self._args, self._kwargs))
        before = self._call_model(args, kwargs, has_scalars=True)
        changed = _change_at(tokens, place)
        after = self._call_model(
            _exchange_tensor(args, tokens, changed), _exchange_tensor(kwargs, tokens, changed), has_scalars=True
        )
        losses = [(one, other) for one, other in zip(before, after, strict=False) if not one.ndim]
        return _are_different(*losses[0]) if losses else None

    def _probe_padding(self, tokens: torch.Tensor) -> None:
        """Change tokens outside of the attention mask, and check that outputs of real tokens do not change."""
        masks = [
            leaf for path, leaf in self._named
            if leaf.shape == tokens.shape and _is_mask(leaf) and "mask" in path.lower() and not bool(leaf.bool().all())
        ]  # fmt: skip
        if not masks:
            return
        mask = masks[0].bool()
        changed = self._call_with(tokens, torch.where(mask, tokens, _change_at(tokens, (slice(None),))))
        for before, after in zip(self._base, changed, strict=False):
            if before.shape != after.shape or before.shape[0] != tokens.shape[0]:
                continue
            if before.ndim > 2 and before.shape[1] == tokens.shape[1]:
                before, after = before[mask], after[mask]
            self._add_finding(
                "padding", _are_different(before, after), "changing padding changes the output of real tokens"
            )
            return

    def find_targets(self) -> tuple[float, float] | None:
        """Return two cross entropies of the model's logits: with the input tokens as labels, and with the next tokens.

        Call it after `run`, which tests whether the model is causal. Return None unless the model was found to be
        causal and returns logits over the vocabulary.
        """
        tokens = self._tokens
        if tokens is None or not any(each["kind"] == "future" and not each["leaks"] for each in self.findings):
            return None
        with _preserve_model(self._model):
            outputs = self._call_model(self._args, self._kwargs)
        for each in outputs:
            if each.ndim == 3 and each.shape[:2] == tokens.shape and each.shape[2] > int(tokens.max()):
                entropy = torch.nn.functional.cross_entropy
                own = entropy(each.flatten(0, 1), tokens.flatten().long())
                following = entropy(each[:, :-1].flatten(0, 1), tokens[:, 1:].flatten().long())
                return float(own), float(following)
        return None

    # ---------------------------------------------------------------- tokens

    def _find_tokens(self, inputs: list[torch.Tensor]) -> torch.Tensor | None:
        """Return the first input that looks like token IDs: 2-D integers that are neither a mask nor positions."""
        for each in inputs:
            if each.ndim != 2 or each.is_floating_point() or each.shape[1] < 4 or _is_mask(each):
                continue
            if not _is_positions(each, each):
                return each
        return None

    def _predicts_next(self, tokens: torch.Tensor) -> bool:
        """Whether the model is trained to predict the next token.

        This is inferred from the labels in the batch and from the class names of the model's modules. The labels can be
        the next tokens, or, for models that shift their labels, the tokens themselves.
        """
        length = tokens.shape[1]
        for each in self._batch:
            if each.ndim != 2 or each.is_floating_point() or each.shape[0] != tokens.shape[0] or _is_mask(each):
                continue
            if each.shape[1] == length + 1 and torch.equal(each[:, :-1], tokens):
                return True
            if each.shape == tokens.shape and each is not tokens and not _is_positions(each, tokens):
                known = each >= 0
                if known.float().mean() < 0.5:
                    continue
                if bool((each[:, :-1][known[:, :-1]] == tokens[:, 1:][known[:, :-1]]).float().mean() > 0.95):
                    return True
                if not torch.equal(each, tokens) and bool((each == tokens)[known].all()):
                    return True
        names = " ".join(type(each).__name__ for each in self._model.modules())
        return "CausalLM" in names or "LMHeadModel" in names

    def _list_sequences(self, changed: list[torch.Tensor], length: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield pairs of (original output, changed output) for outputs of shape (rows, length, features)."""
        for before, after in zip(self._base, changed, strict=False):
            if before.shape == after.shape and before.ndim == 3 and before.shape[1] == length:
                yield before, after

    def _add_finding(self, kind: str, leaks: bool, where: str, place: str = "") -> None:
        at = f": {place}" if place else ""
        self.findings.append({"kind": kind, "leaks": leaks, "where": where + at if leaks else "", "call": place})

    # ---------------------------------------------------------------- places

    def _locate_position(
        self, tokens: torch.Tensor, changed: torch.Tensor, leaks: object, first: int, last: int | None
    ) -> str:
        """Return the first torch call whose result changes at positions that must not change, or "" if there is none.

        Args:
            tokens: Input tokens of the model.
            changed: Tokens that replace the input tokens.
            leaks: Whether the model's outputs change at positions that must not change. If False, no search is made,
                and "" is returned.
            first: First position that must not change.
            last: Position after the last one that must not change; None for the end.
        """
        if not leaks:
            return ""
        rows, length = tokens.shape

        def does_leak(one: torch.Tensor, other: torch.Tensor) -> bool:
            if one.ndim == 4 and one.shape[0] == rows and one.shape[2] == length:  # (rows, heads, positions, features)
                one, other = one.transpose(1, 2), other.transpose(1, 2)
            if one.ndim < 3 or one.shape[:2] != (rows, length):
                return False
            span = (slice(None) if last is not None else slice(0, 1), slice(first, last))
            one, other = one[span], other[span]
            if one.shape[-1] == length:  # attention scores before the mask: columns of changed positions may change
                one, other = one[..., first:last], other[..., first:last]
            return _are_different(one, other)

        args, kwargs = _exchange_tensor(self._args, tokens, changed), _exchange_tensor(self._kwargs, tokens, changed)
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
        before, after = self._record_calls(self._args, self._kwargs), self._record_calls(args, kwargs)
        for (name, line, one), (_, _, other) in zip(before, after, strict=False):
            if one.shape == other.shape and one.ndim and does_leak(one.float(), other.float()):
                return f"{name}() at {line}" if line else ""
        return ""

    def _record_calls(self, args: Any, kwargs: Any) -> list[tuple[str, str, torch.Tensor]]:
        """Call the model, and return (function, line of the script, result) of each torch call with a float result."""
        recorder = _CallRecorder()
        with recorder:
            self._model(*args, **kwargs)
        return recorder.calls


class _CallRecorder(TorchFunctionMode):
    """Torch function mode that records the first floating-point result of each call.

    Attributes:
        calls: Tuples of (function, line of the script, result).
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, str, torch.Tensor]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call the function and record its result."""
        result = func(*args, **(kwargs or {}))
        first = result[0] if isinstance(result, tuple) and result else result
        if isinstance(first, torch.Tensor) and first.is_floating_point() and len(self.calls) < _MOST_CALLS:
            self.calls.append((get_function_name(func), find_line(), first.detach()))
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


def _change_at(tensor: torch.Tensor, place: tuple[Any, ...]) -> torch.Tensor:
    """Return a copy of a tensor whose values at one index are changed.

    Integers change by 1 and stay in the tensor's range of values. Negative integers are unchanged, because labels with
    the value -100 are ignored.

    Args:
        tensor: Tensor to copy.
        place: Index of the values to change.
    """
    changed = tensor.clone()
    part = changed[place]
    if tensor.is_floating_point() or tensor.is_complex():
        changed[place] = part * -1.5 + 0.7
    elif tensor.dtype == torch.bool:
        changed[place] = ~part
    else:
        low, high = max(0, int(tensor.min())), int(tensor.max())
        other = torch.where(part >= high, part - 1 if high > low else part, part + 1).clamp(low, max(low, high))
        changed[place] = torch.where(part < 0, part, other)  # -100 marks labels that the loss ignores
    return changed


def _exchange_tensor(tree: Any, old: torch.Tensor, new: torch.Tensor) -> Any:
    """Return a copy of nested collections in which one tensor is replaced by another."""
    if tree is old:
        return new
    if isinstance(tree, Mapping):
        return {key: _exchange_tensor(value, old, new) for key, value in tree.items()}
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(_exchange_tensor(each, old, new) for each in tree))
    if isinstance(tree, list | tuple):
        return type(tree)(_exchange_tensor(each, old, new) for each in tree)
    return tree


def _find_labels(inputs: list[torch.Tensor], tokens: torch.Tensor) -> torch.Tensor | None:
    """Return the input that contains the labels, or None if there is no such input.

    Each label must equal the token at its position, or be negative, which means that the loss ignores it.
    """
    for each in inputs:
        if each is tokens or each.shape != tokens.shape or each.is_floating_point() or _is_mask(each):
            continue
        known = each >= 0
        if bool(known.any()) and bool((each == tokens)[known].all()):
            return each
    return None


def _is_mask(tensor: torch.Tensor) -> bool:
    if tensor.dtype == torch.bool:
        return True
    return not tensor.is_floating_point() and tensor.numel() > 0 and int(tensor.min()) >= 0 and int(tensor.max()) <= 1


def _is_positions(tensor: torch.Tensor, tokens: torch.Tensor) -> bool:
    """Whether a tensor has the shape of `tokens` and contains positions that count up from 0 in each document."""
    if tensor.shape != tokens.shape or tensor.is_floating_point() or tensor.ndim != 2 or tensor.shape[1] < 2:
        return False
    steps = tensor[:, 1:] - tensor[:, :-1]
    return bool(((steps == 1) | (tensor[:, 1:] == 0)).all()) and bool((tensor[:, 0] == 0).all())


def _are_different(before: torch.Tensor, after: torch.Tensor) -> bool:
    if not before.numel():
        return False
    size = before.abs().max()
    return bool((before - after).abs().max() > _LOOSE * size + 1e-6)

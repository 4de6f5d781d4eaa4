"""`MatrixOptimizer`: apply an optimizer for matrices, such as torch's Muon, to convolutions and fused experts."""

from collections.abc import Callable, Iterable
from typing import Any

import torch

from headway.errors import ConfigError

_FLATTEN = "flatten"
_BATCH = "batch"


class MatrixOptimizer(torch.optim.Optimizer):
    """Wrapper that lets an optimizer for matrices update parameters with more than two dimensions.

    The wrapped optimizer gets 2-D views. By default, a parameter with three dimensions is a batch of matrices, such as
    the weights of fused experts, and each matrix is updated separately. A parameter with four or more dimensions, such
    as the weight of a `Conv2d`, is flattened to one matrix, whose rows are its first dimension. Set the group option
    `view` to "batch" or "flatten" to change this, for example to "flatten" for a `Conv1d`. It can be prepared like any
    optimizer, also for sharded models. Biases and other vectors need a second optimizer.

    Args:
        params: Parameters or parameter groups as in torch. Each parameter needs at least two dimensions.
        make: Function that creates the wrapped optimizer from a list of parameter groups of matrices, such as
            `functools.partial(torch.optim.Muon, lr=0.02)`.

    Raises:
        ConfigError: If `params` is empty, if a parameter has fewer than two dimensions, or if `view` is neither "batch"
            nor "flatten".

    Example::

        weights = [p for p in model.parameters() if p.ndim >= 2]
        vectors = [p for p in model.parameters() if p.ndim < 2]
        muon = MatrixOptimizer(weights, functools.partial(torch.optim.Muon, lr=0.02))
        adamw = torch.optim.AdamW(vectors, lr=1e-3)
        model, muon, adamw = accelerator.prepare(model, muon, adamw)
    """

    def __init__(self, params: Iterable[Any], make: Callable[[list[dict[str, Any]]], torch.optim.Optimizer]) -> None:
        entries: list[Any] = list(params)
        if not entries:
            raise ConfigError("MatrixOptimizer got an empty parameter list; give it parameters, or parameter groups")
        groups = [dict(entry) for entry in entries] if isinstance(entries[0], dict) else [{"params": entries}]
        for group in groups:
            group["params"] = list(group["params"])
            _check_group(group)
        # The wrapped optimizer gets its matrices at each step. Its constructor gets meta tensors in place of them.
        placeholder_groups = [
            {name: value for name, value in group.items() if name not in ("params", "view")}
            | {"params": [torch.nn.Parameter(torch.empty(2, 2, device="meta")) for _ in group["params"]]}
            for group in groups
        ]
        self._inner = make(placeholder_groups)
        groups_with_defaults = [
            {**{name: value for name, value in inner_group.items() if name != "params"}, **group}
            for inner_group, group in zip(self._inner.param_groups, groups)
        ]
        super().__init__(groups_with_defaults, dict(self._inner.defaults))

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters that have gradients.

        Args:
            closure: Function that computes the loss and the gradients, or None. Default: None.

        Returns:
            Return value of the closure, or None.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        matrices_by_parameter = self._load_inner_groups()
        # Matrices are new objects in each step, so their states are kept under the parameter between steps.
        self._inner.state.clear()
        for parameter, matrices in matrices_by_parameter.items():
            states = self.state[parameter].get("matrices", [{} for _ in matrices])
            # Most optimizers initialize a parameter's state if it has no entry yet, so empty states are left out.
            self._inner.state.update({matrix: state for matrix, state in zip(matrices, states) if state})
        self._inner.step()
        for parameter, matrices in matrices_by_parameter.items():
            if not parameter.is_contiguous():  # as in channels_last: a matrix of it can be a copy
                parameter.copy_(torch.stack([matrix.detach() for matrix in matrices]).view(parameter.shape))
            self.state[parameter]["matrices"] = [self._inner.state[matrix] for matrix in matrices]
        self._inner.state.clear()
        for group, inner_group in zip(self.param_groups, self._inner.param_groups):
            group.update(_select_options(inner_group))  # the step may have changed them
            inner_group["params"] = []
        return loss

    def _load_inner_groups(self) -> dict[torch.Tensor, list[torch.nn.Parameter]]:
        """Give the wrapped optimizer the current options of all groups, and the matrices of parameters with gradients.

        Returns:
            Matrices by parameter. Parameters without a gradient are left out.
        """
        inner_groups = self._inner.param_groups
        # `add_param_group` or a load may have changed the number of groups.
        while len(inner_groups) < len(self.param_groups):
            inner_groups.append({**inner_groups[0]})
        inner_groups[len(self.param_groups) :] = []
        matrices_by_parameter: dict[torch.Tensor, list[torch.nn.Parameter]] = {}
        for group, inner_group in zip(self.param_groups, inner_groups):
            inner_group.update(_select_options(group))
            inner_group["params"] = []
            for parameter in group["params"]:
                if parameter.grad is not None:
                    matrices_by_parameter[parameter] = _list_matrices(parameter, group)
                    inner_group["params"] += matrices_by_parameter[parameter]
        return matrices_by_parameter


def _select_options(group: dict[str, Any]) -> dict[str, Any]:
    """Return the options that a group of the wrapper has in common with a group of the wrapped optimizer."""
    return {name: value for name, value in group.items() if name not in ("params", "view", "param_names")}


def _check_group(group: dict[str, Any]) -> None:
    """Raise `ConfigError` if a group's option `view` is unknown, or if a parameter has fewer than two dimensions."""
    if group.get("view") not in (None, _FLATTEN, _BATCH):
        raise ConfigError(f"view={group['view']!r}; allowed: {_BATCH!r}, {_FLATTEN!r}, or None for the usual one")
    vectors = [tuple(p.shape) for p in group["params"] if p.ndim < 2]
    if vectors:
        raise ConfigError(
            f"MatrixOptimizer got {len(vectors)} parameters with fewer than two dimensions (as {vectors[0]}); give these to another "
            "optimizer, such as AdamW"
        )


def _list_matrices(parameter: torch.Tensor, group: dict[str, Any]) -> list[torch.nn.Parameter]:
    """Return the matrices of a parameter, whose gradients are the matrices of its gradient.

    They are views of its memory if it is contiguous, and can be copies otherwise.

    Args:
        parameter: Parameter with a gradient.
        group: Parameter group, whose option `view` selects the kind of view.
    """
    grad = parameter.grad
    assert grad is not None
    default_view = _BATCH if parameter.ndim == 3 else _FLATTEN
    view = group.get("view") or default_view
    if view == _BATCH and parameter.ndim > 2:
        values = parameter.detach().flatten(0, -3).unbind(0)
        grads = grad.flatten(0, -3).unbind(0)
    else:
        values, grads = (parameter.detach().flatten(1),), (grad.flatten(1),)
    matrices = [torch.nn.Parameter(value) for value in values]
    for matrix, matrix_grad in zip(matrices, grads):
        matrix.grad = matrix_grad
    return matrices

"""Values of a run that the library measures for the report: memory use, and the gradient norm of the last clipping."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch

from headway.core.runtime.readback import Readback


class MeasuredValue(NamedTuple):
    """Value that was measured at one step.

    Attributes:
        step: Step of the run.
        name: "memory" (in bytes) or "grad_norm".
        value: The value.
    """

    step: int
    name: str
    value: float


class Measurements:
    """Measured values of a run. A value that the script logs itself is not measured.

    Args:
        measure: Function that returns "memory" in bytes and "grad_norm" (a tensor). Either can be None or missing.
    """

    def __init__(self, measure: Callable[[], Mapping[str, Any]]) -> None:
        self._measure = measure
        self._script_metrics: set[str] = set()  # "norm" and "memory", if the script logs such values
        self._last_norm: torch.Tensor | None = None  # norm that was measured last, to recognize a new one
        self._pending_norm: tuple[int, Readback] | None = None  # step, and copy of the norm to the host

    def measure(self, step: int, script_names: Iterable[str]) -> list[MeasuredValue]:
        """Measure at one step, and return all values that are on the host.

        A gradient norm is returned by the next call, so that the host does not wait for the device.

        Args:
            step: Step of the run.
            script_names: Names of the values that the script logs in this step.
        """
        values = self.finish()
        self._script_metrics |= {word for word in ("norm", "memory") for name in script_names if word in name}
        measured = self._measure()
        norm = measured.get("grad_norm")
        if type(norm) is torch.Tensor and norm is not self._last_norm and "norm" not in self._script_metrics:
            self._last_norm = norm
            self._pending_norm = (step, Readback(norm))
        memory = measured.get("memory")
        if memory is not None and "memory" not in self._script_metrics:
            values.append(MeasuredValue(step, "memory", memory))
        return values

    def finish(self) -> list[MeasuredValue]:
        """Return the gradient norm that an earlier call of `measure` has started to copy, unless it was returned already.

        Wait for its copy from the device.
        """
        pending, self._pending_norm = self._pending_norm, None
        if pending is None:
            return []
        step, readback = pending
        return [MeasuredValue(step, "grad_norm", readback.read().item())]

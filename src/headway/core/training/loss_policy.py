"""Policies that decide by which factor a loss is multiplied before its backward, and how gradients are corrected.

`windows.py` explains the formula of the default policy.
"""


class LossPolicy:
    """Policy that sets the factor by which each loss is multiplied before its backward.

    This base class averages over all items of the accumulation window on all ranks. Subclasses for other libraries'
    scripts average differently.
    """

    @property
    def weighs_losses(self) -> bool:
        """Whether the factor of a loss depends on its accumulation window.

        If so, every backward must go through `Accelerator.backward`. This is true for `LossPolicy` itself. It is false
        for subclasses, which use constant factors, so that a script may run backward itself.
        """
        return type(self) is LossPolicy

    def factor(self, weight: float, nominal_weight: float, divisor: int, num_steps: int) -> float:
        """Return the factor by which a backward multiplies its mean loss.

        Args:
            weight: Weight of the loss, such as its number of rows or tokens.
            nominal_weight: Predicted total weight of the window, by which each of its backwards divides its loss.
            divisor: Number by which DDP or another engine itself divides gradients. The factor undoes this division.
            num_steps: Micro-batches per update.
        """
        return weight * divisor / nominal_weight

    def correction(self, nominal_weight: float, total_weight: float) -> float:
        """Return the factor by which gradients are multiplied when an accumulation window closes.

        Args:
            nominal_weight: Predicted total weight, by which the backwards of the window divided their losses.
            total_weight: Sum of the weights of the window's micro-batches over all ranks.
        """
        return nominal_weight / total_weight


class ConstantDivision(LossPolicy):
    """Policy that divides every loss by the number of micro-batches per update and averages over ranks.

    The number of items that a loss covers has no effect.
    """

    def factor(self, weight: float, nominal_weight: float, divisor: int, num_steps: int) -> float:
        """Return 1 / `num_steps`."""
        return 1 / num_steps

    def correction(self, nominal_weight: float, total_weight: float) -> float:
        """Return 1, because gradients need no correction."""
        return 1.0

"""Forecast the memory of a training step without running it: trace it on fake tensors, then replay its allocations.

The optimizer's update is traced as well, because no general formula gives the size of an optimizer's state: it
depends on the tensors that the optimizer's `step` creates.
"""

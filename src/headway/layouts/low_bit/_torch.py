"""Private names of torch that the support for low-bit optimizers uses, each with the reason."""

HOOKS = "_optimizer_step_pre_hooks"
"""Name of the optimizer attribute that contains the hooks that run before each step.

torch has no public function that returns these hooks.
"""

"""Private names of torch that low-bit optimizers use, each with the reason and a possible replacement."""

HOOKS = "_optimizer_step_pre_hooks"
"""Name of the attribute of an optimizer that contains the hooks that run before its step.

torch has no public function that returns them.
"""

"""Private names of torch that updates of full parameters use, each with the reason and a possible replacement."""

LAZY_NAMES = (
    # This rank's shard of a DTensor, without autograd. `to_local()` adds a node to the graph.
    "torch.distributed.tensor:DTensor._local_tensor",
)
"""Private attributes of torch's objects that are only read where they are needed, as "module:class.name"."""

STEP_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
"""Names of the attributes of an optimizer that contain its step hooks. torch has no public function that returns them.

Hooks must run once per update, so an optimizer with hooks updates all parameters in one call.
"""
STEP_MARK = "_opt_called"
"""Name of the attribute by which torch's schedulers recognize that an optimizer has made a step.

It is set on ranks that own no parameter, whose schedulers would otherwise warn.
"""
STEP_AND_SAVE_HOOKS = (*STEP_HOOKS, "_optimizer_state_dict_pre_hooks", "_optimizer_state_dict_post_hooks")
"""Names of the hook attributes that are empty in a trial copy of an optimizer. Hooks can refer to other objects."""
LOAD_HOOKS = ("_optimizer_load_state_dict_pre_hooks", "_optimizer_load_state_dict_post_hooks")
"""Names of the attributes with the hooks of `load_state_dict`, which are empty in a trial copy of an optimizer."""

"""Private attributes of torch objects that the precision classes use, with reasons. A test checks that all exist."""

GRAD_SCALER_ATTRIBUTES = ("_scale", "_growth_tracker", "_per_optimizer_states")
"""Private attributes of `torch.amp.GradScaler` that the fp16 precision uses.

- _scale, _growth_tracker: tensors that are restored when a batch is run again. The public `state_dict` and `get_scale`
  would convert them to Python numbers and therefore wait for the device.
- _per_optimizer_states: whether an optimizer's gradients are already unscaled, and whether they were finite. There is
  no public query.
"""

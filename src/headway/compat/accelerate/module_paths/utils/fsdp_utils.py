"""Module `headway.utils.fsdp_utils`, which provides the names of `accelerate.utils.fsdp_utils`."""

from headway.compat.accelerate.provided_names.views import make_module_attributes

__getattr__, __dir__ = make_module_attributes(__name__)

"""Module `headway.data_loader`, which provides the names of `accelerate.data_loader`."""

from headway.compat.accelerate.provided_names.views import make_module_attributes

__getattr__, __dir__ = make_module_attributes(__name__)

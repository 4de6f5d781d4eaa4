"""Module `headway.utils.versions`, which provides the names of `accelerate.utils.versions`."""

from headway.compat.accelerate.provided_names.views import make_module_attributes

__getattr__, __dir__ = make_module_attributes(__name__)

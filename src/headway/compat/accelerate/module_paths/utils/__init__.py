"""Module `headway.utils`, which provides the names of `accelerate.utils`."""

from headway.compat.accelerate.provided_names.views import make_module_attributes

# The module of this name is imported here, so that a later import of it does not hide the function.
from .tqdm import tqdm as tqdm

__getattr__, __dir__ = make_module_attributes(__name__)

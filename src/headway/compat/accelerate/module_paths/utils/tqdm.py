"""Module `headway.utils.tqdm`, which provides the names of `accelerate.utils.tqdm`."""

from headway.compat.accelerate.launching.progress import tqdm as tqdm
from headway.compat.accelerate.provided_names.views import make_module_attributes

__getattr__, __dir__ = make_module_attributes(__name__)

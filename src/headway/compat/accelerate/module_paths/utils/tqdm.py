"""Module `headway.utils.tqdm`, which provides the names of `accelerate.utils.tqdm`."""

from headway.compat.accelerate.launching.progress import tqdm as tqdm
from headway.compat.accelerate.served.views import serve

__getattr__, __dir__ = serve(__name__)

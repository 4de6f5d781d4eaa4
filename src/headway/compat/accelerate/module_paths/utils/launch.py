"""Module `headway.utils.launch`, which provides the names of `accelerate.utils.launch`."""

from headway.compat.accelerate.served.views import serve

__getattr__, __dir__ = serve(__name__)

"""Module `headway.utils.operations`, which provides the names of `accelerate.utils.operations`."""

from headway.compat.accelerate.served.views import serve

__getattr__, __dir__ = serve(__name__)

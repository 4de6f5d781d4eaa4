"""Module `headway.tracking`, which provides the names of `accelerate.tracking`."""

from headway.compat.accelerate.served.views import serve

__getattr__, __dir__ = serve(__name__)

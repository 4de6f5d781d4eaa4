"""Module `headway.scheduler`, which provides the names of `accelerate.scheduler`."""

from headway.compat.accelerate.served.views import serve

__getattr__, __dir__ = serve(__name__)

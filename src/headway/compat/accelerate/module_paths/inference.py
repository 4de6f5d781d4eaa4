"""Module `headway.inference`, which provides the names of `accelerate.inference`."""

from headway.compat.accelerate.served.views import serve

__getattr__, __dir__ = serve(__name__)

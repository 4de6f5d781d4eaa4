"""Module `headway.utils.random`, which provides the names of `accelerate.utils.random`."""

from headway.compat.accelerate.served.views import serve

__getattr__, __dir__ = serve(__name__)

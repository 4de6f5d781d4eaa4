"""Module `headway.logging`, which provides the names of `accelerate.logging`."""

from headway.compat.accelerate.served.views import serve

__getattr__, __dir__ = serve(__name__)

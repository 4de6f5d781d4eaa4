"""Module `headway.big_modeling`, which provides the names of `accelerate.big_modeling`."""

from headway.compat.accelerate.served.views import serve

__getattr__, __dir__ = serve(__name__)

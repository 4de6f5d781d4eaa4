"""Module `headway.utils.modeling`, which provides the names of `accelerate.utils.modeling`."""

from headway.compat.accelerate.served.views import serve

__getattr__, __dir__ = serve(__name__)

"""Module `headway.utils.other`, which provides the names of `accelerate.utils.other`."""

from headway.compat.accelerate.served.views import serve

__getattr__, __dir__ = serve(__name__)

"""Module `headway.utils.versions`, which provides the names of `accelerate.utils.versions`."""

from headway.compat.accelerate.served.views import serve

__getattr__, __dir__ = serve(__name__)

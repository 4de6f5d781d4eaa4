"""Module `headway.utils.rich`, which provides the names of `accelerate.utils.rich`."""

from headway.compat.accelerate.served.views import serve

__getattr__, __dir__ = serve(__name__)

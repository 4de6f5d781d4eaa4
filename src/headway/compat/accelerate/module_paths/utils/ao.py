"""Module `headway.utils.ao`, which provides the names of `accelerate.utils.ao`."""

from headway.compat.accelerate.served.views import serve

__getattr__, __dir__ = serve(__name__)

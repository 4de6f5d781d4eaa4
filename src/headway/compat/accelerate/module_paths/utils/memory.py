"""Module `headway.utils.memory`, which provides the names of `accelerate.utils.memory`."""

from headway.compat.accelerate.served.views import serve

__getattr__, __dir__ = serve(__name__)

"""Module `headway.state`, which provides the names of `accelerate.state`."""

from headway.compat.accelerate.served.views import serve

__getattr__, __dir__ = serve(__name__)

"""Module `headway.hooks`, which provides the names of `accelerate.hooks`."""

from headway.compat.accelerate.served.views import serve

__getattr__, __dir__ = serve(__name__)

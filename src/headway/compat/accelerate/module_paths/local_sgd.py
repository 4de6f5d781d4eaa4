"""Module `headway.local_sgd`, which provides the names of `accelerate.local_sgd`."""

from headway.compat.accelerate.served.views import serve

__getattr__, __dir__ = serve(__name__)

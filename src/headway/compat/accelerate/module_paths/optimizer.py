"""Module `headway.optimizer`, which provides the names of `accelerate.optimizer`."""

from headway.compat.accelerate.served.views import serve

__getattr__, __dir__ = serve(__name__)

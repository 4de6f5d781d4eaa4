"""Module `headway.utils.bnb`, which provides the names of `accelerate.utils.bnb`."""

from headway.compat.accelerate.served.views import serve

__getattr__, __dir__ = serve(__name__)

"""Module `headway.utils.constants`, which provides the names of `accelerate.utils.constants`."""

from headway.compat.accelerate.served.views import serve

__getattr__, __dir__ = serve(__name__)

"""Module `headway.utils.environment`, which provides the names of `accelerate.utils.environment`."""

from headway.compat.accelerate.served.views import serve

__getattr__, __dir__ = serve(__name__)

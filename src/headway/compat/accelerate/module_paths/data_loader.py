"""Module `headway.data_loader`, which provides the names of `accelerate.data_loader`."""

from headway.compat.accelerate.served.views import serve

__getattr__, __dir__ = serve(__name__)

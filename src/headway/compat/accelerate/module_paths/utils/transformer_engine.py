"""Module `headway.utils.transformer_engine`, which provides the names of `accelerate.utils.transformer_engine`."""

from headway.compat.accelerate.served.views import serve

__getattr__, __dir__ = serve(__name__)

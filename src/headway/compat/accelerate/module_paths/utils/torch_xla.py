"""Module `headway.utils.torch_xla`, which provides the names of `accelerate.utils.torch_xla`."""

from headway.compat.accelerate.served.views import serve

__getattr__, __dir__ = serve(__name__)

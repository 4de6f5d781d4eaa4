"""Module `headway.utils.megatron_lm`, which provides the names of `accelerate.utils.megatron_lm`."""

from headway.compat.accelerate.served.views import serve

__getattr__, __dir__ = serve(__name__)

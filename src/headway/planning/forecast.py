"""x."""
from headway.planning.sources import unmasked as _u
def unmasked(model):
    return _u(model) if hasattr(model,"config") else model

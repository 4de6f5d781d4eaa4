"""How far a forecast of memory is from what a run takes."""

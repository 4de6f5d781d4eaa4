"""How a model is spread over processes, one file a strategy behind one protocol."""

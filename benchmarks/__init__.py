"""How fast fencekit is, measured beside the tools people use today."""

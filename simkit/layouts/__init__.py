"""How K and V lie in memory."""

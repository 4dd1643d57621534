"""Writing status and Events."""

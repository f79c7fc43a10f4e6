"""Scripts around the engine; nothing in it depends on them."""

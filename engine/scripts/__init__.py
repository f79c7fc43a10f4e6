"""Developer scripts. The engine itself does not depend on them."""

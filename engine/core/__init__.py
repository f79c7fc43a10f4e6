"""Code shared by all backends and the server. It imports no machine learning framework."""

"""A seeded generator of hostile requests for every route, and what watches a server meanwhile."""

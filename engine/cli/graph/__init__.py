"""`engine inspect --graph`: a model's graph and plan as text, JSON, Graphviz or SVG."""

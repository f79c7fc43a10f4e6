"""`engine inspect --graph`: a graph and its plan as text, JSON, Graphviz or SVG."""

"""`engine inspect --graph`: shows a model's graph and execution plan as text, JSON, Graphviz or
SVG.
"""

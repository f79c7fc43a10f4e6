"""Describes a model as a graph of operations and turns the graph into an execution plan, which an
executor runs. This package uses only numpy.
"""

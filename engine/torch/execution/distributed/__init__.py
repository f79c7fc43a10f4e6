"""Tensor and pipeline parallelism: one scheduler, and a group of rank processes that run its steps.

Only an engine with more than one rank imports this folder.
"""

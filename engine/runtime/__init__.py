"""The runtime that all frameworks share: scheduler, block allocation of the paged KV cache, and
engine loop. It stores no tensors and imports no ML framework.
"""

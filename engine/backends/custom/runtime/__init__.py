"""The shared runtime: scheduler, paged KV bookkeeping and the step loop. It stores no tensors and
imports no ML framework.
"""

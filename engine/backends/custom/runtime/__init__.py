"""The shared runtime: scheduler, paged KV bookkeeping and the step loop. It holds no tensors and
imports no framework.
"""

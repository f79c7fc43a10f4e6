"""The shared runtime: scheduling, paged KV bookkeeping and the step loop, with no tensor and no
framework.
"""

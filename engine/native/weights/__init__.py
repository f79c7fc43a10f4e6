"""A model's weights in the packed form that kernels read. They are packed at the first start and
then memory-mapped from a cache on disk.
"""

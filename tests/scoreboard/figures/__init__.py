"""One module per figure, or per group of figures with the same load. All modules here are
loaded.
"""

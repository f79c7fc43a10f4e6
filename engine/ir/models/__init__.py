"""Builds the graph of a model: that of decoders and that of text encoders."""

"""Accuracy of the native backend beside llama.cpp's: `accuracy.run`."""

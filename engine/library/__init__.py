"""The parts of the Python API: arguments, the embedded engine, and how answers are collected."""

"""Sandbox: parses model files in a limited child process first. Also private files and child
processes.
"""

"""Protection against damaged or hostile model files, which are first parsed in a child process with
limits. Also has helpers for private files and child processes.
"""

"""Model files are parsed in a limited child process first; files that only their owner can
write.
"""

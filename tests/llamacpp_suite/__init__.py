"""Runs llama.cpp's own server tests against our server. Nothing in them is changed.

The tests start a server by the program that `LLAMA_SERVER_BIN_PATH` names. This program is
`launcher.py`, which translates the flags of llama.cpp's server to ours. docs/compatibility.md says
why tests fail, by name.
"""

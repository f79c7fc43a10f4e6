"""The frontend turns prompts into token ids and generated token ids into events, and supervises the
engine process. At a server's start it imports neither numpy nor an ML framework.
"""

"""The frontend turns prompts into token ids, turns generated token ids into events, and supervises
the engine process. When a server starts, the frontend imports neither numpy nor an ML framework.
"""

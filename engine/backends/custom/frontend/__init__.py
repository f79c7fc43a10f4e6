"""The frontend: turns prompts into token ids and token ids into events, and supervises the engine
process. Imports neither numpy nor a framework.
"""

"""Frontend process: prompts to token ids, token ids to events, and the hold on the engine process.
Imports no numpy and no framework.
"""

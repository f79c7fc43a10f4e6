"""OpenAI's chat, completions, embeddings and models, with the routes that vLLM and TGI add to
them.
"""

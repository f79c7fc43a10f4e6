"""OpenAI's chat, completions, embeddings and models APIs, plus routes that vLLM and TGI add."""

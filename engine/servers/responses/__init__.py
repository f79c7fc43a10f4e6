"""OpenAI's Responses API, with stored conversations."""

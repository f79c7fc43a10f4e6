"""Runs other engines (vLLM, SGLang) as supervised child processes and uses their OpenAI API."""

"""Other engines (vLLM, SGLang) as supervised child processes behind their OpenAI API."""

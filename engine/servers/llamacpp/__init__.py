"""The API of llama.cpp's server: native completions, infilling, templates, properties and slots."""

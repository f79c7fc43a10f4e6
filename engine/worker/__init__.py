"""The engine process: its entry point, its memory plan, and the loop for text encoders."""

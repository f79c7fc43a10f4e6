"""The same prompts through several backends: do they agree, and how fast is each?"""

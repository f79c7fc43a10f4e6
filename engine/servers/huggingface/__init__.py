"""The APIs of Text Generation Inference and Text Embeddings Inference, which `huggingface_hub`
calls.
"""

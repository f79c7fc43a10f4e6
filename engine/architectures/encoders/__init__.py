"""Text encoders as data: BERT and its descendants, and ModernBERT."""

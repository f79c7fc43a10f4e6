"""What the APIs share: admission, models, one generation's events, storage."""

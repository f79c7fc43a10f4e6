"""Model families whose layers keep states of fixed size, beside layers with keys and values."""

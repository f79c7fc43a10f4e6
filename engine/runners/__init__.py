"""What the model runners of several frameworks share."""

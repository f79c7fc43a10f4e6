"""What a part of the server costs or saves, measured with it and without it."""

"""What the server keeps for its tenants, and the jobs that it runs for them."""

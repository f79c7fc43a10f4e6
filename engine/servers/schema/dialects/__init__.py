"""The request parameters of other servers, and what happens to each of them here."""

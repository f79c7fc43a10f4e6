"""Names to `"module:attr"`, resolved on first use; other packages add entries by entry points."""

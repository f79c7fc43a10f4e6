"""Commands that inspect or change a running server: `engine admin`, `engine keys`, `engine top`."""

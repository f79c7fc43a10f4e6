"""Model runners, one folder per framework. The modules next to the folders are shared code."""

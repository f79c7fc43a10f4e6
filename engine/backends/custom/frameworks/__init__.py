"""Model runners, one folder per framework; modules beside the folders are shared by several."""

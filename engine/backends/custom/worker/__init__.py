"""Engine process: its entry point, the plan of its memory, and the loop of sentence encoders."""

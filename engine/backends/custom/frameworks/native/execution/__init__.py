"""The native model runner: turns an `ExecutionPlan` into the program of the C++ executor."""

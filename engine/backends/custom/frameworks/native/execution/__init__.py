"""The native model runner: from an `ExecutionPlan` to the program that the C++ executor runs."""

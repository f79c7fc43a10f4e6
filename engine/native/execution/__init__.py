"""The native model runner, which passes an `ExecutionPlan` to the C++ executor."""

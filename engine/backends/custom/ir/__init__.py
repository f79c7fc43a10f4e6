"""A model as a graph of operations, and the plan that an executor runs. Needs numpy alone."""

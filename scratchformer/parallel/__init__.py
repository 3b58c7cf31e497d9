"""How a step of training runs: replicas and ranks, their sums, recorded steps, precision and memory."""

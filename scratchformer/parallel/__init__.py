"""The parts of a step that know no model: replicas, ranks, their sums, recorded steps, precision and memory."""

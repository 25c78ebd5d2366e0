"""Reading a model: running sums inside hooks, streams of batches, captures."""

"""What a run will cost, before anything is spent: parameters, FLOPs, memory, time."""

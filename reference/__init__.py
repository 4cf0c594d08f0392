"""What each op means: NumPy in float64, with no torch, no triton and no cupy."""

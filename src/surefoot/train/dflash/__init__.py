"""The DFlash family: a block drafted in one pass (DFlash; DSpark with its heads)."""

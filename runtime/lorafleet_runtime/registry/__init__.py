"""The registry: one pure state machine that owns every run's state, slot, version and progress."""

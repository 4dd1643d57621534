"""kopf's part: watch events in, nothing else. No kopf finalizer, daemon, timer or annotation."""

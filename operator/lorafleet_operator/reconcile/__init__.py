"""Pure decisions: what is known about an object, and the clock, in; a plan out. No I/O, no async, no state."""

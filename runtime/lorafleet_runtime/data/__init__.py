"""A run's prompts: open a JSONL or parquet file, render and count prompts, hand out rows by index."""

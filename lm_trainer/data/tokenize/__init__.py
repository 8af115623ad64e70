"""Building caches: reading shards, encoding them, and writing the parts, in this process, in others or on Ray."""

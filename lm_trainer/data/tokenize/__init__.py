"""Builds caches: reads shards, encodes them and writes the parts, in this process, in worker processes or on Ray."""

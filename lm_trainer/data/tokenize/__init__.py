"""From text to a cache: planning, reading, encoding and writing, in one process or many."""

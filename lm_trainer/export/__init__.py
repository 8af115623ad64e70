"""Models in and out of the Hugging Face world: directories on disk, and the hub."""

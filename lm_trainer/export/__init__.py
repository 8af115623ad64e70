"""Import and export of Hugging Face models: local directories and the hub."""

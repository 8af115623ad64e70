"""Values and helpers that every other package uses. They know nothing about language models."""

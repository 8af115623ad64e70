"""The ground floor: values and helpers for every other part, without knowledge of language models."""

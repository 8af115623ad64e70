"""Evaluation of models that are there: losses on texts, comparisons, tasks."""

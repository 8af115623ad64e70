"""Evaluation of trained models: losses on texts, comparisons, tasks."""

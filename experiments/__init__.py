"""Experiments: one file a question, run from a clone as `python -m experiments.<name>`."""

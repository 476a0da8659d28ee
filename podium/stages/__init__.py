"""Stages: a step as a dataflow of what each part reads and writes."""

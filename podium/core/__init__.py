"""Batch, schema, settings, metrics, seeds, errors: what every other room stands on."""

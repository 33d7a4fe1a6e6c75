"""Runs through the Ray Jobs API: packages, attempts, drivers, supervision."""

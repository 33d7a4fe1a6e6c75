"""Layers that neighbouring ranks share."""

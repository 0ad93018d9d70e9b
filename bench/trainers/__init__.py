"""Measurements inside trainers."""

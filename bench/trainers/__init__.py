"""Trainers with and without gpuload, each a script for the environment of that trainer."""

"""The command line: inspect, prepare, doctor, demo."""

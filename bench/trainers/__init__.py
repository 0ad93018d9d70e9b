"""Start-up and batches of trainers, with and without gpuload: `python -m bench.trainers.<trainer>`."""

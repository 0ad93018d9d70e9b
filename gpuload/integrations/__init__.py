"""gpuload inside trainers. Each part is imported only by that trainer's users."""

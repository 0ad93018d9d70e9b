"""`python -m bench.gpu_record`: see bench/gpu/__main__.py."""

from bench.gpu.__main__ import main

if __name__ == "__main__":
    raise SystemExit(main())

import sys

from gpuload.cli import main

sys.exit(main())

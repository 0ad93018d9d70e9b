import sys

from gpuload.cli.main import main

sys.exit(main())

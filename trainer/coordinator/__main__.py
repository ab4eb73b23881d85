"""python -m paddlewheel.trainer.coordinator: see service.py."""

import sys

from paddlewheel.trainer.coordinator.service import main

sys.exit(main())

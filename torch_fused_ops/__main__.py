"""``python -m torch_fused_ops``."""

import sys

from torch_fused_ops.cli import main

sys.exit(main())

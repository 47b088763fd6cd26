"""``python -m torch_fused_ops``."""

import sys

from torch_fused_ops.tools.cli import main

sys.exit(main())

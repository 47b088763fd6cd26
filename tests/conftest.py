"""Caches of the tests are the tests' own, so that no run is served what another run compiled."""

import os
import tempfile

os.environ["TORCHINDUCTOR_CACHE_DIR"] = tempfile.mkdtemp(prefix="torch_fused_ops_tests_")

"""What ``import torch`` calls at its end in every program of an environment that this library is installed in.

Beside the library and not in it: importing a part of the library imports all of it, and a program that does not ask for
it is to pay for one look at the environment. At the top of the repository, so that the metadata that an installation
leaves in a clone name what can be imported there: else no torch could be imported while it is the current folder.
https://docs.pytorch.org/tutorials/unstable/python_extension_autoload.html
"""

import os


def load() -> None:
    """Import the library if ``TORCH_FUSED_OPS`` is set; ``settings/environment.py`` reads it."""
    if os.environ.get("TORCH_FUSED_OPS"):
        import torch_fused_ops  # noqa: F401

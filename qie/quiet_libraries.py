"""Other libraries, kept quiet and lean: no messages, no needless imports."""

from __future__ import annotations

import logging
import os


def quiet_imports() -> None:
    """Silence what libraries print while they are imported, about parts that nobody asked for."""
    os.environ.setdefault("DIFFUSERS_VERBOSITY", "error")
    for library in ("torchao", "bitsandbytes", "torch.utils._pytree", "torch._higher_order_ops.wrap"):
        logging.getLogger(library).setLevel(logging.ERROR)


def spare_imports() -> None:
    """In a process that only encodes: keep diffusers from importing peft and bitsandbytes with the VAE.

    It imports them wherever they are installed, which takes about as long as importing the VAE itself.
    """
    import diffusers.utils.import_utils as installed

    for package in ("peft", "bitsandbytes"):
        setattr(installed, f"_{package}_available", False)


def quiet_libraries() -> None:
    """No progress bars or advice of the libraries beside ours."""
    import diffusers.utils.logging
    import transformers.utils.logging

    for library in (diffusers.utils.logging, transformers.utils.logging):
        library.disable_progress_bar()
        library.set_verbosity_error()

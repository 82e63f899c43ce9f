"""``python -m tl_spectral``."""

from tl_spectral.cli import app

app(prog_name="tl-spectral")

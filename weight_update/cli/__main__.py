"""``python -m weight_update.cli`` is the command ``weight-update``."""

from weight_update.cli.main import main

main()

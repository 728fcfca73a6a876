"""``python -m brickline``: the command line without its script."""

from brickline.commands import main

main()

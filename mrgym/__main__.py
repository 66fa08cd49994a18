"""``python -m mrgym``: the command line, also under ``torchrun -m mrgym``."""

from mrgym.cli import main

if __name__ == "__main__":
    main()

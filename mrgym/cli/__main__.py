"""``python -m mrgym.cli``: the command line, also under ``torchrun -m mrgym.cli``."""

from mrgym.cli import main

if __name__ == "__main__":
    main()

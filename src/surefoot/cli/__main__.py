"""``python -m surefoot.cli``."""

from surefoot.cli.main import main

if __name__ == "__main__":
    main()

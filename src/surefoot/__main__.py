"""``python -m surefoot`` is the command line where the script is not on the path."""

from surefoot.cli.main import main

main()

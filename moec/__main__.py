"""`python -m moec`, and what `torchrun -m moec` starts."""

from moec.cli.app import main

main()

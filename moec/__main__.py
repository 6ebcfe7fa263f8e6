"""`python -m moec`, and what `torchrun -m moec` starts."""

from moec.cli import main

main()
